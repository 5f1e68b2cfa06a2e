"""Lengths, positions and appends of page tables are those of a loop over tokens."""

import copy
import itertools
import random

import preflash
import pytest
import torch
from changed_tensors import strided
from fuzz.guarded import bits
from preflash import page

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn]
INT, LONG = torch.int32, torch.int64


def ints(target, *values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=target.device)


@pytest.mark.parametrize("dtype", [INT, LONG])
def test_lengths_and_positions(target, dtype):
    """Results are int32, in the caller's arrays if given; test_random_appends has more."""
    lengths = preflash.get_seq_lens(ints(target, 2, 5, 5).to(dtype), ints(target, 3, 7), 16)
    assert (lengths.tolist(), lengths.dtype) == ([35, 0], INT)
    given = [ints(target, *(7,) * 4) for _ in range(2)]
    for outputs in ([], given):
        found = preflash.get_batch_indices_positions(
            ints(target, 1, 2).to(dtype), ints(target, 5).to(dtype), 4, *outputs
        )
        assert [one.tolist() for one in found] == [[-1, 0, -1, -1], [0, 4, 0, 0]]
        assert [one.dtype for one in found] == [INT, INT]
    assert all(a is b for a, b in zip(found, given, strict=True))


SHAPES = [(1, 5, INT), (3, 16, LONG), (9, 1, INT), (36, 5, LONG), (128, 16, INT)]


@pytest.mark.parametrize("seed", range(50))
def test_random_appends(target, seed):
    """Every bit of the pools and of the memory around them is as a loop over tokens leaves it.

    K and V have any address, one tensor or two of different head_dim; index arrays are strided. The
    pages may begin later in the list, or be rows of a block table with padding columns, which hold
    no page. The last problems have more than one task of the CPU, more than one wave of a GPU."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    dtype, layout, is_one = DTYPES[seed % 4], ("NHD", "HND")[seed // 4 % 2], draw.random() < 0.4
    head_dim, page_size, index_dtype = SHAPES[seed % 5]
    dims = (head_dim, head_dim + (0 if is_one else 2))
    lengths = [draw.choice([0, 4, draw.randint(1, 100)]) for _ in range(draw.randint(1, 6))]
    new_tokens = [draw.choice([0, min(n, 1), n]) for n in lengths]
    if seed >= 45:
        lengths, new_tokens = [*lengths, 4000], [*new_tokens, 4000]
    counts = [-(-n // page_size) for n in lengths]
    pages = torch.randperm(sum(counts) + 3, generator=generator)[: sum(counts)]
    own = pages.split(counts)

    def drawn(*shape):
        """Draws any patterns of bits, NaN with a payload included."""
        size = (*shape[:-1], shape[-1] * dtype.itemsize)
        values = torch.randint(0, 256, size, generator=generator, dtype=torch.uint8)
        return target.to(values.view(dtype))

    def caches(memory):
        return [each[..., 3 : 3 + dim] for each, dim in zip(memory, dims, strict=True)]

    def index(values):
        """Returns every other element of an array."""
        values = torch.as_tensor(values)
        return target.to(torch.stack([values, values + 77], 1).to(index_dtype))[:, 0]

    begins = torch.tensor([0, *itertools.accumulate(counts)])
    last = index([(n - 1) % page_size + 1 for n in lengths])
    assert preflash.get_seq_lens(index(begins + 2), last, page_size).tolist() == lengths
    owners, positions = [-1] * 3, [0] * 3
    for request, (new, length) in enumerate(zip(new_tokens, lengths, strict=True)):
        owners += [request] * new
        positions += range(length - new, length)
    starts = index([*itertools.accumulate(new_tokens, initial=3)])
    found = preflash.get_batch_indices_positions(starts, index(lengths), len(owners) + 2)
    assert [each.tolist() for each in found] == [[*owners, -1, -1], [*positions, 0, 0]]
    owners[5::9] = [-1] * len(owners[5::9])
    rows = drawn(len(owners), 3, sum(dims) + 1)[..., 1:].split(dims, -1)
    size = (page_size, 3) if layout == "NHD" else (3, page_size)
    sizes = [(len(pages) + 3, *size, 7 + dim) for dim in dims]
    memory = drawn(2, *sizes[0]) if is_one else [drawn(*each) for each in sizes]
    wanted = [each.clone().cpu() for each in memory]
    for token, (owner, position) in enumerate(zip(owners, positions, strict=True)):
        nth, slot = divmod(position, page_size)
        for pool, new in zip(caches(wanted), rows, strict=True):
            if owner >= 0:
                page = bits(pool)[own[owner][nth]]
                page.select(int(layout == "HND"), slot).copy_(bits(new)[token])
    table = torch.full((len(lengths), max(counts) + 5), 10**6, dtype=index_dtype)
    for row, part in zip(table, own, strict=True):
        row[: len(part)] = part
    later = torch.cat([torch.tensor([-5, 10**6]), pages])
    for indices, begin in (
        (index(pages), 0), (index(later), 2), (target.to(table)[:, : max(counts) + 2], 2),
    ):  # fmt: skip
        got = copy.deepcopy(memory)
        cache = got.transpose(0, 1)[..., 3 : 3 + head_dim] if is_one else tuple(caches(got))
        places = index(owners), index(positions)
        table_arrays = indices, index(begins + begin), last
        preflash.append_paged_kv_cache(*rows, *places, cache, *table_arrays, layout)
        assert all(torch.equal(bits(a.cpu()), bits(b)) for a, b in zip(got, wanted, strict=True))


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
    memory = torch.zeros(5, 2, 4, 1, 8, device=target.device)
    cache = memory[:4]

    def append(batch, positions, pages, indptr):
        """Returns the slots [page, row] that the tokens are written to."""
        rows = torch.ones(len(batch), 1, 8, device=target.device)
        cache.zero_()
        preflash.append_paged_kv_cache(
            rows, rows, ints(target, *batch), torch.tensor(positions, device=target.device),
            cache, pages, ints(target, *indptr, 9)[:-1], ints(target, 4, 4),
        )  # fmt: skip
        return cache[:, 0, :, 0, 0].nonzero().tolist()

    batch, positions = (0, 5, -3, 1, 0, 1, 0, 1, 0), (400, 0, 0, 0, -1, 3, 8, 4, 2**32)
    written = append(batch, positions, ints(target, 77, -1, 2, 3), (0, 2, 3))
    assert written == [[2, 0], [2, 3]]
    # Written by the token of request 1 alone, not by that after the last of request 0.
    assert append((0,), (8,), ints(target, 0, 1, 2), (0, 2, 3)) == []
    # Rows of a block table that are 2 wide and 3 apart.
    table = ints(target, 2, 0, 1, 3, 1, 1).view(2, 3)[:, :2]
    assert append(batch, positions, table, (0, 1, 4)) == [[1, 0], [3, 0], [3, 3]]
    # The column after the last one of request 0; the request, entry and page after the last.
    assert append((0,), (8,), table, (0, 3, 4)) == []
    pages = ints(target, 0, 1, 2, 3, 4)
    assert append((2,), (0,), pages, (0, 2, 3)) == append((1,), (4,), pages[:3], (0, 2, 5)) == []
    assert append((1,), (8,), pages, (0, 2, 5)) == []
    assert not memory[4].any()
    # Page 2 of request 1, which has two columns; page 1 of request 0, which has one page.
    assert append((1,), (8,), table, (0, 1, 4)) == append((0,), (4,), table, (0, 1, 4)) == []


def arguments(target) -> dict:
    rows = torch.ones(3, 2, 8, device=target.device)
    return {
        "append_key": rows, "append_value": 2 * rows,
        "batch_indices": ints(target, 0, 1, 1), "positions": ints(target, 5, 0, 1),
        "paged_kv_cache": torch.zeros(4, 2, 4, 2, 8, device=target.device),
        "kv_indices": ints(target, 3, 1, 0), "kv_indptr": ints(target, 0, 2, 3),
        "kv_last_page_len": ints(target, 2, 2),
    }  # fmt: skip


def test_nothing_to_append(target):
    """Padding looks at no page: 77 is none of the pool."""
    given = {**arguments(target), "kv_indices": ints(target, 77)}
    given |= {"kv_indptr": ints(target, 0, 0), "kv_last_page_len": ints(target, 1)}
    given["batch_indices"] = ints(target, -1, -1)
    tokens = ("append_key", "append_value", "batch_indices", "positions")
    for count in (0, 2):
        padding = {name: given[name][:count] for name in tokens}
        preflash.append_paged_kv_cache(**{**given, **padding})
    assert not given["paged_kv_cache"].any()


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
    before, place = cache.clone(), target.to(torch.arange(tokens + 1).int())
    preflash.append_paged_kv_cache(
        *cache[:tokens, :, 0].unbind(1), torch.zeros_like(place[1:]), place[:-1], cache, place[1:],
        ints(target, 0, tokens), ints(target, 1),
    )  # fmt: skip
    assert torch.equal(cache[1 : tokens + 1], before[:tokens])
    assert torch.equal(cache[tokens + 1 :], before[tokens + 1 :])
    assert torch.equal(cache[0], before[0])


@pytest.fixture
def debugging(monkeypatch):
    """Values on the GPU are read and checked, too."""
    monkeypatch.setenv("PREFLASH_DEBUG", "1")


# Argument, the error, how it is spoiled, and the message.
REFUSED = [
    ("append_key", TypeError, lambda t: t.half(), "append_key is torch.float16"),
    ("positions", TypeError, lambda t: t.float(), "positions is torch.float32"),
    ("append_value", ValueError, lambda t: t[:, :1], "append_value has shape"),
    ("append_value", ValueError, lambda t: t[:2], "append_value has 2 tokens"),
    ("batch_indices", ValueError, lambda t: t[:2], "batch_indices has shape"),
    ("positions", ValueError, lambda t: t + 1, "positions: 6 for request 0, .* 6 tokens"),
    ("positions", ValueError, lambda t: t - 1, "positions: -1 for request 1"),
    ("batch_indices", ValueError, lambda t: t + 1, "batch_indices holds 2"),
    ("kv_indices", ValueError, lambda t: t + 3, "kv_indices holds pages .* 4"),
    ("kv_indices", ValueError, lambda t: t[:0], "kv_indices has 0 elements"),
    # Block tables.
    ("kv_indices", ValueError, lambda t: t[None],
     r"kv_indices has shape .*must be \(2, 3\): \[batch_size, pages\]"),
    ("kv_indices", ValueError, lambda t: t[:2, None], "has 1 columns; kv_indptr counts 2 pages"),
    ("kv_indices", ValueError, lambda t: torch.stack([t[:2] + 3, t[:2]]),
     "kv_indices holds pages .* 4"),
    ("kv_indices", ValueError, lambda t: torch.stack([t[:2], t[:2]]).t().contiguous().t(),
     "kv_indices has stride 2 in its last"),
    ("kv_indices", ValueError, lambda t: t[None, None], "kv_indices has shape .* one-dimensional"),
    ("kv_indptr", ValueError, lambda t: t[:-1], r"kv_last_page_len has shape \(2,\)"),
    ("kv_indptr", ValueError, lambda t: t - 1, "kv_indptr goes from -1 to 2"),
    ("kv_indptr", ValueError, lambda t: t + t.new_tensor([0, 3, -2]), "smallest step of -4"),
    ("kv_last_page_len", ValueError, lambda t: t + 6, r"kv_last_page_len\[0\] = 8"),
    ("paged_kv_cache", ValueError, lambda t: t[:, :1], "paged_kv_cache has shape"),
    ("paged_kv_cache", ValueError, strided, "the cache has stride 2 in its last"),
    ("paged_kv_cache", ValueError, lambda t: t[:1].expand(t.shape), "overlap"),
    ("paged_kv_cache", ValueError, lambda t: (t[:, 0], t[:, 0]),
     "^v_cache lies where k_cache does"),
    ("kv_layout", ValueError, lambda _: "DHN", "kv_layout"),
    ("append_key", ValueError, strided, "append_key has stride 2 in its last"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "error", "spoil", "match"), REFUSED)
def test_refusals_of_append(target, debugging, name, error, spoil, match):
    good = arguments(target)
    cache = good["paged_kv_cache"]
    with pytest.raises(error, match=match):
        preflash.append_paged_kv_cache(**{**good, name: spoil(good.get(name))})
    assert not cache.any()
    preflash.append_paged_kv_cache(**good)
    assert int(cache.sum()) == (1 + 2) * 3 * 16


def test_numbers_that_memory_does_not_hold_are_refused(target):
    """A conjugate view has the bytes of other numbers."""
    given = {
        name: t.to(torch.complex64) if t.is_floating_point() else t
        for name, t in arguments(target).items()
    }
    for name in ("append_key", "paged_kv_cache"):
        with pytest.raises(TypeError, match="is a conjugate view"):
            preflash.append_paged_kv_cache(**{**given, name: given[name].conj()})
    assert not given["paged_kv_cache"].any()
    rows = given["append_key"] = given["append_key"] * (1 + 2j)
    preflash.append_paged_kv_cache(**{**given, "append_value": rows.conj().resolve_conj()})
    assert torch.equal(given["paged_kv_cache"][0, 1, :2], rows[1:].conj())


FALLS = (0, 5, 3)
# Function, its two arrays, its number (page_size or nnz), and the message.
BAD_ARRAYS = [
    ("get_seq_lens", FALLS, (1, 1), 4, "kv_indptr goes from 0 to 3 with a smallest step of -2"),
    ("get_seq_lens", (-1, 2), (1,), 4, "kv_indptr goes from -1"),
    ("get_seq_lens", (0, 2), (5,), 4, r"kv_last_page_len\[0\] = 5: must be in .* 4\]"),
    ("get_seq_lens", (0, 0, 2), (0, 0), 4, r"kv_last_page_len\[1\] = 0"),
    ("get_seq_lens", (0, 1 << 20), (1,), 1 << 12, "1048576 pages of 4096 tokens"),
    ("get_batch_indices_positions", FALLS, (5, 5), 6, "append_indptr .* smallest step of -2"),
    ("get_batch_indices_positions", (-2, 3), (5,), 6, "append_indptr goes from -2"),
    ("get_batch_indices_positions", (0, 1, 6), (1, 4), 6, r"seq_lens\[1\] = 4: .* the 5 tokens"),
    ("get_batch_indices_positions", (0, 2), (1 << 33,), 6, r"seq_lens\[0\] = 8589934592"),
]


@pytest.mark.parametrize(("call", "indptr", "lengths", "number", "message"), BAD_ARRAYS)
def test_refusals_of_arrays(target, debugging, call, indptr, lengths, number, message):
    outputs = [ints(target, *(7,) * 6) for _ in range(2)]
    arrays = ints(target, *indptr), torch.tensor(lengths, device=target.device)
    with pytest.raises(ValueError, match=message):
        getattr(preflash, call)(*arrays, number, *(outputs if "positions" in call else ()))
    assert all(output.tolist() == [7] * 6 for output in outputs)


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        (lambda room: room[1:], "^batch_indices shares memory with positions"),
        (lambda room: room[2:].expand(2), "^positions has strides"),
    ],
)
def test_positions_into_memory_that_is_shared(target, positions, message):
    room = ints(target, 7, 7, 7)
    given = (ints(target, 0, 2), ints(target, 5), 2, room[:2])
    with pytest.raises(ValueError, match=message):
        preflash.get_batch_indices_positions(*given, positions(room))
    assert room.tolist() == [7, 7, 7]
