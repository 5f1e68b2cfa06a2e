"""The GPU backends against the oracle and each other: core cases, random ones, every axis."""

import attention_cases
import pytest
import torch
from backends import backends_and_cases, on_every_backend, planned
from fuzz.random_cases import random_cases
from preflash.testing import Case, KvForm, MaskKind, build, runner

pytestmark = pytest.mark.gpu

DTYPES = (torch.float16, torch.bfloat16)
CORE = [case.with_dtype(dtype) for case in attention_cases.core() for dtype in DTYPES]


@pytest.mark.parametrize(("backend", "case"), backends_and_cases(CORE))
def test_core(backend, case):
    runner.check(build(case, device="cuda"), backend=backend)


FUZZ = [
    *random_cases(200, seed=20260102),
    *random_cases(40, seed=20260103, longest=2500, work=2e10),
]


@pytest.mark.parametrize(("backend", "case"), backends_and_cases(FUZZ))
def test_fuzz(backend, case):
    runner.check(build(case, device="cuda", seed=2), backend=backend)


@pytest.mark.sanitizer
@pytest.mark.parametrize(("backend", "case"), backends_and_cases(attention_cases.tiny()))
def test_tiny(backend, case):
    runner.check(build(case, device="cuda"), backend=backend)


@on_every_backend
@pytest.mark.parametrize("index_device", ["cpu", "cuda"])
@pytest.mark.parametrize("page_size", [0, 1, 16])
def test_index_device(backend, page_size, index_device):
    lens = (33, 5, 0, 70), (40, 90, 7, 70)
    case = Case("index", *lens, 4, 2, 128, page_size=page_size, mask=MaskKind.CAUSAL)
    runner.check(build(case, device="cuda", index_device=index_device), backend=backend)


SINGLE = [
    Case("full", (70,), (1333,), 4, 2, 128),
    Case("causal", (700,), (1333,), 6, 2, 128, mask=MaskKind.CAUSAL),
    Case("window", (700,), (1333,), 6, 2, 128, mask=MaskKind.CAUSAL, window_left=400),
    Case("hnd", (70,), (133,), 8, 1, 128, layout="HND", mask=MaskKind.CAUSAL, form=KvForm.PADDED),
    Case("custom", (33,), (65,), 4, 4, 128, mask=MaskKind.CUSTOM),
    Case("packed", (13,), (65,), 4, 1, 128, mask=MaskKind.PACKED),
    Case("decode", (1,), (9999,), 5, 1, 128),
    Case("longer_q", (900,), (333,), 2, 2, 128, mask=MaskKind.CAUSAL),
    Case("no_query", (0,), (33,), 2, 2, 128),
    Case("no_key", (5,), (0,), 2, 2, 128),
]


SINGLES = [case.with_dtype(dtype) for case in SINGLE for dtype in DTYPES]
AUTO = [pytest.param("auto", case, id=f"auto-{case.id}") for case in SINGLES]


@pytest.mark.parametrize(("backend", "case"), [*backends_and_cases(SINGLES), *AUTO])
def test_single(backend, case):
    inputs = build(case, device="cuda")
    runner.compare(inputs, *runner.single(inputs, backend=backend)).check()


PAGE_SIZES = (1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 24, 32, 40, 64, 100, 112, 128, 256, 1000)


def shapes():
    causal = {"mask": MaskKind.CAUSAL}
    # Also groups that fill no tile evenly, and groups larger than a tile of packed rows.
    for group in (1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 16, 17, 32, 64, 71, 200):
        for qo_len in (1, 9):
            lens = (qo_len, 1, 20), (333, 65, 20)
            yield Case("group", *lens, group, 1, 128, page_size=16, **causal)
    for page_size in PAGE_SIZES:
        for layout in ("NHD", "HND"):
            paged = {"page_size": page_size, "layout": layout, **causal}
            yield Case("page", (9, 1, 170), (33, 257, 1170), 4, 2, 128, **paged)
    for dim in range(8, 257, 8):
        for qo_len in (1, 140):
            yield Case("dim", (qo_len, 33), (165, 33), 2, 1, dim, form=KvForm.PADDED, **causal)
    # Every key length around the tile sizes at once, as requests of one batch.
    kv_lens = (1, 31, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257)
    for qo_len in (1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 257):
        for mask in (MaskKind.NONE, MaskKind.CAUSAL):
            yield Case("edge", (qo_len,) * len(kv_lens), kv_lens, 3, 1, 128, mask=mask)
    # More work items than CTAs, mixed lengths, several waves.
    lens = tuple(1 + (i * 911) % 2300 for i in range(40))
    for page_size in (0, 16):
        yield Case("long", lens, lens, 8, 2, 128, page_size=page_size, **causal)
    # Few requests need KV splits to fill the machine, many do not.
    for batch, longest in ((1, 9001), (3, 9001), (300, 1500)):
        kv_lens = tuple(1 + (i * 733 + 5000) % longest for i in range(batch))
        yield Case("decode", (1,) * batch, kv_lens, 8, 1, 128, page_size=16, **causal)
    for qo_len in (1, 100):
        yield Case("context", (qo_len,), (50_000,), 4, 1, 128, page_size=1, **causal)
    yield Case("heads", (70, 3), (90, 400), 128, 128, 128, **causal)


@pytest.mark.parametrize(("backend", "case"), backends_and_cases(shapes()))
def test_shapes(backend, case):
    runner.check(build(case, device="cuda"), backend=backend)


@on_every_backend
def test_more_requests_than_a_grid_dimension(backend):
    """65 537 requests, most of them empty."""
    qo_lens = tuple(1 if i % 64 == 0 else 0 for i in range(65_537))
    kv_lens = tuple(3 if i % 32 == 0 else 0 for i in range(65_537))
    case = Case("requests", qo_lens, kv_lens, 2, 1, 128)
    wrapper, inputs = planned(case, backend)
    out, lse = runner.run(wrapper, inputs)
    for i in (0, 64, 640, 65_536):
        row = sum(qo_lens[:i])
        begin = sum(kv_lens[:i])
        k, v = inputs.k[begin : begin + 3, 0].double(), inputs.v[begin : begin + 3, 0].double()
        weights = torch.softmax(inputs.q[row].double() @ k.t() * case.scale, -1)
        torch.testing.assert_close(out[row].double(), weights @ v, rtol=2**-6, atol=2**-6)
    assert bool(out.isfinite().all())
    assert bool(lse.isfinite().all())
