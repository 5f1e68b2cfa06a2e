"""Lengths, positions and appends of page tables are those of a loop over tokens."""

import preflash
import pytest
import torch
from fuzz import append_problems
from fuzz.random_cases import Limits
from preflash import page

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn]


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
    """Tokens before the first request and after the last have no request."""
    outputs = [ints(target, *(7,) * 8) for _ in range(2)]
    result = preflash.get_batch_indices_positions(
        ints(target, 2, 3, 5), ints(target, 5, 2), 8, *outputs
    )
    assert all(a is b for a, b in zip(result, outputs, strict=True))
    assert outputs[0].tolist() == [-1, -1, 0, 1, 1, -1, -1, -1]
    assert outputs[1].tolist() == [0, 0, 4, 0, 1, 0, 0, 0]
    indices, positions = preflash.get_batch_indices_positions(ints(target, 0), ints(target), 3)
    assert (indices.tolist(), positions.tolist()) == ([-1] * 3, [0] * 3)


FALLS = [0, 5, 3]
BAD_LENGTHS = [
    (FALLS, [1, 1], 4, "kv_indptr goes from 0 to 3 with a smallest step of -2"),
    ([-1, 2], [1], 4, "kv_indptr goes from -1"),
    ([0, 2], [5], 4, r"kv_last_page_len\[0\] = 5: must be in .* 4\]"),
    ([0, 0, 2], [0, 0], 4, r"kv_last_page_len\[1\] = 0"),
    ([0, 1 << 20], [1], 1 << 12, "1048576 pages of 4096 tokens"),
]
BAD_APPENDS = [
    (FALLS, [5, 5], "append_indptr goes from 0 to 3 with a smallest step of -2"),
    ([-2, 3], [5], "append_indptr goes from -2"),
    ([0, 1, 6], [1, 4], r"seq_lens\[1\] = 4: .* the 5 tokens"),
    ([0, 2], [1 << 33], r"seq_lens\[0\] = 8589934592"),
]


@pytest.fixture
def debugging(monkeypatch):
    """Values on the GPU are read and checked, too."""
    monkeypatch.setenv("PREFLASH_DEBUG", "1")


@pytest.mark.parametrize(("indptr", "last", "page_size", "message"), BAD_LENGTHS)
def test_lengths_of_a_bad_page_table(target, debugging, indptr, last, page_size, message):
    with pytest.raises(ValueError, match=message):
        preflash.get_seq_lens(ints(target, *indptr), ints(target, *last), page_size)


@pytest.mark.parametrize(("indptr", "seq_lens", "message"), BAD_APPENDS)
def test_positions_of_a_bad_append(target, debugging, indptr, seq_lens, message):
    outputs = [ints(target, *(7,) * 6) for _ in range(2)]
    seq_lens = torch.tensor(seq_lens, device=target.device)
    with pytest.raises(ValueError, match=message):
        preflash.get_batch_indices_positions(ints(target, *indptr), seq_lens, 6, *outputs)
    assert all(output.tolist() == [7] * 6 for output in outputs)


def test_positions_into_memory_that_is_shared(target):
    given = (ints(target, 0, 2), ints(target, 5), 2)
    room = ints(target, 7, 7, 7)
    with pytest.raises(ValueError, match=r"^batch_indices shares memory with positions"):
        preflash.get_batch_indices_positions(*given, room[:2], room[1:])
    with pytest.raises(ValueError, match=r"^positions has strides"):
        preflash.get_batch_indices_positions(*given, room[:2], room[2:].expand(2))
    assert room.tolist() == [7, 7, 7]


def random_bits(shape, dtype, generator) -> torch.Tensor:
    """Returns any patterns of bits, NaN with a payload included."""
    bytes_ = torch.randint(
        0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), generator=generator, dtype=torch.uint8
    )
    return bytes_.view(dtype)


@pytest.mark.parametrize("seed", range(100))
def test_random_appends(target, seed):
    """Every bit of the pools and of the memory around them is as a loop over tokens leaves it."""
    limits = Limits(100, 1e6, (torch.float16, torch.bfloat16, torch.float32))
    problem = append_problems.draw(1, seed, limits)
    verdict = append_problems.examine(problem, backend=target.backend, device=target.device)
    assert verdict.failures == []


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [1, 5, 16])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_append_by_other_page_tables(target, layout, page_size, dtype):
    """The pages may begin later in the list, or be rows of a block table with padding columns,
    which hold no page."""
    generator = torch.Generator().manual_seed(page_size)
    lengths, appended = [19, 22, 4, 23], [19, 1, 0, 16]
    counts = [-(-n // page_size) for n in lengths]
    pages = torch.randperm(sum(counts) + 3, generator=generator).int()[: sum(counts)]
    later = torch.cat([torch.tensor([-5, 10**6]).int(), pages])
    table = torch.full((4, max(counts) + 5), 10**6, dtype=torch.int32)
    for row, own in zip(table, pages.split(counts), strict=True):
        row[: len(own)] = own
    table = target.to(table)[:, : max(counts) + 2]
    indptr = ints(target, 0, *torch.tensor(counts).cumsum(0).tolist())
    last = ints(target, *((n - 1) % page_size + 1 for n in lengths))
    assert preflash.get_seq_lens(indptr + 2, last, page_size).tolist() == lengths
    starts = ints(target, 0, *torch.tensor(appended).cumsum(0).tolist())
    places = preflash.get_batch_indices_positions(starts, ints(target, *lengths), 40)
    rows = [target.to(random_bits((40, 2, 24), dtype, generator)) for _ in range(2)]
    tokens = (page_size, 2) if layout == "NHD" else (2, page_size)
    before = target.to(random_bits((sum(counts) + 3, 2, *tokens, 24), dtype, generator))
    caches = []
    for indices, begins in ((pages, indptr), (later, indptr + 2), (table, indptr + 2)):
        caches.append(before.clone())
        given = (target.to(indices), begins, last, layout)
        preflash.append_paged_kv_cache(*rows, *places, caches[-1], *given)
    untouched, wanted, *others = (t.view(torch.uint8) for t in (before, *caches))
    assert not torch.equal(wanted, untouched)
    assert all(torch.equal(other, wanted) for other in others)


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
        """Returns every other element of an array."""
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


def test_tokens_without_a_place_are_not_written(target, monkeypatch):
    """Kernels do not write outside the table, nor into the next request's page, where nothing is
    checked: on the GPU without PREFLASH_DEBUG. Here the CPU takes the same path."""
    monkeypatch.setattr(page.checks, "may_be_read", lambda _: False)
    cache = torch.zeros(4, 2, 4, 1, 8, device=target.device)

    def append(batch, positions, pages, indptr):
        """Returns the slots [page, row] that the tokens are written to."""
        rows = torch.ones(len(batch), 1, 8, device=target.device)
        cache.zero_()
        preflash.append_paged_kv_cache(
            rows, rows, ints(target, *batch), ints(target, *positions), cache, pages,
            ints(target, *indptr), ints(target, 4, 4),
        )  # fmt: skip
        return cache[:, 0, :, 0, 0].nonzero().tolist()

    batch, positions = (0, 5, -3, 1, 0, 1, 0, 1), (400, 0, 0, 0, -1, 3, 8, 4)
    written = append(batch, positions, ints(target, 77, -1, 2, 3), (0, 2, 3))
    assert written == [[2, 0], [2, 3]]
    # Written by the token of request 1 alone, not by that after the last of request 0.
    assert append((0,), (8,), ints(target, 0, 1, 2), (0, 2, 3)) == []
    # Rows of a block table that are 2 wide and 3 apart.
    table = ints(target, 2, 0, 1, 3, 1, 1).view(2, 3)[:, :2]
    assert append(batch, positions, table, (0, 1, 4)) == [[1, 0], [3, 0], [3, 3]]
    # Page 2 of request 1, which has two columns; page 1 of request 0, which has one page.
    assert append((1,), (8,), table, (0, 1, 4)) == append((0,), (4,), table, (0, 1, 4)) == []


def test_nothing_to_append(target):
    """Padding looks at no page: 77 is none of the pool."""
    cache = torch.ones(3, 2, 4, 2, 8, device=target.device)
    rows = torch.zeros(2, 2, 8, device=target.device)
    table = (ints(target, 77), ints(target, 0, 0), ints(target, 1))
    for count in (0, 2):
        places = (ints(target, -1, -1)[:count], ints(target, 0, 0)[:count])
        preflash.append_paged_kv_cache(rows[:count], rows[:count], *places, cache, *table)
    assert bool((cache == 1).all())


def arguments(target) -> dict:
    rows = torch.ones(3, 2, 8, device=target.device)
    return {
        "append_key": rows,
        "append_value": 2 * rows,
        "batch_indices": ints(target, 0, 1, 1),
        "positions": ints(target, 5, 0, 1),
        "paged_kv_cache": torch.zeros(4, 2, 4, 2, 8, device=target.device),
        "kv_indices": ints(target, 3, 1, 0),
        "kv_indptr": ints(target, 0, 2, 3),
        "kv_last_page_len": ints(target, 2, 2),
    }


def every_other(t: torch.Tensor) -> torch.Tensor:
    return torch.stack([t, t], -1)[..., 0]


REFUSED = {
    TypeError: [
        ("append_key", lambda t: t.half(), "append_key is torch.float16"),
        ("positions", lambda t: t.float(), "positions is torch.float32"),
    ],
    ValueError: [
        ("append_value", lambda t: t[:, :1], "append_value has shape"),
        ("append_value", lambda t: t[:2], "append_value has 2 tokens"),
        ("batch_indices", lambda t: t[:2], "batch_indices has shape"),
        ("positions", lambda t: t + 1, "positions: 6 for request 0, .* 6 tokens"),
        ("positions", lambda t: t - 1, "positions: -1 for request 1"),
        ("batch_indices", lambda t: t + 1, "batch_indices holds 2"),
        ("kv_indices", lambda t: t + 3, "kv_indices holds pages .* 4"),
        ("kv_indices", lambda t: t[:1], "kv_indices has 1 elements"),
        ("kv_indices", lambda t: t[:0], "kv_indices has 0 elements"),
        # Block tables.
        ("kv_indices", lambda t: t[None],
         r"kv_indices has shape .*must be \(2, 3\): \[batch_size, pages\]"),
        ("kv_indices", lambda t: t[:2, None], "kv_indices has 1 columns; kv_indptr counts 2 pages"),
        ("kv_indices", lambda t: torch.stack([t[:2] + 3, t[:2]]), "kv_indices holds pages .* 4"),
        ("kv_indices", lambda t: torch.stack([t[:2], t[:2]]).t().contiguous().t(),
         "kv_indices has stride 2 in its last"),
        ("kv_indices", lambda t: t[None, None], "kv_indices has shape .* one-dimensional"),
        ("kv_indptr", lambda t: t[:-1], r"kv_last_page_len has shape \(2,\)"),
        ("kv_indptr", lambda t: t - 1, "kv_indptr goes from -1 to 2"),
        ("kv_indptr", lambda t: t + t.new_tensor([0, 3, -2]), "smallest step of -4"),
        ("kv_last_page_len", lambda t: t + 6, r"kv_last_page_len\[0\] = 8"),
        ("paged_kv_cache", lambda t: t[:, :1], "paged_kv_cache has shape"),
        ("paged_kv_cache", every_other, "the cache has stride 2 in its last"),
        ("paged_kv_cache", lambda t: t[:1].expand(t.shape), "overlap"),
        ("paged_kv_cache", lambda t: (t[:, 0], t[:, 0]), "^v_cache lies where k_cache does"),
        ("kv_layout", lambda _: "DHN", "kv_layout"),
        ("append_key", every_other, "append_key has stride 2 in its last"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("error", "name", "spoil", "match"),
    [
        pytest.param(error, *row, id=f"{row[0]} {number}")
        for error, rows in REFUSED.items()
        for number, row in enumerate(rows)
    ],
)
def test_refusals(target, debugging, error, name, spoil, match):
    good = arguments(target)
    cache = good["paged_kv_cache"]
    with pytest.raises(error, match=match):
        preflash.append_paged_kv_cache(**{**good, name: spoil(good.get(name))})
    assert not cache.any()
    preflash.append_paged_kv_cache(**good)
    assert int(cache.sum()) == (1 + 2) * 3 * 16


def test_one_pool_for_equal_keys_and_values(target):
    good = arguments(target)
    pool = good["paged_kv_cache"][:, 0].clone()
    good |= {"paged_kv_cache": (pool, pool), "append_value": good["append_key"]}
    preflash.append_paged_kv_cache(**good)
    assert int(pool.sum()) == 3 * 16


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
