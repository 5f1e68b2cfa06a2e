"""Runs of wrappers that skip tiles, at lengths that fill a GPU. The options are in
tests/api/_wrappers/test_skipping.py, which runs on GPUs too."""

import math

import preflash
import pytest
import torch
from backends import on_every_backend
from preflash.testing import runner
from preflash.testing.inputs import indptr

pytestmark = pytest.mark.gpu

FACTOR = "skip_softmax_threshold_scale_factor"
QO_LENS, KV_LENS = (4096, 1000), (16384, 8192)
NUM_HEADS, NUM_KV_HEADS = 16, 4


def peaked(backend, head_dim):
    """Returns a planned wrapper and its tensors. Of each request, keys from 2048 to 6144 have
    logits 20 below the others."""
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(n, heads, head_dim, device="cuda", generator=generator).mul(0.1)
        for n, heads in ((sum(QO_LENS), NUM_HEADS), *[(sum(KV_LENS), NUM_KV_HEADS)] * 2)
    )
    q[..., 0], k[..., 0] = 4.0, 0.0
    for begin in (0, KV_LENS[0]):
        k[begin + 2048 : begin + 6144, :, 0] = -5.0
    q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
    buffer = runner.workspace("cuda")
    wrapper = preflash.BatchPrefillWithRaggedKVCacheWrapper(buffer, backend=backend)
    wrapper.plan(
        indptr(QO_LENS), indptr(KV_LENS), NUM_HEADS, NUM_KV_HEADS, head_dim, causal=True,
        sm_scale=1.0, q_data_type=q.dtype, disable_split_kv=True,
    )  # fmt: skip
    return wrapper, q, k, v


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@on_every_backend
def test_long_prompts(backend, head_dim):
    wrapper, q, k, v = peaked(backend, head_dim)
    dense = wrapper.run(q, k, v, return_lse=True)
    kept = v.clone()
    for begin in (0, KV_LENS[0]):
        v[begin + 2560 : begin + 5632] = math.nan
    skipped = wrapper.run(q, k, v, return_lse=True, **{FACTOR: 1.0})
    for one, other in zip(skipped, dense, strict=True):
        # Two roundings to bfloat16, of P and of the output.
        difference = (one.float() - other.float()).norm()
        assert difference <= 2.0**-7 * other.float().norm()
    for _ in range(19):
        again = wrapper.run(q, k, v, return_lse=True, **{FACTOR: 1.0})
        assert all(map(torch.equal, again, skipped))
    assert wrapper.run(q, k, v, **{FACTOR: 1e-12}).isnan().any()
    assert wrapper.run(q, k, v).isnan().any()
    again = wrapper.run(q, k, kept, return_lse=True)
    assert all(map(torch.equal, again, dense))
