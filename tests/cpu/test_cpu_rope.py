"""RoPE on the CPU: float32 queries and keys keep their bits at positions of any size."""

import os

import preflash
import pytest
import torch
from instruction_sets import on_every_instruction_set, run_again
from preflash.testing.oracle import Pipeline, Rope, attend

HEADS, DIM = 6, 24


@pytest.mark.parametrize("rope", [Rope(), Rope(0.3, 5e5)], ids=str)
@pytest.mark.parametrize("split", [{"disable_split_kv": True}, {"fixed_split_size": 20_000}])
@pytest.mark.parametrize("qo_len", [1, 3, 19, 70])
def test_far_positions_keep_their_bits(qo_len, split, rope):
    """2^18 and more: an angle in float32 would be off by 1/64, and so would weights."""
    kv_len = 270_003
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
        # Few keys weigh: what their logits are off by stays visible.
        window_left=300,
        sm_scale=1.0,
        pos_encoding_mode="ROPE_LLAMA",
        rope_scale=rope.scale,
        rope_theta=rope.theta,
        q_data_type=torch.float32,
        **split,
    )
    out, lse = wrapper.run(q, k, v, return_lse=True)
    # A logit depends on how far apart its row and key are: the keys that any row keeps are enough.
    k, v = k[-qo_len - 300 :], v[-qo_len - 300 :]
    expected = attend(q, k, v, Pipeline(1.0, causal=True, window_left=300, rope=rope))
    torch.testing.assert_close(out.double(), expected.out, rtol=3e-5, atol=3e-5)
    torch.testing.assert_close(lse.double(), expected.lse, rtol=1e-6, atol=3e-5)


@on_every_instruction_set
def test_every_instruction_set(isa):
    """The core cases with narrower vectors than this machine's."""
    cases = os.path.join(os.path.dirname(__file__), "test_cpu_cases.py")
    run_again(isa, cases, "-k", "test_core and rope")
