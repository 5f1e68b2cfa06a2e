"""ALiBi on the CPU: float32 weights near a row's last key, however far that is from the row."""

import os

import preflash
import pytest
import torch
from instruction_sets import on_every_instruction_set, run_again
from preflash.testing.oracle import Pipeline, alibi_slopes, attend

HEADS, DIM = 6, 24


@pytest.mark.parametrize("split", [{"disable_split_kv": True}, {"fixed_split_size": 20_000}])
@pytest.mark.parametrize("soft_cap", [0.0, 20.0])
@pytest.mark.parametrize("qo_len", [1, 3, 19])
def test_far_keys_keep_their_bits(qo_len, soft_cap, split):
    """One float of a logit of 100000 has an ulp of 1/128: weights would be wrong by 0.3 %."""
    kv_len = 100_003
    generator = torch.Generator().manual_seed(qo_len)
    q = torch.randn(qo_len, HEADS, DIM, generator=generator)
    k, v = (torch.randn(kv_len, 2, DIM, generator=generator) for _ in "kv")
    wrapper = preflash.BatchPrefillWithRaggedKVCacheWrapper(
        torch.empty(64 << 20, dtype=torch.uint8), backend="cpu"
    )
    wrapper.plan(
        torch.tensor([0, qo_len], dtype=torch.int32),
        torch.tensor([0, kv_len], dtype=torch.int32),
        HEADS,
        2,
        DIM,
        causal=True,
        logits_soft_cap=soft_cap,
        pos_encoding_mode="ALIBI",
        q_data_type=torch.float32,
        **split,
    )
    out, lse = wrapper.run(q, k, v, return_lse=True)
    pipeline = Pipeline(DIM**-0.5, causal=True, soft_cap=soft_cap, slopes=alibi_slopes(HEADS))
    expected = attend(q, k, v, pipeline)
    torch.testing.assert_close(out.double(), expected.out, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(lse.double(), expected.lse, rtol=2e-7, atol=2e-5)


@on_every_instruction_set
def test_every_instruction_set(isa):
    """The core cases with narrower vectors than this machine's."""
    cases = os.path.join(os.path.dirname(__file__), "test_cpu_cases.py")
    run_again(isa, cases, "-k", "test_core and alibi")
