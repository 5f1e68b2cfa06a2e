"""Batch-invariant plans: a row of a long prompt depends on its own keys alone."""

import itertools

import preflash
import pytest
import torch
from preflash.testing import runner

PAGE = 16
E4M3 = torch.float8_e4m3fn
# Ends of chunks, at and beside multiples of tiles of rows and of keys. The last is the prompt's.
CUTS = (1, 37, 128, 131, 400, 897, 911, 1024, 1300, 1301, 1336)
# Positions of single rows: decode steps.
STEPS = (0, 127, 128, 300, 1023, 1024, 1152, 1290, 1335)
OPTIONS = {
    "one pass": {"batch_invariant": True},
    "chunks of 512 keys": {"fixed_split_size": 512},
    "window": {"batch_invariant": True, "window_left": 700},
}


def computed(target, q, k, v, *, more_keys: int = 0, **options):
    """(out, lse) of the last rows q of a prompt. more_keys: plan() knows an upper bound of so many
    keys more."""
    count = -(-(len(k) + more_keys) // PAGE)
    pages = torch.zeros(2, count, PAGE, *k.shape[1:], dtype=q.dtype, device=target.device)
    for rows, x in zip(pages.flatten(1, 2), (k, v), strict=True):
        rows[: len(x)].copy_(x)
    if more_keys:
        options |= {
            "seq_lens": torch.tensor([len(k)], dtype=torch.int32, device=target.device),
            "lengths_are_upper_bounds": True,
        }
    wrapper = preflash.BatchPrefillWithPagedKVCacheWrapper(
        runner.workspace(target.device, 256 << 20), backend=target.backend
    )
    last_page = len(k) + more_keys - (count - 1) * PAGE
    wrapper.plan(
        torch.tensor([0, len(q)], dtype=torch.int32),
        torch.tensor([0, count], dtype=torch.int32),
        torch.arange(count, dtype=torch.int32, device=target.device),
        torch.tensor([last_page], dtype=torch.int32),
        *(q.shape[1], k.shape[1], q.shape[2], PAGE),
        causal=True,
        q_data_type=q.dtype,
        o_data_type=torch.float16 if q.dtype == E4M3 else q.dtype,
        **options,
    )
    return wrapper.run(q, tuple(pages), return_lse=True)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("heads", [(1, 1), (8, 2), (7, 1), (3, 3), (130, 1)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3], ids=["bf16", "e4m3"])
def test_chunks_and_decode_steps(target, dtype, head_dim, heads, options):
    generator = torch.Generator().manual_seed(head_dim + heads[0])
    q, k, v = (
        torch.randn(CUTS[-1], count, head_dim, generator=generator).to(target.device)
        for count in (heads[0], heads[1], heads[1])
    )
    # A row's key as its neighbours' largest logit, so that references move after it.
    k[:, :, 0] = 4 * torch.linspace(-1, 1, len(k), device=target.device)[:, None]
    q, k, v = (x.to(dtype) for x in (q * 2, k, v))
    whole = computed(target, q, k, v, **options)
    chunks = [*itertools.pairwise((0, *CUTS)), *((step, step + 1) for step in STEPS)]
    for begin, end in chunks:
        for more_keys in (0, 200) if "window_left" not in options else (0,):
            part = computed(target, q[begin:end], k[:end], v[:end], more_keys=more_keys, **options)
            for given, expected in zip(part, whole, strict=True):
                assert torch.equal(given, expected[begin:end]), (begin, end, more_keys)


@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3], ids=["bf16", "e4m3"])
@pytest.mark.parametrize("window_left", [2, 9, 30])
def test_keys_below_a_window_may_be_nan(target, window_left, dtype):
    """The first key in the window is anywhere in the last key's page, or in an earlier one."""
    generator = torch.Generator().manual_seed(window_left)
    for kv_len in range(100, 100 + PAGE):
        q, k, v = (
            torch.randn(count, heads, 128, generator=generator).to(target.device, dtype)
            for count, heads in ((1, 8), (kv_len, 2), (kv_len, 2))
        )
        options = {"batch_invariant": True, "window_left": window_left}
        expected = computed(target, q, k, v, **options)
        for x in (k, v):
            x[: kv_len - 1 - window_left] = float("nan")
        for given, finite in zip(computed(target, q, k, v, **options), expected, strict=True):
            assert torch.equal(given, finite), kv_len
