"""fa3 beside fa2: the choice between them, the same answers, and what TMA could get wrong."""

import dataclasses
import gc
import itertools
import math

import pytest
import torch
from backends import check, check_run, on_cases, planned
from far_memory import move_pages
from preflash.testing import build, compare, reference, runner
from preflash.testing.case import Case, Magnitude, MaskKind, Sinks
from preflash.testing.inputs import indptr, pages_of
from require_variant import why_no_fa3

CAUSAL = {"mask": MaskKind.CAUSAL}
DIMS = ((64, 64), (128, 128), (192, 128), (256, 256), (512, 512))
LENS = (3, 1, 2, 1, 5, 4), (300, 1, 150, 37, 260, 97)
NEGATIVE = {"sm_scale": 1.0, "magnitude": Magnitude.VERY_NEGATIVE}


@pytest.mark.parametrize("mask", [MaskKind.CAUSAL, MaskKind.CUSTOM])
def test_auto_takes_fa3_where_it_runs(mask):
    """Asked for by name it never becomes fa2."""
    case = Case("choice", (33, 170), (400, 170), 8, 2, 128, page_size=16, mask=mask)
    wrapper, inputs = planned(case, "auto")
    family = "sm80" if why_no_fa3() else "sm90"
    assert wrapper.variant.startswith(f"{family}_bf16_d128")
    assert mask is MaskKind.CAUSAL or wrapper.variant.endswith("_custom")
    check_run(wrapper, inputs)
    if not why_no_fa3():
        assert planned(case, "fa3")[0].variant.startswith("sm90_")
    else:
        with pytest.raises((NotImplementedError, ValueError), match="fa3"):
            planned(case, "fa3")


def short_tiles():
    # Odd and empty requests, long ones that are split, pages of every kind.
    lens = (1, 2, 0, 1, 1, 2), (700, 131, 40, 0, 4111, 16)
    dtypes = (torch.float16, torch.bfloat16)
    for head_dim, size, dtype in itertools.product((8, 64, 120, 128), (0, 1, 3, 16, 64), dtypes):
        yield Case("short", *lens, 8, 2, head_dim, page_size=size, dtype=dtype)
    # Later tokens see a slice of keys (32, or 16 at head_dim 128) that the first one does not.
    lens = (2, 1, 2, 2, 1, 2), (33, 65, 129, 161, 9000, 4097)
    every = (CAUSAL, {"window_left": 40, **CAUSAL}, {"sinks": Sinks.MIXED}, NEGATIVE)
    for head_dim, options, dtype in itertools.product((64, 128), every, dtypes):
        yield Case("options", *lens, 8, 2, head_dim, dtype=dtype, **options)


@pytest.mark.sanitizer
@on_cases(short_tiles())
def test_short_tiles_over_16_bits(fa3, case):
    wrapper, inputs = planned(case, fa3)
    assert "_decode" in wrapper.variant
    check_run(wrapper, inputs)


@pytest.mark.sanitizer
@pytest.mark.parametrize("page_size", [0, 1, 16])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_buffers_and_barriers_go_round(backend, dims, page_size):
    """768 items of one to five tiles: each CTA computes more of them than it holds at once."""
    check(Case("items", *LENS, 128, 128, *dims, page_size=page_size, **CAUSAL), backend)


def many_items():
    yield Case("splits", (700, 1), (3000, 5000), 8, 1, 128, page_size=16, **CAUSAL)
    yield Case("group7", (130, 40), (700, 40), 7, 1, 64, **CAUSAL)
    # Heads of their own: several row tiles of each, over all keys or a short window of them.
    lens = (600, 650, 700), (613, 700, 741)
    for head_dim, page_size, window in itertools.product((64, 256, 512), (0, 1, 3, 16), (-1, 40)):
        how = {"page_size": page_size, "window_left": window, **CAUSAL}
        yield Case("long", *lens, 24, 24, head_dim, **how)
    # Items of one tile to four, whose last keys end in either half of a tile.
    lens = (70, 129, 300, 64, 130, 257, 1, 5), (190, 129, 430, 320, 260, 290, 40, 77)
    more = ({}, {"window_left": 100}, {"fixed_split_size": 256}, {"sinks": Sinks.MIXED})
    short = [{}, *(CAUSAL | options for options in more)]
    dims = (128, 128), (192, 128)
    for dim, options, page_size in itertools.product(dims, short, (0, 1, 5, 16, 48)):
        yield Case("short", *lens, 32, 32, *dim, page_size=page_size, **options)
    # The rows of one token lie in several tiles.
    for group, head_dim in ((300, 64), (200, 256), (200, 512)):
        yield Case("group", (3, 1, 5, 2), (70, 300, 5, 129), group, 1, head_dim, **CAUSAL)
    # With a negative scale the largest product is the smallest logit.
    lens = (3, 1, 140, 1, 5, 4), LENS[1]
    for dim, page_size in itertools.product(((256, 256), (192, 128), (320, 320)), (0, 16)):
        how = {"page_size": page_size, "sm_scale": -0.2, **CAUSAL}
        yield Case("minus", *lens, 64, 64, *dim, **how)
    # The last tile ends where the request ends: infinities follow in rows that nobody owns.
    for dim, kv_len in itertools.product(DIMS, (1, 7, 111, 112, 113, 127, 128, 129, 255, 256, 257)):
        yield Case("end", (70,), (kv_len,), 2, 1, *dim, **CAUSAL)


@on_cases(many_items())
def test_items_follow_each_other(backend, case):
    check(case, backend)


@pytest.mark.parametrize("cap", [0.01, 10.0, 30.0, 50.0, 1000.0, 2e4, 1e30])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_soft_caps_of_small_and_large_logits(backend, head_dim, cap):
    """Caps of small, of large and of mixed logits, as the outputs' rounding and the LSE's tell."""
    dtype = torch.bfloat16 if head_dim == 256 else torch.float16
    case = Case("cap", (150,), (1200,), 2, 2, head_dim, dtype=dtype, soft_cap=cap, **CAUSAL)
    for deviation in (0.01, 0.05, 0.1, 0.2, 0.4, 1.0, 10.0):  # of the logits, in caps
        inputs = build(case, device="cuda", seed=head_dim)
        inputs.q *= min(deviation * min(cap, 50.0), 100.0)
        inputs.q[::9] *= 3.0
        inputs.k[5:1200:97] *= 4.0
        out, lse = runner.single(inputs, backend=backend)
        expected = reference(inputs)
        sizes = reference(dataclasses.replace(inputs, v=inputs.v.abs())).out
        bound = 1.5 * torch.finfo(dtype).eps * sizes + 1e-4
        assert ((out.double() - expected.out).abs() <= bound).all()
        error = (lse.double() - expected.lse).abs() * math.log(2)
        assert error.max() <= 2e-4 + 4e-6 * expected.largest.abs().max()


# What a key's numbers are multiplied by: place goes from 0 to 1 in a request.
FACTORS = {
    "early": lambda place: torch.where(place < 0.25, 60.0, 1.0),
    "late": lambda place: torch.where(place > 0.75, 60.0, 1.0),
    "rising": lambda place: 1 + 59 * place,
    "falling": lambda place: 60 - 59 * place,
    "striped": lambda place: torch.where((place * 16).long() % 2 == 0, 60.0, 1.0),
}
# Ordinary keys among those whose logits are near -2.5e5, which not every row sees.
ORDINARY = {"first": [0, 1], "late": [200, 201, 290], "last": [-1]}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("qo_lens", "fixed_split_size"),
    [((1, 130, 300), None), ((1, 130, 300), 128), ((1, 2, 1), None)],
)
@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
@pytest.mark.parametrize("jump", [*FACTORS, *ORDINARY])
def test_keys_that_dominate_by_hundreds_of_bits(
    backend, jump, head_dim, qo_lens, fixed_split_size, dtype
):
    """Tiles weigh nothing beside others; the first request has more chunks than a warp merges."""
    how = {"dtype": dtype, "fixed_split_size": fixed_split_size, **CAUSAL}
    how |= NEGATIVE if jump in ORDINARY else {}
    case = Case("jump", qo_lens, (9000, 700, 310), 4, 2, head_dim, **how)
    inputs = build(case, device="cuda")
    for request, kv_len in enumerate(case.kv_lens):
        one = inputs.request(request)
        if jump in ORDINARY:
            one.k[ORDINARY[jump], :, 0] = 0
        else:
            place = torch.arange(kv_len, device="cuda") / kv_len
            one.q.mul_(8)
            one.k.mul_(FACTORS[jump](place).to(dtype)[:, None, None])
    runner.check(inputs, backend=backend)


@pytest.mark.parametrize(
    ("qo_len", "window_left", "split", "value"),
    [
        *((40, -1, None, value) for value in (math.nan, math.inf)),
        *((qo_len, 70, None, math.nan) for qo_len in (4, 40)),
        (40, 70, 128, math.inf),
    ],
)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [0, 1, 3, 8, 16, 24, 64, 256])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_what_no_row_sees_stays_out(
    backend, head_dim, page_size, layout, qo_len, window_left, split, value
):
    """NaN or Inf fill other requests, the rest of pages, and keys below every row's window."""
    how = {"page_size": page_size, "layout": layout, "fixed_split_size": split}
    lens = (4, qo_len, 3), (2, 631, 250)
    case = Case("near", *lens, 4, 2, head_dim, window_left=window_left, **CAUSAL, **how)
    inputs = build(case, device="cuda")
    rows = [0, 1, *range(4, 4 + qo_len)]
    expected = reference(inputs).map(lambda t: t[rows])
    gone = 631 - qo_len - window_left if window_left >= 0 else 0
    for request, count in enumerate((2, gone, 250)):
        one, place = inputs.request(request), torch.arange(count, device="cuda")
        pools = (one.k, one.v)
        if page_size:
            pages = torch.tensor(inputs.page_table[request], device="cuda")
            place = pages[place // page_size], place % page_size
            pools = (pages_of(inputs.k, case), pages_of(inputs.v, case))
        for pool in pools:
            pool[place] = value
        if request != 1:
            one.q.fill_(value)
    out, lse = runner.run(runner.planned(inputs, backend=backend), inputs)
    compare(out[rows], lse[rows], expected).check()


def expanded(inputs) -> None:
    """Reads one head for all: a stride of 0 is a stride."""
    inputs.k, inputs.v = (t[:, :1].clone().expand(-1, 4, -1) for t in (inputs.k, inputs.v))


def single_elements(inputs) -> None:
    """Sets strides of single elements, which mean nothing: torch leaves any there."""
    inputs.q = inputs.q.as_strided((1, 1, 128), (3, 5, 1))
    inputs.k = inputs.k[:1].as_strided((1, 1, 128), (1, 0, 1))
    inputs.v = inputs.v[:1].as_strided((1, 1, 128), (7, 1 << 40, 1))


def no_spare_rows(inputs) -> None:
    """K and V end where their memory ends. Tensor maps have no dimension of length 0."""
    keys = sum(inputs.case.kv_lens)
    inputs.k, inputs.v = inputs.k[:keys].clone(), inputs.v[:keys].clone()
    if inputs.case.paged:
        inputs.cache = (inputs.k, inputs.v)


UNUSUAL = [
    (expanded, Case("expanded", (40, 9), (130, 70), 8, 4, 128, **CAUSAL)),
    (single_elements, Case("single", (1,), (1,), 1, 1, 128)),
    (no_spare_rows, Case("no_keys", (5, 9), (0, 0), 4, 2, 128, **CAUSAL)),
    (no_spare_rows, Case("no_pages", (5, 9), (0, 0), 4, 2, 128, page_size=16)),
    (no_spare_rows, Case("no_rows", (0, 0), (70, 3), 4, 2, 128)),
    *((no_spare_rows, Case("end", (65,), (77,), 2, 1, dim, **CAUSAL)) for dim in (64, 96, 128)),
]


@pytest.mark.sanitizer
@pytest.mark.parametrize(("change", "case"), UNUSUAL, ids=lambda part: getattr(part, "id", ""))
def test_unusual_strides_and_sizes(backend, change, case):
    inputs = build(case, device="cuda")
    change(inputs)
    runner.check(inputs, backend=backend)


@pytest.fixture
def far(request):
    """Returns a distance in bytes, and uninitialised memory of 2 GiB more, which it frees."""
    size = request.param + (2 << 30)
    gc.collect()
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < size + (2 << 30):
        pytest.skip("needs more free GPU memory")
    try:
        buffer = torch.empty(size, dtype=torch.uint8, device="cuda")
    except torch.cuda.OutOfMemoryError:
        pytest.skip("the GPU memory cannot be had in one piece")
    yield request.param, buffer
    buffer.untyped_storage().resize_(0)
    torch.cuda.empty_cache()


@pytest.mark.parametrize(
    ("far", "page_size", "stride"),
    [(1 << 36, 1, 2 * 256), (1 << 36, 1, 1 << 20), (1 << 33, 16, 16 * 2 * 256)],
    ids=["dense", "sparse", "pages of 16"],
    indirect=["far"],
)
def test_far_pages(backend, page_size, stride, far):
    """Every other page is 64 GiB, or 2^32 elements, further; a shorter offset leads to NaN."""
    case = Case("far", (9, 200), (130, 333), 4, 2, 128, page_size=page_size, **CAUSAL)
    inputs = build(case, device="cuda")
    expected = reference(inputs)
    distance, buffer = far
    memory = buffer.view(case.dtype)
    shape, strides = (memory.numel() // stride, page_size, 2, 128), (stride, 2 * 256, 256, 1)
    pools = [memory.as_strided(shape, strides, offset) for offset in (0, 128)]
    count = inputs.k.shape[0]
    where = torch.arange(count, device="cuda")
    where[1::2] += distance // (2 * stride)
    for pool in pools:
        pool[:count] = math.nan
    move_pages(inputs, pools, where)
    runner.check(inputs, backend=backend, expected=expected)


def test_far_rows(backend):
    """The last request of a ragged tensor of more than 2^31 elements."""
    tokens = 2**31 // (8 * 128) + 4000
    if torch.cuda.mem_get_info()[0] < 10 * tokens * 8 * 128:
        pytest.skip("needs 22 GB of free GPU memory")
    case = Case("far", (0, 70), (0, 300), 8, 8, 128, disable_split_kv=True, **CAUSAL)
    inputs = build(case, device="cuda")
    expected = reference(inputs)
    inputs.kv_indptr = indptr((tokens - 300, 300), "cuda")
    for name in ("k", "v"):
        whole = torch.zeros(tokens, 8, 128, dtype=case.dtype, device="cuda")
        whole[-300:] = getattr(inputs, name)[:300]
        setattr(inputs, name, whole)
    runner.check(inputs, backend=backend, expected=expected)
