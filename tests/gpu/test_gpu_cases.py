"""The GPU backends against the oracle: core cases, random ones, every axis."""

import attention_cases
import pytest
import torch
from backends import check, on_cases, planned
from fuzz.random_cases import random_cases
from preflash.testing import Case, KvForm, MaskKind, attend, compare, runner

DTYPES = (torch.float16, torch.bfloat16)
CAUSAL = {"mask": MaskKind.CAUSAL}
CORE = [case.with_dtype(dtype) for case in attention_cases.core() for dtype in DTYPES]
FUZZ = random_cases(40, seed=20260103, longest=2500, work=2e10)  # tests/api has shorter ones
PAGE_SIZES = (1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 24, 32, 40, 64, 100, 112, 128, 256, 1000)


def shapes():
    # Also groups that fill no tile evenly, and groups larger than a tile of packed rows.
    for group in (1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 16, 17, 32, 64, 71, 200):
        for qo_len in (1, 9):
            lens = (qo_len, 1, 20), (333, 65, 20)
            yield Case("group", *lens, group, 1, 128, page_size=16, **CAUSAL)
    for page_size in PAGE_SIZES:
        for layout in ("NHD", "HND"):
            paged = {"page_size": page_size, "layout": layout, **CAUSAL}
            yield Case("page", (9, 1, 170), (33, 257, 1170), 4, 2, 128, **paged)
    for dim in range(8, 257, 8):
        for qo_len in (1, 140):
            yield Case("dim", (qo_len, 33), (165, 33), 2, 1, dim, form=KvForm.PADDED, **CAUSAL)
    # Every key length around the tile sizes at once, as requests of one batch.
    kv_lens = (1, 31, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257)
    for qo_len in (1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 257):
        for mask in (MaskKind.NONE, MaskKind.CAUSAL):
            yield Case("edge", (qo_len,) * len(kv_lens), kv_lens, 3, 1, 128, mask=mask)
    # More work items than CTAs, mixed lengths, several waves.
    lens = tuple(1 + (i * 911) % 2300 for i in range(40))
    for page_size in (0, 16):
        yield Case("long", lens, lens, 8, 2, 128, page_size=page_size, **CAUSAL)
    # Few requests need KV splits to fill the machine, many do not.
    for batch, longest in ((1, 9001), (3, 9001), (300, 1500)):
        kv_lens = tuple(1 + (i * 733 + 5000) % longest for i in range(batch))
        yield Case("decode", (1,) * batch, kv_lens, 8, 1, 128, page_size=16, **CAUSAL)
    for qo_len in (1, 100):
        yield Case("context", (qo_len,), (50_000,), 4, 1, 128, page_size=1, **CAUSAL)
    yield Case("heads", (70, 3), (90, 400), 128, 128, 128, **CAUSAL)
    # The second warpgroup of a long item has one row, or none.
    for qo_len in (64, 65):
        yield Case("idle", (qo_len,), (1000,), 2, 2, 128, disable_split_kv=True, **CAUSAL)


@on_cases([*CORE, *FUZZ, *shapes()])
def test_batches(backend, case):
    check(case, backend)


@pytest.mark.sanitizer
@on_cases(attention_cases.tiny())
def test_tiny(backend, case):
    check(case, backend)


def test_more_requests_than_a_grid_dimension(backend):
    """65 537 requests, most of them empty."""
    qo_lens = tuple(1 if i % 64 == 0 else 0 for i in range(65_537))
    kv_lens = tuple(3 if i % 32 == 0 else 0 for i in range(65_537))
    wrapper, inputs = planned(Case("requests", qo_lens, kv_lens, 2, 1, 128), backend)
    out, lse = runner.run(wrapper, inputs)
    for i in (0, 64, 640, 65_536):
        one, row = inputs.request(i), sum(qo_lens[:i])
        expected = attend(one.q, one.k, one.v, inputs.pipeline)
        compare(out[row : row + 1], lse[row : row + 1], expected).check()
    assert bool(out.isfinite().all())
    assert bool(lse.isfinite().all())
