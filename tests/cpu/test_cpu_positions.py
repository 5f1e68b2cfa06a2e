"""ALiBi and RoPE on the CPU keep the bits of float32 weights at positions of any size."""

import preflash
import pytest
import torch
from preflash.testing import runner
from preflash.testing.oracle import Pipeline, Rope, alibi_slopes, attend

HEADS, DIM = 6, 24
in_chunks_or_not = pytest.mark.parametrize(
    "split", [{"disable_split_kv": True}, {"fixed_split_size": 20_000}], ids=["whole", "split"]
)


def far(qo_len: int, kv_len: int, **options):
    """Returns q, k, v, and the output and LSE of the last tokens of a long request."""
    generator = torch.Generator().manual_seed(qo_len)
    q = torch.randn(qo_len, HEADS, DIM, generator=generator)
    k, v = (torch.randn(kv_len, 2, DIM, generator=generator) for _ in "kv")
    wrapper = preflash.BatchPrefillWithRaggedKVCacheWrapper(runner.workspace(), backend="cpu")
    indptrs = (torch.tensor([0, n], dtype=torch.int32) for n in (qo_len, kv_len))
    wrapper.plan(*indptrs, HEADS, 2, DIM, causal=True, q_data_type=torch.float32, **options)
    return q, k, v, *wrapper.run(q, k, v, return_lse=True)


@in_chunks_or_not
@pytest.mark.parametrize(("qo_len", "soft_cap"), [(1, 0.0), (3, 20.0), (19, 0.0)])
def test_far_keys_keep_their_bits_under_alibi(qo_len, soft_cap, split):
    """One float of a logit of 100000 has an ulp of 1/128: weights would be wrong by 0.3 %."""
    options = {"pos_encoding_mode": "ALIBI", "logits_soft_cap": soft_cap}
    q, k, v, out, lse = far(qo_len, 100_003, **options, **split)
    pipeline = Pipeline(DIM**-0.5, causal=True, soft_cap=soft_cap, slopes=alibi_slopes(HEADS))
    expected = attend(q, k, v, pipeline)
    torch.testing.assert_close(out.double(), expected.out, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(lse.double(), expected.lse, rtol=2e-7, atol=2e-5)


@in_chunks_or_not
@pytest.mark.parametrize(
    ("qo_len", "rope"), [(1, Rope()), (3, Rope(0.3, 5e5)), (19, Rope()), (70, Rope(0.3, 5e5))]
)
def test_far_positions_keep_their_bits_under_rope(qo_len, rope, split):
    """From 2^18 on an angle in float32 would be off by 1/64, and so would weights."""
    # Few keys weigh: errors of their logits stay visible.
    options = {"window_left": 300, "sm_scale": 1.0, "pos_encoding_mode": "ROPE_LLAMA"}
    options |= {"rope_scale": rope.scale, "rope_theta": rope.theta}
    q, k, v, out, lse = far(qo_len, 270_003, **options, **split)
    # A logit depends on how far apart its row and key are: the keys that any row keeps are enough.
    k, v = k[-qo_len - 300 :], v[-qo_len - 300 :]
    expected = attend(q, k, v, Pipeline(1.0, causal=True, window_left=300, rope=rope))
    torch.testing.assert_close(out.double(), expected.out, rtol=3e-5, atol=3e-5)
    torch.testing.assert_close(lse.double(), expected.lse, rtol=1e-6, atol=3e-5)
