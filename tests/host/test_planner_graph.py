"""Sizes and layout, which a captured launch keeps, are the same for later plans of a CUDA graph."""

import numpy as np
import pytest
from planned import check, checked, indptr, partial_bytes, plan, ragged, rows_per_tile, segment

GQA = {"num_qo_heads": 8, "num_kv_heads": 2}


def random_batch(rng, batch, max_rows, longest_kv):
    cuts = np.sort(rng.integers(0, max_rows + 1, batch))
    qo_lens = np.diff(np.concatenate([[0], cuts]))
    return rng.permutation(qo_lens), rng.integers(0, longest_kv, batch)


@pytest.mark.parametrize("num_segments", [1, 2])
@pytest.mark.parametrize("split", [{}, {"disable_split_kv": True}, {"fixed_split_size": 512}])
@pytest.mark.parametrize("seed", range(8))
def test_sizes_and_places_never_move(seed, split, num_segments):
    rng = np.random.default_rng(seed)
    batch, max_rows = int(rng.integers(1, 7)), int(rng.integers(1, 200))
    options = GQA | split | {"causal": True, "tile_m": int(rng.choice([16, 64]))}
    launch = {
        "num_sms": int(rng.choice([2, 20])),
        "float_workspace_bytes": int(rng.choice([16 << 20, 64 << 20])),
    }
    batches = [([max_rows] + [0] * (batch - 1), [100] * batch)]
    batches += [random_batch(rng, batch, max_rows, longest) for longest in (1, 50, 500, 2000, 2000)]
    fixed = []
    for lengths in batches:
        segments = [segment(*lengths, graph_max_rows=max_rows, **options)]
        if num_segments == 2:
            prefill = random_batch(rng, 2, 120, 2000)
            segments.insert(0, segment(*prefill, tile_m=128, graph_max_rows=120, causal=True))
        made = plan(segments=segments, **launch)
        check(made)
        num_ctas, sizes = made.sizes["num_ctas"], made.sizes["segments"]
        fixed.append((made.sizes["num_requests"], num_ctas, sizes, made.layout))
    assert fixed == fixed[:1] * 6


@pytest.mark.parametrize(("num_qo_heads", "num_kv_heads"), [(8, 2), (7, 1), (300, 1)])
@pytest.mark.parametrize("seed", range(5))
def test_tiles_of_a_mask_never_move(seed, num_qo_heads, num_kv_heads):
    """The size of the mask's buffer bounds the words of its tiles, whatever the lengths."""
    rng = np.random.default_rng(seed)
    batch, max_rows = int(rng.integers(1, 7)), int(rng.integers(1, 200))
    options = {
        "family": "sm90",
        "num_qo_heads": num_qo_heads,
        "num_kv_heads": num_kv_heads,
        "tile_m": 128,
        "tile_n": int(rng.choice([64, 128])),
        "graph_max_rows": max_rows,
        "disable_split_kv": True,
        "mask_tiles": True,
    }
    group = num_qo_heads // num_kv_heads
    batches = [random_batch(rng, batch, max_rows, longest) for longest in (1, 300, 5000)]
    batches.append((np.eye(1, batch, dtype=int)[0], np.full(batch, 40000)))  # one long row
    room = max(sum(-(-qo * kv // 8)) for qo, kv in batches)
    fixed = []
    for qo_lens, kv_lens in batches:
        mask = {"mask_indptr": indptr(-(-qo_lens * kv_lens // 8)), "graph_mask_bytes": room}
        made = plan(**ragged(qo_lens, kv_lens, **mask, **options))
        words = made.sizes["segments"][0]["num_mask_tile_words"]
        begins = np.frombuffer(made.image, "<i8", batch + 1, made.layout["mask_tiles_begin"])
        rows = -(-qo_lens * group // rows_per_tile(made.case))
        row_words = -(kv_lens // -options["tile_n"] // 16)
        assert begins.tolist() == indptr(rows * row_words)
        assert begins[-1] <= words
        assert made.layout["mask_tiles"] + 4 * words <= made.layout["int_bytes"]
        fixed.append((words, made.layout))
    assert fixed == fixed[:1] * 4


def test_short_requests_have_tiles_of_a_mask_each():
    """Nine requests need nine words; one request with as many tokens and bits needs one."""
    options = {"graph_max_rows": 9, "graph_mask_bytes": 9, "mask_tiles": True, "tile_m": 64}
    one = ragged([9] + [0] * 8, [8] + [0] * 8, mask_indptr=[0] + [9] * 9, **options)
    made = plan(**one), plan(**ragged([1] * 9, [1] * 9, mask_indptr=list(range(10)), **options))
    assert made[0].layout == made[1].layout


# Lengths, options, and sizes that the plan must have.
RESERVED = {
    # Requests one row over a tile each make the most query tiles.
    "worst batch": (
        ([65] * 4, [64] * 4),
        {"num_qo_heads": 2, "graph_max_rows": 4 * 65, "disable_split_kv": True},
        {"num_items": 4 * 2 * 2},
    ),
    # Seven heads of 18 tokens are 126 rows of sm90's token-aligned tile.
    "worst batch of aligned tiles": (
        ([19] * 4, [64] * 4),
        {"num_qo_heads": 7, "num_kv_heads": 1, "family": "sm90", "tile_m": 128,
         "graph_max_rows": 4 * 19, "disable_split_kv": True},
        {"num_items": 8},
    ),
    # Two rows from the last one of a tile on are in two tiles.
    "worst batch of tiles at fixed positions": (
        ([2] * 4, [65] * 4),
        {"num_qo_heads": 2, "graph_max_rows": 8, "aligns_query_tiles": True,
         "disable_split_kv": True},
        {"num_items": 4 * 2 * 2},
    ),
    "surplus merges of tiles at fixed positions": (
        ([3, 2], [70, 500]),
        {**GQA, "graph_max_rows": 20, "tile_m": 16, "aligns_query_tiles": True,
         "fixed_split_size": 64},
        {"num_partial_rows": (128 << 20) // (128 * 4 + 8)},
    ),
    # 272 items on 264 slots would gain by a split, for which there are too few merges.
    "a merge for each slot": (
        ([1] * 34, [4096] * 34),
        {"num_qo_heads": 32, "num_kv_heads": 8, "graph_max_rows": 34},
        {"num_merges": 264},
    ),
    # The 65th row of a request has a tile of its own, split like the first.
    "tiles of one row": (
        ([65] * 4, [500] * 4),
        {"num_qo_heads": 3, "num_kv_heads": 1, "graph_max_rows": 65 * 4, "fixed_split_size": 64},
        {"num_items": 4 * 4 * 8},
    ),
    # Every tile in two chunks makes the most merges that its rows allow.
    "fullest workspace": (
        ([1] * 8, [128] * 8),
        {**GQA, "graph_max_rows": 8, "fixed_split_size": 64,
         "float_workspace_bytes": partial_bytes(8 * 2 * 2 * 4)},
        {"num_partial_rows": 8 * 2 * 2 * 4, "num_merges": 16},
    ),
    # An automatic split reserves two waves of full tiles.
    "two waves": (
        ([1] * 64, [1000] * 64),
        {**GQA, "graph_max_rows": 64, "num_sms": 20},
        {"num_partial_rows": 2 * 40 * 64},
    ),
    # Seventeen LSE rows of two floats end at no multiple of 16 bytes.
    "alignment": (
        ([1] * 8, [64] * 8),
        {"graph_max_rows": 8, "tile_m": 1, "float_workspace_bytes": 17 * 130 * 4},
        {"num_partial_rows": 16},
    ),
    "empty batch": (([], []), {**GQA, "graph_max_rows": 4096}, {"num_items": 0, "num_merges": 0}),
}  # fmt: skip


@pytest.mark.parametrize("name", RESERVED)
def test_what_a_graph_reserves(name):
    lengths, options, sizes = RESERVED[name]
    made = checked(*lengths, **options)
    assert {key: made.sizes[key] for key in sizes} == sizes


def test_long_keys_split_into_the_reserved_rows():
    options = {**GQA, "graph_max_rows": 4, "num_sms": 20}
    short, long = (checked([1] * 4, [kv_len] * 4, **options) for kv_len in (10, 20000))
    assert short.layout == long.layout
    assert (short.merges["num_chunks"] == 0).all()
    assert (long.merges["num_chunks"] > 0).any()
