"""Skipped tiles at lengths that fill a GPU; tests/api/_wrappers has the options."""

import functools
import math

import preflash
import pytest
import torch
from backends import same_bits
from preflash.testing import runner
from preflash.testing.inputs import indptr

FACTOR = "skip_softmax_threshold_scale_factor"
QO_LENS, KV_LENS = (4096, 1000), (16384, 8192)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_long_prompts(backend, head_dim, dtype):
    """Keys from 2048 to 6144 of each request have logits 20 below the others."""
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(n, heads, head_dim, device="cuda", generator=generator).mul(0.1).to(dtype)
        for n, heads in ((sum(QO_LENS), 16), *[(sum(KV_LENS), 4)] * 2)
    )
    q[..., 0], k[..., 0] = 1.0, 0.0
    kept = v.clone()
    for begin in (0, KV_LENS[0]):
        k[begin + 2048 : begin + 6144, :, 0] = -5.0
        v[begin + 2560 : begin + 5632] = math.nan
    wrapper = preflash.BatchPrefillWithRaggedKVCacheWrapper(
        runner.workspace("cuda"), backend=backend
    )
    wrapper.plan(
        indptr(QO_LENS), indptr(KV_LENS), 16, 4, head_dim, causal=True, sm_scale=4.0,
        q_data_type=q.dtype, disable_split_kv=True,
    )  # fmt: skip
    run = functools.partial(wrapper.run, q, k, return_lse=True)
    dense, skipped = run(kept), run(v, **{FACTOR: 1.0})
    for one, other in zip(skipped, dense, strict=True):
        # Two roundings to 16 bits, of P and of the output.
        difference = (one.float() - other.float()).norm()
        assert difference <= 2.0**-7 * other.float().norm()
    for _ in range(19):
        assert same_bits(run(v, **{FACTOR: 1.0}), skipped)
    assert run(v, **{FACTOR: 1e-12})[0].isnan().any()
    assert run(v)[0].isnan().any()
    assert same_bits(run(kept), dense)
