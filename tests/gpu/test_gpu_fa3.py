"""fa3 beside fa2: the choice between them, the same answers, and what TMA could get wrong."""

import dataclasses
import gc
import itertools
import math

import preflash
import pytest
import torch
from backends import backends_and_cases, check_run, on_every_backend, planned
from far_memory import move_pages
from preflash.testing import (
    Case,
    KvForm,
    Magnitude,
    MaskKind,
    Sinks,
    build,
    compare,
    reference,
    runner,
)
from require_variant import why_no_fa3

pytestmark = pytest.mark.gpu

DIMS = ((64, 64), (128, 128), (192, 128), (256, 256), (512, 512))
CASE = Case("choice", (33, 170), (400, 170), 8, 2, 128, page_size=16, mask=MaskKind.CAUSAL)


@pytest.fixture
def fa3() -> str:
    if why_no_fa3():
        pytest.skip(why_no_fa3())
    return "fa3"


# --- the choice ----------------------------------------------------------------


@pytest.mark.parametrize("mask", [MaskKind.CAUSAL, MaskKind.CUSTOM])
def test_auto_takes_fa3_where_it_runs(mask):
    wrapper, inputs = planned(dataclasses.replace(CASE, mask=mask), "auto")
    family = "sm80" if why_no_fa3() else "sm90"
    assert wrapper.variant.startswith(f"{family}_bf16_d128")
    assert mask is MaskKind.CAUSAL or wrapper.variant.endswith("_custom")
    check_run(wrapper, inputs)


def test_explicit_fa3_never_becomes_fa2():
    if not why_no_fa3():
        assert planned(CASE, "fa3")[0].variant.startswith("sm90_")
        return
    with pytest.raises((NotImplementedError, ValueError), match="fa3"):
        planned(CASE, "fa3")


@pytest.mark.parametrize(
    ("qo_lens", "kv_heads", "head_dim", "options", "name"),
    [
        ((1,) * 40, 1, 128, {}, "_decode"),
        ((1,) * 39 + (9,), 4, 128, {}, ""),
        ((1,) * 40, 4, 256, {}, ""),
        ((1,) * 40, 4, 128, {"disable_split_kv": True}, ""),
    ],
    ids=["short", "more rows", "head_dim", "no split"],
)
def test_tiles_of_decode_batches(fa3, qo_lens, kv_heads, head_dim, options, name):
    case = Case("decode", qo_lens, (300,) * 40, 8, kv_heads, head_dim, **options)
    wrapper, inputs = planned(case, fa3)
    assert wrapper.variant == f"sm90_bf16_d{head_dim}{name}"
    check_run(wrapper, inputs)


@pytest.mark.parametrize(("batch", "keys", "name"), [(256, 300, "_decode"), (64, 4096, "")])
def test_short_tiles_of_head_dim_64_are_for_short_requests(fa3, batch, keys, name):
    workspace = runner.workspace("cuda", 64 << 20)
    wrapper = preflash.BatchPrefillWithPagedKVCacheWrapper(workspace, backend=fa3)
    indptr = torch.arange(batch + 1, dtype=torch.int32)
    pages = -(-keys // 16)
    indices = torch.arange(batch * pages, dtype=torch.int32)
    last_page_len = torch.full((batch,), keys - (pages - 1) * 16, dtype=torch.int32)
    wrapper.plan(
        indptr, indptr * pages, indices, last_page_len,
        64, 16, 64, 16, causal=True, q_data_type=torch.bfloat16,
    )  # fmt: skip
    assert wrapper.variant == f"sm90_bf16_d64{name}"


SHORT = (1, 2, 0, 1, 1, 2), (700, 131, 40, 0, 4111, 16)  # tokens and keys


@pytest.mark.sanitizer
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("page_size", [0, 1, 3, 16, 64])
@pytest.mark.parametrize("head_dim", [8, 64, 120, 128])
def test_short_tiles_over_16_bits(fa3, head_dim, page_size, dtype):
    """Odd and empty requests, long ones that are split, pages of every kind."""
    case = Case("short", *SHORT, 8, 2, head_dim, page_size=page_size, dtype=dtype)
    wrapper, inputs = planned(case, fa3)
    assert "_decode" in wrapper.variant
    check_run(wrapper, inputs)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    "options",
    [
        {"mask": MaskKind.CAUSAL},
        {"mask": MaskKind.CAUSAL, "window_left": 40},
        {"sinks": Sinks.MIXED},
    ],
    ids=["causal", "window", "sinks"],
)
def test_options_of_short_tiles_over_16_bits(fa3, head_dim, options):
    """Later tokens see a slice of keys (32, or 16 at head_dim 128) that the first one does not, and
    long requests are split."""
    lens = (2, 1, 2, 2, 1, 2), (33, 65, 129, 161, 9000, 4097)
    wrapper, inputs = planned(Case("short", *lens, 8, 2, head_dim, **options), fa3)
    assert "_decode" in wrapper.variant
    check_run(wrapper, inputs)


# --- more items than CTAs --------------------------------------------------------


@on_every_backend
@pytest.mark.sanitizer
@pytest.mark.parametrize("page_size", [0, 1, 16])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_buffers_and_barriers_go_round(backend, dims, page_size):
    """768 items of one to five tiles: each CTA computes more of them than it holds at once."""
    lens = (3, 1, 2, 1, 5, 4), (300, 1, 150, 37, 260, 97)
    case = Case("items", *lens, 128, 128, *dims, page_size=page_size, mask=MaskKind.CAUSAL)
    runner.check(build(case, device="cuda"), backend=backend)


def many_items():
    causal = {"mask": MaskKind.CAUSAL}
    yield Case("splits", (700, 1), (3000, 5000), 8, 1, 128, page_size=16, **causal)
    yield Case("group7", (130, 40), (700, 40), 7, 1, 64, **causal)
    # Heads of their own: several row tiles of each, over all keys or a short window of them.
    lens = (600, 650, 700), (613, 700, 741)
    for head_dim, page_size, window in itertools.product((64, 256, 512), (0, 1, 3, 16), (-1, 40)):
        how = {"page_size": page_size, "window_left": window, **causal}
        yield Case("long", *lens, 24, 24, head_dim, **how)
    # Items of one tile to four, whose last keys end in either half of a tile.
    lens = (70, 129, 300, 64, 130, 257, 1, 5), (190, 129, 430, 320, 260, 290, 40, 77)
    short = [{}, causal, causal | {"window_left": 100}, causal | {"fixed_split_size": 256}]
    short.append(causal | {"sinks": Sinks.MIXED})
    dims = (128, 128), (192, 128)
    for dim, options, page_size in itertools.product(dims, short, (0, 1, 5, 16, 48)):
        yield Case("short", *lens, 32, 32, *dim, page_size=page_size, **options)
    # The rows of one token lie in several tiles.
    for group, head_dim in ((300, 64), (200, 256), (200, 512)):
        yield Case("group", (3, 1, 5, 2), (70, 300, 5, 129), group, 1, head_dim, **causal)
    # With a negative scale the largest product is the smallest logit.
    lens = (3, 1, 140, 1, 5, 4), (300, 1, 150, 37, 260, 97)
    for dim, page_size in itertools.product(((256, 256), (192, 128), (320, 320)), (0, 16)):
        how = {"page_size": page_size, "sm_scale": -0.2, **causal}
        yield Case("minus", *lens, 64, 64, *dim, **how)
    # The last tile ends where the request ends: infinities follow in rows that nobody owns.
    for dim, kv_len in itertools.product(DIMS, (1, 7, 111, 112, 113, 127, 128, 129, 255, 256, 257)):
        yield Case("end", (70,), (kv_len,), 2, 1, *dim, **causal)
    storage = itertools.product(("NHD", "HND"), (0, 4, 16), list(KvForm)[:5])
    for layout, page_size, form in storage:
        how = {"page_size": page_size, "layout": layout, "form": form, **causal}
        yield Case("form", (40, 9, 1), (130, 70, 300), 6, 2, 64, **how)


@pytest.mark.parametrize(("backend", "case"), backends_and_cases(many_items()))
def test_items_follow_each_other(backend, case):
    runner.check(build(case, device="cuda"), backend=backend)


# --- logits that jump ------------------------------------------------------------


@on_every_backend
@pytest.mark.parametrize("cap", [0.01, 10.0, 30.0, 50.0, 1000.0, 2e4, 1e30])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_soft_caps_of_small_and_large_logits(backend, head_dim, cap):
    """Exact caps, from tiles of small logits to tiles full of large ones, of rows that are large
    throughout and of single keys: the outputs' rounding and the LSE's own tell how well."""
    dtype = torch.bfloat16 if head_dim == 256 else torch.float16
    torch.manual_seed(head_dim)
    keys, tokens, heads = 1200, 150, 2
    k = torch.randn(keys, heads, head_dim, device="cuda")
    v = torch.randn(keys, heads, head_dim, device="cuda")
    k[5::97] *= 4.0
    for deviation in (0.01, 0.05, 0.1, 0.2, 0.4, 1.0, 10.0):  # of the logits, in caps
        q = torch.randn(tokens, heads, head_dim, device="cuda")
        q *= min(deviation * min(cap, 50.0), 100.0)
        q[::9] *= 3.0
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        out, lse = preflash.single_prefill_with_kv_cache(
            q, k, v, causal=True, logits_soft_cap=cap, return_lse=True, backend=backend
        )
        logits = torch.einsum("qhd,khd->hqk", q.double(), k.double()) / math.sqrt(head_dim)
        logits = cap * torch.tanh(logits / cap)
        kept = torch.ones(tokens, keys, device="cuda").tril(keys - tokens) > 0
        logits = logits.masked_fill(~kept, -math.inf)
        weights = torch.softmax(logits, -1)
        expected = torch.einsum("hqk,khd->qhd", weights, v.double())
        spread = torch.einsum("hqk,khd->qhd", weights, v.double().abs())
        eps = torch.finfo(dtype).eps
        assert ((out.double() - expected).abs() <= 1.5 * eps * spread + 1e-4).all()
        error = (lse.double() * math.log(2) - torch.logsumexp(logits, -1).T).abs()
        largest = logits[:, kept].abs().max().item()
        assert error.max() <= 2e-4 + 4e-6 * largest


def key_rows(inputs, request):
    """Returns the index of a request's keys in K: of the pool or of the ragged tensor, NHD."""
    kv_lens, page_size = inputs.case.kv_lens, inputs.case.page_size
    keys = torch.arange(kv_lens[request], device=inputs.k.device)
    if not page_size:
        return (keys + sum(kv_lens[:request]),)
    pages = torch.tensor(inputs.page_table[request], device=keys.device)
    return pages[keys // page_size], keys % page_size


# What a key's numbers are multiplied by: place goes from 0 to 1 in a request.
FACTORS = {
    "early": lambda place: torch.where(place < 0.25, 60.0, 1.0),
    "late": lambda place: torch.where(place > 0.75, 60.0, 1.0),
    "rising": lambda place: 1 + 59 * place,
    "falling": lambda place: 60 - 59 * place,
    "striped": lambda place: torch.where((place * 16).long() % 2 == 0, 60.0, 1.0),
}
# Ordinary keys among those whose logits are near -2.5e5, which not every row sees.
ORDINARY = {"first": (0, 1), "late": (200, 201, 290), "last": (-1,)}


def dominated(inputs, factors) -> None:
    """Multiplies keys so that whole tiles weigh nothing beside one before or after them."""
    inputs.q *= 8
    for request, kv_len in enumerate(inputs.case.kv_lens):
        place = torch.arange(kv_len, device=inputs.k.device) / kv_len
        inputs.k[key_rows(inputs, request)] *= factors(place).to(inputs.k.dtype)[:, None, None]


def few_ordinary(inputs, keys) -> None:
    for request in range(inputs.case.batch_size):
        rows = key_rows(inputs, request)
        for key in keys:
            inputs.k[(*(index[key] for index in rows), slice(None), 0)] = 0


NEGATIVE = {"sm_scale": 1.0, "magnitude": Magnitude.VERY_NEGATIVE}
JUMPS = {f"jump_{name}": (dominated, factors, {}) for name, factors in FACTORS.items()}
JUMPS |= {f"few_{name}": (few_ordinary, keys, NEGATIVE) for name, keys in ORDINARY.items()}


@on_every_backend
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fixed_split_size", [None, 128])
@pytest.mark.parametrize(
    ("dims", "page_size"),
    [((64, 64), 0), ((128, 128), 16), ((256, 256), 1), ((512, 512), 16)],
    ids=str,
)
@pytest.mark.parametrize(("change", "by", "options"), JUMPS.values(), ids=JUMPS)
def test_keys_that_dominate_by_hundreds_of_bits(
    backend, change, by, options, dims, page_size, fixed_split_size, dtype
):
    """The first request has 70 chunks, more than a warp merges at once."""
    how = {"dtype": dtype, "page_size": page_size, "mask": MaskKind.CAUSAL, **options}
    lens = (1, 130, 300), (9000, 700, 310)
    case = Case("jump", *lens, 4, 2, *dims, **how, fixed_split_size=fixed_split_size)
    inputs = build(case, device="cuda")
    change(inputs, by)
    runner.check(inputs, backend=backend)


# --- what a tile reaches over ----------------------------------------------------


@on_every_backend
@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [0, 1, 3, 8, 16, 24, 64, 256])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_neighbours_stay_out(backend, head_dim, page_size, layout, value):
    """The requests before and after hold NaN or Inf; so do the rest of every last page."""
    mask = {"mask": MaskKind.CAUSAL, "layout": layout}
    case = Case("near", (5, 40, 3), (37, 131, 250), 4, 2, head_dim, page_size=page_size, **mask)
    inputs = build(case, device="cuda")
    expected = reference(inputs)
    for request, (begin, end) in ((0, (0, 37)), (2, (168, 418))):
        for tensor in (inputs.k, inputs.v):
            if page_size:
                tensor[torch.tensor(inputs.page_table[request], device="cuda")] = value
            else:
                tensor.narrow(0 if layout == "NHD" else 1, begin, end - begin).fill_(value)
    inputs.q[:5], inputs.q[45:] = value, value
    out, lse = runner.run(runner.planned(inputs, backend=backend), inputs)
    rows = slice(5, 45)
    compare(out[rows], lse[rows], expected.map(lambda t: t[rows])).check()


@on_every_backend
@pytest.mark.parametrize("fixed_split_size", [None, 128])
@pytest.mark.parametrize("page_size", [0, 1, 8, 16, 40, 128])
def test_recycled_pages_stay_out(backend, page_size, fixed_split_size):
    """Keys below every row's window, whose pages the engine has given away."""
    window = {"mask": MaskKind.CAUSAL, "window_left": 70}
    split = {"fixed_split_size": fixed_split_size}
    case = Case("recycled", (9,), (600,), 6, 2, 128, page_size=page_size, **window, **split)
    inputs = build(case, device="cuda")
    expected = reference(inputs)
    for key in range(600 - 9 - 70):
        place = (key,)
        if page_size:
            place = (int(inputs.indices[key // page_size]), key % page_size)
        inputs.k[place], inputs.v[place] = math.nan, math.inf
    runner.check(inputs, backend=backend, expected=expected)


# --- strides ---------------------------------------------------------------------


def expanded(inputs) -> None:
    """Reads one head for all: a stride of 0 is a stride."""
    inputs.k, inputs.v = (t[:, :1].clone().expand(-1, 4, -1) for t in (inputs.k, inputs.v))


def single_elements(inputs) -> None:
    """Sets strides of single elements, which mean nothing: torch leaves any there."""
    inputs.q = inputs.q.as_strided((1, 1, 128), (3, 5, 1))
    inputs.k = inputs.k[:1].as_strided((1, 1, 128), (1, 0, 1))
    inputs.v = inputs.v[:1].as_strided((1, 1, 128), (7, 1 << 40, 1))


def no_spare_rows(inputs) -> None:
    """Leaves empty tensors: tensor maps have no dimension of length 0."""
    keys = sum(inputs.case.kv_lens)
    inputs.k, inputs.v = inputs.k[:keys], inputs.v[:keys]
    if inputs.case.paged:
        inputs.cache = (inputs.k, inputs.v)


UNUSUAL = [
    (expanded, Case("expanded", (40, 9), (130, 70), 8, 4, 128, mask=MaskKind.CAUSAL)),
    (single_elements, Case("single", (1,), (1,), 1, 1, 128)),
    (no_spare_rows, Case("no_keys", (5, 9), (0, 0), 4, 2, 128, mask=MaskKind.CAUSAL)),
    (no_spare_rows, Case("no_pages", (5, 9), (0, 0), 4, 2, 128, page_size=16)),
    (no_spare_rows, Case("no_rows", (0, 0), (70, 3), 4, 2, 128)),
]


@on_every_backend
@pytest.mark.parametrize(
    ("change", "case"), [pytest.param(*row, id=row[1].name) for row in UNUSUAL]
)
def test_unusual_strides_and_sizes(backend, change, case):
    inputs = build(case, device="cuda")
    change(inputs)
    runner.check(inputs, backend=backend)


FAR = 1 << 36  # bytes


@pytest.fixture
def sixty_six_gib():
    """Yields uninitialised memory, and frees it whoever still refers to it."""
    size = FAR + (2 << 30)
    gc.collect()
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < size + (2 << 30):
        pytest.skip("needs 68 GiB of free GPU memory")
    try:
        buffer = torch.empty(size, dtype=torch.uint8, device="cuda")
    except torch.cuda.OutOfMemoryError:
        pytest.skip("66 GiB of GPU memory cannot be had in one piece")
    yield buffer
    buffer.untyped_storage().resize_(0)
    torch.cuda.empty_cache()


@on_every_backend
@pytest.mark.parametrize("stride", [2 * 256, 1 << 20], ids=["dense", "sparse"])
def test_offsets_over_64_gib(backend, stride, sixty_six_gib):
    """Every other page lies 2^36 bytes further, and NaN where a shorter offset would lead."""
    case = Case("far", (9, 200), (130, 333), 4, 2, 128, page_size=1, mask=MaskKind.CAUSAL)
    inputs = build(case, device="cuda")
    expected = reference(inputs)
    memory = sixty_six_gib.view(case.dtype)
    shape = (memory.numel() // stride, 1, 2, 128)
    pools = [memory.as_strided(shape, (stride, 256, 256, 1), offset) for offset in (0, 128)]
    count = inputs.k.shape[0]
    where = torch.arange(count, device=inputs.k.device)
    where[1::2] += FAR // (2 * stride)
    for pool in pools:
        pool[:count] = math.nan
    move_pages(inputs, pools, where)
    runner.check(inputs, backend=backend, expected=expected)
