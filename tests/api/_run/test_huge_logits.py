"""Logits beyond the integers of float32, up to 1e30: right wherever float32 products are.

The products are exact, so the weights can be told from float64 however large the logits are. fa3
makes rows NaN, output and LSE, that meet a logit of FA3_LIMIT or more in base 2: never anything
else that is wrong, and never a NaN elsewhere.
"""

import math

import preflash
import pytest
import torch

HEAD_DIM = 64
KEYS = 333
TOKENS = 37
# 2^24 is where the rounding of a row's largest product passes one bit of its weights, 2^31 where it
# passes all of them.
MAGNITUDES = [1e6, 1.2e7, 1.3e8, 2.9e9, 1e12, 1e30]
LARGEST = 256.0
FA3_LIMIT = 2.0**27


def keys_of(pattern: str) -> torch.Tensor:
    """First element of each key; times 256 and the scale it is the key's logit."""
    key = torch.arange(KEYS)
    if pattern == "equal":
        return torch.full((KEYS,), LARGEST)
    if pattern == "ties":  # of four keys in three tiles; the others stay below
        return torch.where((key % 97 == 3) | (key == 131), LARGEST, LARGEST - 1)
    if pattern == "rising":  # the maximum moves with every tile, from -M over 0 to M
        return ((key // 64) - 2) / 4 * LARGEST
    if pattern == "falling":
        return (2 - (key // 64)) / 4 * LARGEST
    raise AssertionError(pattern)


def tensors(pattern: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of M, -M, 0 and ordinary logits side by side, in one warp's share of a tile."""
    q = torch.zeros(TOKENS, 4, HEAD_DIM, dtype=dtype)
    row = torch.arange(TOKENS * 4).reshape(TOKENS, 4)
    q[..., 0] = torch.tensor([256.0, -256.0, 0.0, 256.0, 128.0])[row % 5].to(dtype)
    k = torch.zeros(KEYS, 2, HEAD_DIM, dtype=dtype)
    k[..., 0] = keys_of(pattern)[:, None].to(dtype)
    v = torch.randn(KEYS, 2, HEAD_DIM, generator=torch.Generator().manual_seed(3)).to(dtype)
    return q, k, v


def attention(q, k, v, sm_scale: float, keep: torch.Tensor | None = None):
    """Float64, [tokens, heads, head_dim] and base-2 LSE."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    logits = torch.einsum("qhd,khd->hqk", q, k) * sm_scale
    if keep is not None:
        logits = logits.masked_fill(~keep, -math.inf)
    out = torch.einsum("hqk,khd->qhd", logits.softmax(-1), v)
    return out, logits.logsumexp(-1).T / math.log(2.0)


def assert_right(target, got, expected, largest: torch.Tensor):
    """largest: [tokens, heads], the largest size of any logit of a row, in base 2."""
    out, lse = (x.cpu().double() for x in got)
    expected_out, expected_lse = expected
    if target.backend == "fa3":
        refused = lse.isnan()
        assert torch.equal(refused, out.isnan().all(-1))
        assert not bool((refused & (largest < FA3_LIMIT)).any())
        # The row's origin is its largest logit but for 15 bits: a NaN, if that is out of range.
        assert bool(refused[expected_lse.abs() >= FA3_LIMIT * 1.01].all())
        out, lse = out[~refused], lse[~refused]
        expected_out, expected_lse = expected_out[~refused], expected_lse[~refused]
    torch.testing.assert_close(out, expected_out, rtol=1e-2, atol=8e-3)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-6, atol=1e-4)


def largest_logits(q, k, sm_scale: float) -> torch.Tensor:
    k = k.double().repeat_interleave(q.shape[1] // k.shape[1], 1)
    logits = torch.einsum("qhd,khd->qhk", q.double(), k) * sm_scale / math.log(2.0)
    return logits.abs().amax(-1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("magnitude", MAGNITUDES)
@pytest.mark.parametrize("pattern", ["equal", "ties", "rising", "falling"])
def test_single(target, pattern, magnitude, dtype):
    q, k, v = tensors(pattern, dtype)
    sm_scale = magnitude / LARGEST**2
    got = preflash.single_prefill_with_kv_cache(
        *(target.to(x) for x in (q, k, v)),
        sm_scale=sm_scale,
        return_lse=True,
        backend=target.backend,
    )
    assert_right(target, got, attention(q, k, v, sm_scale), largest_logits(q, k, sm_scale))


@pytest.mark.parametrize("magnitude", MAGNITUDES)
@pytest.mark.parametrize("sign", [1, -1])
def test_masks_and_the_sign_of_the_scale(target, magnitude, sign):
    q, k, v = tensors("rising", torch.bfloat16)
    sm_scale = sign * magnitude / LARGEST**2
    reach = torch.arange(KEYS)[None, :] - torch.arange(TOKENS)[:, None] - (KEYS - TOKENS)
    keep = (reach <= 0) & (reach >= -100)
    got = preflash.single_prefill_with_kv_cache(
        *(target.to(x) for x in (q, k, v)),
        sm_scale=sm_scale,
        causal=True,
        window_left=100,
        return_lse=True,
        backend=target.backend,
    )
    assert_right(target, got, attention(q, k, v, sm_scale, keep), largest_logits(q, k, sm_scale))


@pytest.mark.parametrize("page_size", [0, 16, 5])
@pytest.mark.parametrize("magnitude", MAGNITUDES)
@pytest.mark.parametrize("pattern", ["equal", "ties", "rising", "falling"])
@pytest.mark.parametrize("qo_len", [1, TOKENS])
def test_chunks_of_keys_are_merged(target, pattern, magnitude, page_size, qo_len):
    """Weights of chunks come from differences of their LSEs, which a float32 LSE would not hold."""
    q, k, v = tensors(pattern, torch.bfloat16)
    q = q[:qo_len]
    sm_scale = magnitude / LARGEST**2
    workspace = torch.empty(32 << 20, dtype=torch.uint8, device=target.device)
    qo_indptr = torch.tensor([0, qo_len], dtype=torch.int32)
    options = {
        "sm_scale": sm_scale,
        "q_data_type": torch.bfloat16,
        "fixed_split_size": 64,
    }
    if page_size == 0:
        wrapper = preflash.BatchPrefillWithRaggedKVCacheWrapper(workspace, backend=target.backend)
        indptr = torch.tensor([0, KEYS], dtype=torch.int32)
        wrapper.plan(qo_indptr, indptr, 4, 2, HEAD_DIM, **options)
        arguments = (k, v)
    else:
        wrapper = preflash.BatchPrefillWithPagedKVCacheWrapper(workspace, backend=target.backend)
        pages = -(-KEYS // page_size)
        indptr = torch.tensor([0, pages], dtype=torch.int32)
        last = torch.tensor([KEYS - (pages - 1) * page_size], dtype=torch.int32)
        indices = torch.arange(pages, dtype=torch.int32)
        wrapper.plan(qo_indptr, indptr, indices, last, 4, 2, HEAD_DIM, page_size, **options)
        padded = [torch.full((pages * page_size, 2, HEAD_DIM), math.nan).bfloat16() for _ in "kv"]
        for cache, rows in zip(padded, (k, v), strict=True):
            cache[:KEYS] = rows
        arguments = (
            tuple(x.view(pages, page_size, 2, HEAD_DIM).to(target.device) for x in padded),
        )
    got = wrapper.run(target.to(q), *(target.to(x) if isinstance(x, torch.Tensor) else x
                                      for x in arguments), return_lse=True)  # fmt: skip
    assert_right(target, got, attention(q, k, v, sm_scale), largest_logits(q, k, sm_scale))


@pytest.mark.parametrize("spread", [1, 3])
@pytest.mark.parametrize("base", [2.0**11, 2.0**12, 2.0**13])
def test_weights_between_huge_logits(target, base, spread):
    """Differences of a few units on top of 2^22 to 2^26: the weights are ordinary ones."""
    step = max(1.0, base**2 / 2**23)
    q, k, v = tensors("equal", torch.bfloat16)
    q[..., 0], q[..., 1] = base, step
    k[..., 0] = base
    k[..., 1] = (torch.arange(KEYS) % 5 * spread)[:, None].to(torch.bfloat16)
    got = preflash.single_prefill_with_kv_cache(
        *(target.to(x) for x in (q, k, v)),
        sm_scale=0.25 / step,
        return_lse=True,
        backend=target.backend,
    )
    assert_right(target, got, attention(q, k, v, 0.25 / step), largest_logits(q, k, 0.25 / step))


@pytest.mark.parametrize("cap", [30.0, 1e8, 3e9, 1e30])
def test_soft_caps(target, cap):
    q, k, v = tensors("ties", torch.bfloat16)
    sm_scale = 4 * cap / LARGEST**2
    logits = torch.einsum("qhd,khd->hqk", q.double(), k.double().repeat_interleave(2, 1)) * sm_scale
    logits = cap * torch.tanh(logits / cap)
    got = preflash.single_prefill_with_kv_cache(
        *(target.to(x) for x in (q, k, v)),
        sm_scale=sm_scale,
        logits_soft_cap=cap,
        return_lse=True,
        backend=target.backend,
    )
    out, lse = (x.cpu().double() for x in got)
    expected = logits.logsumexp(-1).T / math.log(2.0)
    if target.backend == "fa3":
        refused = lse.isnan()
        assert torch.equal(refused, out.isnan().all(-1))
        largest = logits.abs().amax(-1).T / math.log(2.0)
        assert not bool((refused & (largest < FA3_LIMIT)).any())
        out, lse, expected = out[~refused], lse[~refused], expected[~refused]
    assert bool(out.isfinite().all())
    assert bool((out.abs().amax(-1) > 0).all())
    torch.testing.assert_close(lse, expected, rtol=2e-6, atol=1e-3)
