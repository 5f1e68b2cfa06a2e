"""Page tables: lengths, positions, appending; every result against a loop over tokens."""

import dataclasses

import preflash
import pytest
import torch
from preflash import page
from preflash.testing import Case, KvForm, build, runner

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
if hasattr(torch, "float8_e4m3fn"):
    DTYPES.append(torch.float8_e4m3fn)


def ints(target, *values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=target.device)


def test_lengths(target):
    """A request without pages has no tokens, whatever is said of its last page."""
    lengths = preflash.get_seq_lens(ints(target, 2, 5, 5, 6), ints(target, 3, 16, 7), 16)
    assert lengths.tolist() == [35, 0, 7]
    assert lengths.dtype == torch.int32
    assert preflash.get_seq_lens(ints(target, 4), ints(target), 16).tolist() == []


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_positions(target, index_dtype):
    indptr = ints(target, 0, 1, 3, 3, 6, 10).to(index_dtype)
    lengths = ints(target, 5, 5, 9, 3, 70)
    indices, positions = preflash.get_batch_indices_positions(indptr, lengths, 10)
    assert indices.tolist() == [0, 1, 1, 3, 3, 3, 4, 4, 4, 4]
    assert positions.tolist() == [4, 3, 4, 0, 1, 2, 66, 67, 68, 69]
    assert (indices.dtype, positions.dtype) == (torch.int32, torch.int32)


def test_positions_of_padding(target):
    """Tokens before the first request and behind the last belong to nobody."""
    outputs = [ints(target, *(7,) * 8) for _ in range(2)]
    result = preflash.get_batch_indices_positions(
        ints(target, 2, 3, 5), ints(target, 5, 2), 8, *outputs
    )
    assert all(a is b for a, b in zip(result, outputs, strict=True))
    assert outputs[0].tolist() == [-1, -1, 0, 1, 1, -1, -1, -1]
    assert outputs[1].tolist() == [0, 0, 4, 0, 1, 0, 0, 0]
    indices, positions = preflash.get_batch_indices_positions(ints(target, 0), ints(target), 3)
    assert (indices.tolist(), positions.tolist()) == ([-1] * 3, [0] * 3)


BAD_PAGE_TABLES = {
    "falls": (([0, 5, 3], [1, 1], 4), "kv_indptr goes from 0 to 3 with a smallest step of -2"),
    "below": (([-1, 2], [1], 4), "kv_indptr goes from -1"),
    "last page too long": (([0, 2], [5], 4), r"kv_last_page_len\[0\] = 5: must be in .* 4\]"),
    "last page empty": (([0, 0, 2], [0, 0], 4), r"kv_last_page_len\[1\] = 0"),
    "beyond int32": (([0, 1 << 20], [1], 1 << 12), "1048576 pages of 4096 tokens"),
}


@pytest.mark.parametrize(("table", "message"), BAD_PAGE_TABLES.values(), ids=BAD_PAGE_TABLES)
def test_lengths_of_a_bad_page_table(target, table, message, monkeypatch):
    monkeypatch.setenv("PREFLASH_DEBUG", "1")  # reads what lies on the GPU
    kv_indptr, last_page_len, page_size = table
    with pytest.raises(ValueError, match=message):
        preflash.get_seq_lens(ints(target, *kv_indptr), ints(target, *last_page_len), page_size)


BAD_APPENDS = {
    "falls": (([0, 5, 3], [5, 5]), "append_indptr goes from 0 to 3 with a smallest step of -2"),
    "below": (([-2, 3], [5]), "append_indptr goes from -2"),
    "shorter than what is appended": (([0, 1, 6], [1, 4]), r"seq_lens\[1\] = 4: .* the 5 tokens"),
    "beyond int32": (([0, 2], [1 << 33]), r"seq_lens\[0\] = 8589934592"),
}


@pytest.mark.parametrize(("arrays", "message"), BAD_APPENDS.values(), ids=BAD_APPENDS)
def test_positions_of_a_bad_append(target, arrays, message, monkeypatch):
    monkeypatch.setenv("PREFLASH_DEBUG", "1")
    append_indptr, seq_lens = (torch.tensor(array, device=target.device) for array in arrays)
    outputs = [ints(target, *(7,) * 6) for _ in range(2)]
    with pytest.raises(ValueError, match=message):
        preflash.get_batch_indices_positions(append_indptr, seq_lens, 6, *outputs)
    assert all(output.tolist() == [7] * 6 for output in outputs)


def random_bits(shape, dtype, generator) -> torch.Tensor:
    """Every pattern of bits, NaN with a payload included."""
    bytes_ = torch.randint(
        0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), generator=generator, dtype=torch.uint8
    )
    return bytes_.view(dtype)


FORMS = {
    "one tensor": lambda k, v: torch.stack([k, v], 1),
    "a pair": lambda k, v: (k, v),
    "halves": lambda k, v: torch.cat([k, v], -1).split(k.shape[-1], -1),
}


def block_table(order: torch.Tensor, indptr: list[int], target) -> torch.Tensor:
    """The pages as a block table with padding columns, which hold no page."""
    counts = torch.tensor(indptr).diff()
    table = torch.full((len(counts), int(counts.max()) + 5), 10**6, dtype=torch.int32)
    for row, begin, count in zip(table, indptr, counts, strict=False):
        row[:count] = order[begin : begin + count]
    return target.to(table)[:, : int(counts.max()) + 2]


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [1, 5, 16])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("as_table", [False, True], ids=["list", "table"])
def test_append(target, as_table, form, layout, page_size, dtype):
    generator = torch.Generator().manual_seed(page_size)
    before, appended = (0, 21, 4, 7), (19, 1, 0, 16)
    pages = [-(-(a + b) // page_size) for a, b in zip(before, appended, strict=True)]
    order = torch.randperm(sum(pages) + 3, generator=generator).int()
    indptr = [2, *(2 + sum(pages[: i + 1]) for i in range(4))]  # two foreign entries first
    order[:2] = torch.tensor([-5, 10**6])
    foreign = torch.randperm(sum(pages) + 3, generator=generator)[: sum(pages)].int()
    order[2 : 2 + sum(pages)] = foreign
    last = [(a + b - 1) % page_size + 1 for a, b in zip(before, appended, strict=True)]
    tokens = sum(appended)
    rows = [random_bits((tokens + 4, 2, 24), dtype, generator) for _ in range(2)]
    shape = (sum(pages) + 3, page_size, 2, 24)
    pools = [random_bits(shape, dtype, generator) for _ in range(2)]

    expected = [pool.clone().view(torch.uint8) for pool in pools]
    token = 0
    for i in range(4):
        for position in range(before[i], before[i] + appended[i]):
            page = int(order[indptr[i] + position // page_size])
            for pool, new in zip(expected, rows, strict=True):
                pool[page, position % page_size] = new[token].view(torch.uint8)
            token += 1

    laid_out = [target.to(p if layout == "NHD" else p.transpose(1, 2).contiguous()) for p in pools]
    cache = form(*laid_out)
    starts = ints(target, 0, *torch.tensor(appended).cumsum(0).tolist())
    pages_of = block_table(order, indptr, target) if as_table else target.to(order)
    table = (pages_of, ints(target, *indptr), ints(target, *last))
    lengths = preflash.get_seq_lens(table[1], table[2], page_size)
    assert lengths.tolist() == [a + b for a, b in zip(before, appended, strict=True)]
    places = preflash.get_batch_indices_positions(starts, lengths, tokens + 4)  # 4 of padding
    preflash.append_paged_kv_cache(*map(target.to, rows), *places, cache, *table, layout)
    for i, wanted in enumerate(expected):
        got = cache[:, i] if isinstance(cache, torch.Tensor) else cache[i]
        got = got if layout == "NHD" else got.transpose(1, 2)
        assert torch.equal(got.contiguous().cpu().view(torch.uint8), wanted)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("head_dim", [1, 3, 9, 36, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_append_of_strided_rows(target, dtype, head_dim, index_dtype):
    """Rows and indices out of larger tensors, K and V of different head_dim, odd addresses."""
    generator = torch.Generator().manual_seed(head_dim)
    tokens, heads, page_size, pages = 21, 3, 5, 9
    dims = (head_dim, head_dim + 2)
    wide = random_bits((tokens, heads, sum(dims) + 1), dtype, generator)
    pools = [random_bits((pages, page_size, heads, 7 + dim), dtype, generator) for dim in dims]
    order = torch.randperm(pages, generator=generator)
    owners = torch.zeros(tokens, dtype=torch.int64)
    owners[15:], owners[[4, 17]] = 1, -1
    positions = torch.cat([torch.arange(15) + 7, torch.arange(6)])
    expected = [pool.clone() for pool in pools]
    for token in range(tokens):
        if owners[token] < 0:
            continue
        entry = int(owners[token]) * 5 + int(positions[token]) // page_size
        slot = (int(order[entry]), int(positions[token]) % page_size)
        columns = (slice(1, 1 + dims[0]), slice(1 + dims[0], None))
        for pool, column, dim in zip(expected, columns, dims, strict=True):
            row = pool[slot].view(torch.uint8)
            begin = 3 * dtype.itemsize
            new = wide[token][:, column].contiguous().view(torch.uint8)
            row[:, begin : begin + dim * dtype.itemsize] = new

    def index(values):
        """Every other element of an array."""
        return target.to(torch.stack([values, values + 77], 1).to(index_dtype))[:, 0]

    on_device = [target.to(pool) for pool in pools]
    rows = target.to(wide)
    preflash.append_paged_kv_cache(
        rows[:, :, 1 : 1 + dims[0]],
        rows[:, :, 1 + dims[0] :],
        index(owners),
        index(positions),
        tuple(pool[..., 3 : 3 + dim] for pool, dim in zip(on_device, dims, strict=True)),
        index(order),
        index(torch.tensor([0, 5, 7])),
        index(torch.tensor([2, 1])),
    )
    for got, wanted in zip(on_device, expected, strict=True):
        assert torch.equal(got.cpu().view(torch.uint8), wanted.view(torch.uint8))


def test_append_of_many_tokens(target):
    """More than one task of the CPU, more than one wave of a GPU."""
    tokens, heads, head_dim, page_size = 5000, 2, 64, 16
    k, v = (torch.randn(tokens, heads, head_dim, device=target.device) for _ in range(2))
    pages = -(-tokens // page_size)
    order = torch.randperm(pages).int().to(target.device)
    cache = torch.zeros(pages, 2, heads, page_size, head_dim, device=target.device)
    place = torch.arange(tokens, dtype=torch.int32, device=target.device)
    preflash.append_paged_kv_cache(
        k, v, torch.zeros_like(place), place, cache, order, ints(target, 0, pages),
        ints(target, (tokens - 1) % page_size + 1), "HND",
    )  # fmt: skip
    for i, rows in enumerate((k, v)):
        assert torch.equal(cache[order.long(), i].transpose(1, 2).flatten(0, 1)[:tokens], rows)


@pytest.mark.gpu
def test_a_captured_append_follows_its_arrays():
    cache = torch.zeros(3, 2, 4, 1, 8, device="cuda")
    rows = torch.ones(2, 1, 8, device="cuda")
    place = torch.tensor([[0, -1], [1, 0]], dtype=torch.int32, device="cuda")
    table = [torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([2, 1], [0, 2], [4])]
    arguments = (rows, rows, place[0], place[1], cache, *table)
    preflash.append_paged_kv_cache(*arguments)
    cache.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        preflash.append_paged_kv_cache(*arguments)
    place.copy_(torch.tensor([[0, 0], [7, 2]]))
    graph.replay()
    assert cache[:, 0, :, 0, 0].nonzero().tolist() == [[1, 3], [2, 2]]


def test_what_the_table_has_no_place_for_is_not_written(target, monkeypatch):
    """On the GPU without PREFLASH_DEBUG nobody looks; the kernel does not write elsewhere, not into
    the next request's page either. The CPU's is shown the same here."""
    monkeypatch.setattr(page.checks, "may_be_read", lambda _: False)
    cache = torch.zeros(4, 2, 4, 1, 8, device=target.device)
    rows = torch.ones(8, 1, 8, device=target.device)
    batch, positions = (0, 5, -3, 1, 0, 1, 0, 1), (400, 0, 0, 0, -1, 3, 8, 4)
    preflash.append_paged_kv_cache(
        rows, rows, ints(target, *batch), ints(target, *positions), cache,
        ints(target, 77, -1, 2, 3), ints(target, 0, 2, 3), ints(target, 4, 4),
    )  # fmt: skip
    assert cache[:, 0, :, 0, 0].nonzero().tolist() == [[2, 0], [2, 3]]
    cache.zero_()  # written once: by the token of request 1, not by the one behind request 0's
    preflash.append_paged_kv_cache(
        rows[:1], rows[:1], ints(target, 0), ints(target, 8), cache,
        ints(target, 0, 1, 2), ints(target, 0, 2, 3), ints(target, 4, 4),
    )  # fmt: skip
    assert not cache.any()
    # Rows of a block table that are 2 wide and 3 apart.
    table = ints(target, 2, 0, 1, 3, 1, 1).view(2, 3)[:, :2]
    preflash.append_paged_kv_cache(
        rows, rows, ints(target, *batch), ints(target, *positions), cache, table,
        ints(target, 0, 1, 4), ints(target, 4, 4),
    )  # fmt: skip
    assert cache[:, 0, :, 0, 0].nonzero().tolist() == [[1, 0], [3, 0], [3, 3]]
    cache.zero_()
    for place in (8, 4):  # page 2 of request 1, which has two columns; page 1 of request 0: has one
        preflash.append_paged_kv_cache(
            rows[:1], rows[:1], ints(target, int(place == 8)), ints(target, place), cache, table,
            ints(target, 0, 1, 4), ints(target, 4, 4),
        )  # fmt: skip
    assert not cache.any()


def test_append_to_slots(target):
    """page_size 1 without its dimension, and tokens that are all padding."""
    cache = tuple(torch.zeros(6, 2, 8, device=target.device) for _ in range(2))
    rows = torch.ones(2, 2, 8, device=target.device)
    table = (ints(target, 4, 1), ints(target, 0, 2), ints(target, 1))
    nobody = (ints(target, -1, -1), ints(target, 0, 0))
    preflash.append_paged_kv_cache(rows, rows, *nobody, cache, *table)
    assert not cache[0].any()
    preflash.append_paged_kv_cache(rows, 2 * rows, ints(target, 0, -1), ints(target, 1, 0), cache,
                                   *table)  # fmt: skip
    assert cache[0].sum((1, 2)).tolist() == [0, 16, 0, 0, 0, 0]
    assert cache[1].sum((1, 2)).tolist() == [0, 32, 0, 0, 0, 0]


def test_nothing_to_append(target):
    cache = torch.ones(3, 2, 4, 2, 8, device=target.device)
    rows = torch.zeros(0, 2, 8, device=target.device)
    nobody = (ints(target), ints(target))
    preflash.append_paged_kv_cache(
        rows, rows, *nobody, cache, ints(target), ints(target, 0, 0), ints(target, 0)
    )
    assert bool((cache == 1).all())


def arguments(target) -> dict:
    rows = torch.ones(3, 2, 8, device=target.device)
    return {
        "append_key": rows,
        "append_value": rows,
        "batch_indices": ints(target, 0, 1, 1),
        "positions": ints(target, 5, 0, 1),
        "paged_kv_cache": torch.zeros(4, 2, 4, 2, 8, device=target.device),
        "kv_indices": ints(target, 3, 1, 0),
        "kv_indptr": ints(target, 0, 2, 3),
        "kv_last_page_len": ints(target, 2, 2),
    }


MISTAKES = {
    "dtype": ("append_key", lambda t: t.half(), TypeError, "append_key is torch.float16"),
    "heads": ("append_value", lambda t: t[:, :1], ValueError, "append_value has shape"),
    "tokens": ("append_value", lambda t: t[:2], ValueError, "append_value has 2 tokens"),
    "indices": ("batch_indices", lambda t: t[:2], ValueError, "batch_indices has shape"),
    "float": ("positions", lambda t: t.float(), TypeError, "positions is torch.float32"),
    "beyond": ("positions", lambda t: t + 1, ValueError, "positions: 6 for request 0, .* 6 tokens"),
    "below": ("positions", lambda t: t - 1, ValueError, "positions: -1 for request 1"),
    "request": ("batch_indices", lambda t: t + 1, ValueError, "batch_indices holds 2"),
    "page": ("kv_indices", lambda t: t + 3, ValueError, "kv_indices holds pages .* 4"),
    "rows of a table": (
        "kv_indices",
        lambda t: t[None],
        ValueError,
        r"kv_indices has shape .*must be \(2, 3\): \[batch_size, pages\]",
    ),
    "columns of a table": (
        "kv_indices",
        lambda t: t[:2, None],
        ValueError,
        "kv_indices has 1 columns; kv_indptr counts 2 pages",
    ),
    "pages of a table": (
        "kv_indices",
        lambda t: torch.stack([t[:2] + 3, t[:2]]),
        ValueError,
        "kv_indices holds pages .* 4",
    ),
    "strides of a table": (
        "kv_indices",
        lambda t: torch.stack([t[:2], t[:2]]).t().contiguous().t(),
        ValueError,
        "kv_indices has stride 2 in its last",
    ),
    "dimensions of a table": (
        "kv_indices",
        lambda t: t[None, None],
        ValueError,
        "kv_indices has shape .* one-dimensional",
    ),
    "table": (
        "kv_indptr",
        lambda t: t[:-1],
        ValueError,
        r"kv_last_page_len has shape \(2,\)",
    ),
    "cache": ("paged_kv_cache", lambda t: t[:, :1], ValueError, "paged_kv_cache has shape"),
    "layout": ("kv_layout", lambda _: "DHN", ValueError, "kv_layout"),
    "columns": (
        "append_key",
        lambda t: torch.stack([t, t], -1)[..., 0],
        ValueError,
        "append_key has stride 2 in its last",
    ),
    "cache columns": (
        "paged_kv_cache",
        lambda t: torch.stack([t, t], -1)[..., 0],
        ValueError,
        "the cache has stride 2 in its last",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_refusals(target, mistake, monkeypatch):
    monkeypatch.setenv("PREFLASH_DEBUG", "1")
    name, spoil, error, match = mistake
    good = arguments(target)
    cache = good["paged_kv_cache"]
    with pytest.raises(error, match=match):
        preflash.append_paged_kv_cache(**{**good, name: spoil(good.get(name))})
    assert not cache.any()
    preflash.append_paged_kv_cache(**good)
    assert int(cache.sum()) == 2 * 3 * 16


def test_tokens_move_within_a_cache(target):
    """Each token moves to the next one's slot, as if all were read before any is written."""
    tokens = 50
    cache = torch.randn(64, 2, 1, 2, 8, device=target.device)
    before = cache.clone()
    owner, positions = torch.zeros(tokens).int(), torch.arange(tokens).int()
    preflash.append_paged_kv_cache(
        cache[:tokens, 0, 0],
        cache[:tokens, 1, 0],
        target.to(owner),
        target.to(positions),
        cache,
        target.to(torch.arange(1, tokens + 1).int()),
        ints(target, 0, tokens),
        ints(target, 1),
    )
    assert torch.equal(cache[1 : tokens + 1], before[:tokens])
    assert torch.equal(cache[tokens + 1 :], before[tokens + 1 :])
    assert torch.equal(cache[0], before[0])


def test_one_pool_for_different_keys_and_values_is_refused(target):
    good = arguments(target)
    pool = good["paged_kv_cache"][:, 0].clone()
    good["paged_kv_cache"] = (pool, pool)
    with pytest.raises(ValueError, match=r"^v_cache lies where k_cache does"):
        preflash.append_paged_kv_cache(**{**good, "append_value": good["append_value"] * 2})
    assert not pool.any()
    preflash.append_paged_kv_cache(**good)  # the same rows
    assert int(pool.sum()) == 3 * 16


def test_positions_into_memory_that_is_shared(target):
    given = (ints(target, 0, 2), ints(target, 5), 2)
    room = ints(target, 7, 7, 7)
    with pytest.raises(ValueError, match=r"^batch_indices shares memory with positions"):
        preflash.get_batch_indices_positions(*given, room[:2], room[1:])
    with pytest.raises(ValueError, match=r"^positions has strides"):
        preflash.get_batch_indices_positions(*given, room[:2], room[2:].expand(2))
    assert room.tolist() == [7, 7, 7]


def test_appended_keys_are_attended_to(target):
    """From the append to the numbers: the cache of the oracle, token by token."""
    case = Case("append", (3, 1, 5), (40, 7, 5), 4, 2, 64, page_size=16, form=KvForm.SEPARATE)
    inputs = build(case, device=target.device)
    k, v = (torch.cat([getattr(inputs.request(i), name) for i in range(3)]) for name in "kv")
    empty = tuple(torch.full_like(t, float("nan")) for t in (inputs.k, inputs.v))
    starts = ints(target, 0, 40, 47, 52)
    places = preflash.get_batch_indices_positions(starts, ints(target, 40, 7, 5), 52)
    table = (inputs.indices, inputs.kv_indptr, inputs.last_page_len)
    preflash.append_paged_kv_cache(k, v, *places, empty, *table)
    filled = dataclasses.replace(inputs, cache=empty)
    wrapper = runner.make_wrapper(case, backend=target.backend, device=target.device)
    runner.plan(wrapper, filled)
    runner.compare(inputs, *runner.run(wrapper, filled)).check()


def appended(target, *, page_size=4, batch, position, indices, indptr, last):
    k = torch.zeros(4, page_size, 1, 8, dtype=torch.float16, device=target.device)
    v = torch.zeros_like(k)
    rows = torch.ones(len(batch), 1, 8, dtype=torch.float16, device=target.device)
    page_table = (ints(target, *indices), ints(target, *indptr), ints(target, *last))
    try:
        preflash.append_paged_kv_cache(
            rows, rows, ints(target, *batch), ints(target, *position), (k, v), *page_table
        )
    finally:
        written = bool((k != 0).any() or (v != 0).any())
    return written


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"indices": [1, 2], "indptr": [0, 1, 2], "last": [8, 4]}, r"kv_last_page_len\[0\] = 8"),
        ({"indices": [1], "indptr": [0, 2, 2], "last": [2, 4]}, "kv_indices has 1 elements"),
        ({"indices": [], "indptr": [0, 2, 2], "last": [2, 4]}, "kv_indices has 0 elements"),
        ({"indices": [1], "indptr": [-1, 1], "last": [2]}, "kv_indptr goes from -1 to 1"),
        ({"indices": [1], "indptr": [0, 5, 1], "last": [2, 4]}, "smallest step of -4"),
    ],
)
def test_a_page_table_that_reaches_into_other_pages_is_refused(target, table, message, monkeypatch):
    monkeypatch.setenv("PREFLASH_DEBUG", "1")  # reads what lies on the GPU
    with pytest.raises(ValueError, match=message):
        appended(target, batch=[0], position=[5], **table)


def test_padding_looks_at_no_page(target):
    """77 is no page of the pool; nobody owns that entry."""
    table = {"indices": [77], "indptr": [0, 0], "last": [1]}
    assert not appended(target, batch=[-1], position=[0], **table)


def test_numbers_that_memory_does_not_hold_are_refused(target):
    """A conjugate view and a quantized tensor have the bytes of other numbers."""
    pool = torch.zeros(2, 2, 4, 1, 8, dtype=torch.complex64, device=target.device)
    rows = torch.randn(1, 1, 8, dtype=torch.complex64, device=target.device)
    zero, table = ints(target, 0), (ints(target, 1), ints(target, 0, 1), ints(target, 1))
    for new, cache in ((rows.conj(), pool), (rows, pool.conj())):
        with pytest.raises(TypeError, match="is a conjugate view"):
            preflash.append_paged_kv_cache(new, new, zero, zero, cache, *table)
    assert not pool.any()
    preflash.append_paged_kv_cache(rows.conj().resolve_conj(), rows, zero, zero, pool, *table)
    assert torch.equal(pool[1, 0, 0], rows[0].conj())


def test_pools_that_overlap_themselves_are_refused(target):
    pool = torch.zeros(2, 1, 4, 1, 8, dtype=torch.float16, device=target.device)
    rows = torch.ones(1, 1, 8, dtype=torch.float16, device=target.device)
    zero = ints(target, 0)
    with pytest.raises(ValueError, match="overlap"):
        preflash.append_paged_kv_cache(
            rows, 2 * rows, zero, zero, pool.expand(2, 2, 4, 1, 8), zero, ints(target, 0, 1),
            ints(target, 1),
        )  # fmt: skip
