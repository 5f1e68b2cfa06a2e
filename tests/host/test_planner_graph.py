"""CUDA graphs: what a captured launch holds on to is the same for every later plan."""

import numpy as np
import pytest
from planned import check, indptr, partial_bytes, plan, planner, ragged

FIXED = ("num_requests", "num_ctas", "num_merges", "num_partial_rows")
GQA = {"num_qo_heads": 8, "num_kv_heads": 2}


def random_batch(rng, batch, max_rows, longest_kv):
    cuts = np.sort(rng.integers(0, max_rows + 1, batch))
    qo_lens = np.diff(np.concatenate([[0], cuts]))
    return rng.permutation(qo_lens), rng.integers(0, longest_kv, batch)


@pytest.mark.parametrize("split", [{}, {"disable_split_kv": True}, {"fixed_split_size": 512}])
@pytest.mark.parametrize("seed", range(12))
def test_sizes_and_places_never_move(seed, split):
    rng = np.random.default_rng(seed)
    batch, max_rows = int(rng.integers(1, 7)), int(rng.integers(1, 200))
    options = {
        **GQA,
        **split,
        "graph_max_rows": max_rows,
        "causal": True,
        "tile_m": int(rng.choice([16, 64])),
        "num_sms": int(rng.choice([2, 20])),
        "float_workspace_bytes": int(rng.choice([8 << 20, 64 << 20])),
    }
    first = plan(**ragged([max_rows] + [0] * (batch - 1), [100] * batch, **options))
    for longest_kv in (1, 50, 500, 2000, 2000):
        qo_lens, kv_lens = random_batch(rng, batch, max_rows, longest_kv)
        later = plan(**ragged(qo_lens, kv_lens, **options))
        check(later)
        assert later.layout == first.layout
        assert {name: later.sizes[name] for name in FIXED} == {
            name: first.sizes[name] for name in FIXED
        }


@pytest.mark.parametrize("heads", [(1, 1), (8, 2), (7, 1), (300, 1)], ids=str)
@pytest.mark.parametrize("seed", range(8))
def test_tiles_of_a_mask_never_move(seed, heads):
    """The buffer of the mask bounds what the words of its tiles take, whatever the lengths."""
    rng = np.random.default_rng(seed)
    batch, max_rows = int(rng.integers(1, 7)), int(rng.integers(1, 200))
    options = {
        "family": "sm90",
        "num_qo_heads": heads[0],
        "num_kv_heads": heads[1],
        "tile_m": 128,
        "tile_n": int(rng.choice([64, 128])),
        "graph_max_rows": max_rows,
        "disable_split_kv": True,
        "mask_tiles": True,
    }
    group = heads[0] // heads[1]
    tile_rows = 128 if group > 128 else 128 // group * group

    def masked(qo_lens, kv_lens, room):
        begins = indptr(-(-qo_lens * kv_lens // 8))
        assert begins[-1] <= room
        case = ragged(qo_lens, kv_lens, mask_indptr=begins, graph_mask_bytes=room, **options)
        return plan(**case)

    batches = [random_batch(rng, batch, max_rows, longest) for longest in (1, 300, 5000)]
    batches.append((np.eye(1, batch, dtype=int)[0], np.full(batch, 40000)))  # one long row
    room = max(sum(-(-qo * kv // 8)) for qo, kv in batches)
    first = masked(*batches[0], room)
    for qo_lens, kv_lens in batches:
        later = masked(qo_lens, kv_lens, room)
        assert later.layout == first.layout
        words = later.sizes["segments"][0]["num_mask_tile_words"]
        assert words == first.sizes["segments"][0]["num_mask_tile_words"]
        begin = later.layout["mask_tiles_begin"]
        mask_tiles_begin = np.frombuffer(later.image, "<i8", batch + 1, begin)
        rows = -(-qo_lens * group // tile_rows)
        row_words = -(kv_lens // -options["tile_n"] // 16)
        assert mask_tiles_begin.tolist() == indptr(rows * row_words)
        assert mask_tiles_begin[-1] <= words
        assert later.layout["mask_tiles"] + 4 * words <= later.layout["int_bytes"]


def test_the_worst_batch_fits():
    """Requests one row over a tile each make the most query tiles."""
    options = {"num_qo_heads": 2, "num_kv_heads": 2, "graph_max_rows": 4 * 65}
    made = plan(**ragged([65] * 4, [64] * 4, **options, disable_split_kv=True))
    check(made)
    assert made.sizes["num_items"] == len(made.items) == 4 * 2 * 2


def test_the_fullest_workspace_fits():
    """Every tile in two chunks makes the most merges that its rows allow."""
    options = {**GQA, "graph_max_rows": 8, "fixed_split_size": 64}
    rows = 8 * 2 * 2 * 4
    made = plan(**ragged([1] * 8, [128] * 8, **options, float_workspace_bytes=partial_bytes(rows)))
    check(made)
    assert made.sizes["num_partial_rows"] == rows
    assert (made.merges["num_chunks"] == 2).all()
    assert len(made.merges) == 16


def test_an_automatic_split_reserves_two_waves_of_full_tiles():
    options = {**GQA, "graph_max_rows": 64, "num_sms": 20}
    made = plan(**ragged([1] * 64, [1000] * 64, **options))
    check(made)
    assert made.sizes["num_partial_rows"] == 2 * 40 * 64


def test_tiles_of_one_row_may_be_cut_as_well():
    """Group 3: the 65th row of a request has a tile of its own, split like the first."""
    options = {"num_qo_heads": 3, "num_kv_heads": 1, "graph_max_rows": 65 * 4}
    made = plan(**ragged([65] * 4, [500] * 4, **options, fixed_split_size=64))
    check(made)
    assert made.live_rows(made.merges[3]) == 3 * 65 - 3 * 64 == 3


def test_long_keys_split_into_the_reserved_rows():
    options = {**GQA, "graph_max_rows": 4, "num_sms": 20}
    short = plan(**ragged([1] * 4, [10] * 4, **options))
    long = plan(**ragged([1] * 4, [20000] * 4, **options))
    check(long)
    assert short.layout == long.layout
    assert (short.merges["num_chunks"] == 0).all()
    assert (long.merges["num_chunks"] > 0).any()


def test_alignment_counts_against_the_workspace():
    """Seventeen LSE rows of two floats end at no multiple of 16 bytes."""
    options = {"graph_max_rows": 8, "tile_m": 1}
    made = plan(**ragged([1] * 8, [64] * 8, **options, float_workspace_bytes=17 * 130 * 4))
    check(made)
    assert made.sizes["num_partial_rows"] == 16


def test_a_fixed_split_beyond_the_workspace():
    options = {**GQA, "graph_max_rows": 1, "fixed_split_size": 64}
    small = ragged([1], [640], **options, float_workspace_bytes=partial_bytes(10 * 2 * 4))
    check(plan(**small))
    with pytest.raises(ValueError, match="float_workspace_buffer"):
        planner.plan(**small | {"kv_indptr": [0, 641]})


def test_an_empty_batch_reserves_nothing():
    made = planner.plan(**ragged([], [], **GQA, graph_max_rows=4096))
    assert made["sizes"]["num_items"] == 0
    assert made["sizes"]["num_merges"] == 0
