"""The planner refuses a case by the argument's name and value, and plans what is just inside."""

import time
from itertools import product

import pytest
from planned import check, checked, partial_bytes, plan, planner, ragged, segment

LIMIT = 1 << 30  # planner.h, kMaxRequestLength: rows, and keys, of a request
MOST = 2**31 - 1
WIDE = {"tile_m": 128, "num_qo_heads": 1, "num_kv_heads": 1}
L2, SM90 = {"l2_bytes": 50 << 20}, {"family": "sm90"}
SPLITS = ({}, {"disable_split_kv": True}, {"fixed_split_size": 4096})

RAGGED = ragged([3, 0, 5], [10, 4, 0])
PAGED = ragged([3, 0, 5], [2, 0, 1], page_size=16, last_page_len=[1, 0, 16])
MASKED = ragged([3, 0, 5], [10, 4, 0], mask_indptr=[0, 4, 4, 4])


def heads(qo: int, kv: int | None = None) -> dict:
    return {"num_qo_heads": qo, "num_kv_heads": kv or qo}


def long(qo_len=LIMIT, kv_len=LIMIT, **options) -> dict:
    return ragged([qo_len], [kv_len], **WIDE | options)


def shared_page(qo_lens, **options) -> dict:
    """Returns requests that own the same page: their keys add up to more than any tensor holds."""
    count = len(qo_lens)
    arrays = {"kv_indptr": list(range(count + 1)), "last_page_len": [LIMIT] * count}
    return ragged(qo_lens, [], page_size=LIMIT, **WIDE | options) | arrays


def pair(**change) -> dict:
    """Returns two segments, of which the second one has these options."""
    prefill = segment([700, 300], [900, 300], causal=True, tile_m=128)
    return {"segments": [prefill, segment([1] * 2, [4000] * 2, num_qo_heads=16) | change]}


# Changes that validate() refuses; tests/c/test_c_refusals.py has those of every call.
CHANGES = [
    (RAGGED, {"qo_indptr": []}, r"qo_indptr is empty"),
    (RAGGED, {"kv_indptr": [0, 10, 14, 13]}, r"^kv_indptr\[3\] = 13 .*\[2\] = 14"),
    (RAGGED, {"kv_indptr": [0, 10]}, r"^kv_indptr has 2 elements, qo_indptr has 4"),
    (RAGGED, heads(32768), r"num_kv_heads = 32768"),
    (RAGGED, {"head_dim_qk": 520}, r"head_dim_qk = 520.*512.*scaled_dot_product_attention"),
    (RAGGED, {"head_dim_vo": 0}, r"head_dim_vo = 0: must be a multiple of 8 from 8 to 512$"),
    (RAGGED, {"window_left": MOST}, r"window_left = 2147483647.*-1"),
    (RAGGED, {"chunk_size": -4}, r"chunk_size = -4.*power of two"),
    (RAGGED, {"chunk_size": 48}, r"chunk_size = 48.*power of two"),
    (RAGGED, {"fixed_split_size": -7}, r"fixed_split_size = -7"),
    (RAGGED, {"fixed_split_size": 64, "window_left": 9, "lengths_are_upper_bounds": True},
     r"fixed_split_size = 64: keys under a window \(window_left = 9\)"),
    (RAGGED, {"float_workspace_bytes": -1}, r"float_workspace_buffer: .*-1"),

    (RAGGED, {"qo_indptr": [0, LIMIT // 2 + 1], "kv_indptr": [0, 1]},
     rf"qo_indptr\[1\]: request 0 .*{LIMIT + 2} rows"),
    (RAGGED, {"qo_indptr": [0, 1], "kv_indptr": [0, LIMIT + 1]},
     rf"^kv_indptr\[1\]: request 0 has {LIMIT + 1} keys"),
    (RAGGED, {"custom_mask": True}, r"mask_indptr has 0 elements"),
    (RAGGED, {"last_page_len": [1, 1, 1]}, r"page_size = 0"),
    (PAGED, {"kv_indptr": [0, 2, 1, 3]}, r"^paged_kv_indptr\[2\] = 1 .*\[1\] = 2"),
    (PAGED, {"last_page_len": []}, r"paged_kv_last_page_len has 0 elements"),
    (PAGED, {"last_page_len": [-(2**31), 0, 1]}, r"last_page_len\[0\] = -2147483648: .*\[1, 16\]"),
    (PAGED, {"page_size": LIMIT, "last_page_len": [1, 0, 1]},
     rf"paged_kv_indptr\[1\]: request 0 has {LIMIT + 1} keys"),
    (MASKED, {"mask_indptr": [0, 4, 4]}, r"mask_indptr has 3 elements"),
    (MASKED, {"mask_indptr": [-1, 4, 4, 4]}, r"mask_indptr\[0\] = -1"),
    (MASKED, {"mask_indptr": [0, 3, 3, 3]}, r"mask_indptr\[1\] = 3: request 0 .* 4 bytes"),
    (MASKED, {"mask_indptr": [0, 4, 3, 3]}, r"mask_indptr\[2\] = 3"),
    (MASKED, {"custom_mask": False}, r"mask_indptr has 4 elements but no custom mask"),
    (long(), {"mask_indptr": [0, LIMIT**2 // 8 - 1]}, f"which take {LIMIT**2 // 8} bytes"),
    (pair(qo_indptr=[0, 5, 3]), {}, r"segment 1: qo_indptr\[2\] = 3 is less than"),
    (pair(graph_max_rows=9), {},
     "segment 1: graph_max_rows = 9, segment 0 has 0: a CUDA graph holds"),
]  # fmt: skip


@pytest.mark.parametrize(("case", "change", "message"), CHANGES)
def test_arguments_that_are_wrong(case, change, message):
    with pytest.raises(ValueError, match=message):
        planner.validate(**case | change)


COUNT = 1 << 20
# 2^20 requests of 2^20 query heads: 2^40 rows, more tiles than int32 counts.
GROUPS = shared_page([1] * COUNT, num_qo_heads=COUNT)
TOO_FINE = long(fixed_split_size=1, float_workspace_bytes=2**62)
RESERVED = long(1, 1, graph_max_rows=MOST)
# 2^28 rows of partial results, and the bytes of each of 64 launches.
HALF_SPLIT = long(LIMIT // 8, 128, fixed_split_size=64)
HALF_ROWS = LIMIT // 256 + 255  # of each launch, up to the next tile
HALF_BYTES = partial_bytes(HALF_ROWS)
# Either segment has fewer than 2^31 items, both have more.
HALF = segment([1 << 24] * 4, [1] * 4, **heads(32), tile_m=1)
# Splits of few rows, and the bytes that they need.
SMALL_SPLIT, SMALL_BYTES = ragged([1], [6400], fixed_split_size=64), partial_bytes(100 * 4)
GRAPH_SPLIT = ragged([1], [640], **heads(8, 2), graph_max_rows=1, fixed_split_size=64)
GRAPH_BYTES = partial_bytes(10 * 2 * 4)
SPLIT_PAIR = [segment([1] * n, [4000] * n, num_qo_heads=16, fixed_split_size=512) for n in (8, 4)]
PAIR_BYTES = [partial_bytes(n * 16 * 8) for n in (8, 4)]  # of requests, heads, chunks
# Each segment of a graph has half of the workspace.
GRAPH_PAIR = [one | {"graph_max_rows": n} for one, n in zip(SPLIT_PAIR, (8, 4), strict=True)]
SUFFICIENT = [
    (SMALL_SPLIT, SMALL_BYTES),
    (GRAPH_SPLIT, GRAPH_BYTES),
    ({"segments": SPLIT_PAIR}, sum(PAIR_BYTES)),
    ({"segments": GRAPH_PAIR}, 2 * PAIR_BYTES[0]),
]


def room(case: dict, num_bytes: int) -> dict:
    return case | {"float_workspace_bytes": num_bytes}


PLANS = [
    (long(tile_m=64, **heads(256)),
     rf"qo_indptr\[-1\] - qo_indptr\[0\] = {LIMIT}: .* {LIMIT // 64} work items for "
     "each of 256 KV heads.*several parts"),
    (shared_page([LIMIT, LIMIT - 1], **heads(32767)), "work items for each of 32767 KV heads"),
    (GROUPS, rf"qo_indptr\[-1\] - qo_indptr\[0\] = {COUNT}: the batch makes "
             rf"{COUNT * COUNT // 128} work items"),
    (GROUPS | {"fixed_split_size": 64}, "work items"),
    (GROUPS | {"num_qo_heads": MOST, "qo_indptr": [0] * COUNT + [1]}, "queries times"),
    (TOO_FINE, rf"fixed_split_size = 1 cuts a request into {LIMIT // 64} KV chunks; "
               "at most 32767"),
    (TOO_FINE | {"fixed_split_size": LIMIT // 32767 // 64 * 64 + 64},
     "work items for each of 1 KV heads"),
    (HALF_SPLIT, f"needs {HALF_BYTES} bytes for partial results of {HALF_ROWS} rows"),
    *(
        (RESERVED | split | heads(32767),
         rf"graph_max_rows = {MOST}: a CUDA graph would reserve \d+ work items")
        for split in SPLITS
    ),
    (RESERVED | {"num_qo_heads": LIMIT}, "a CUDA graph would reserve"),
    (ragged([5], [80], schedule="one_per_item", graph_max_rows=8), "schedule"),
    (room(SMALL_SPLIT, 1000), "float_workspace_buffer has 1000 bytes.* "
                              f"{SMALL_BYTES} bytes for partial results of 400 rows"),
    (room(SMALL_SPLIT, SMALL_BYTES - 1), "float_workspace_buffer"),
    (room(GRAPH_SPLIT, GRAPH_BYTES) | {"kv_indptr": [0, 641]}, "float_workspace_buffer"),
    ({"segments": [HALF, HALF]}, "work items for each of 32 KV heads"),
    # The workspace is for both segments.
    *(
        (room({"segments": SPLIT_PAIR}, left),
         f"has {left} bytes; the fixed_split_size of both segments need {sum(PAIR_BYTES)}")
        for left in (sum(PAIR_BYTES) - 16, PAIR_BYTES[0])
    ),
    (room({"segments": SPLIT_PAIR}, PAIR_BYTES[0] - 16), "fixed_split_size = 512 needs"),
    (room({"segments": GRAPH_PAIR}, 2 * PAIR_BYTES[0] - 32), f"needs {2 * PAIR_BYTES[0]} bytes"),
]  # fmt: skip


@pytest.mark.parametrize(("case", "message"), PLANS)
def test_plans_that_are_too_large(case, message):
    """Items are counted before they are made, and choosing a tile class overflows nothing."""
    start = time.process_time()
    with pytest.raises(ValueError, match=message):
        planner.plan(**case)
    assert time.process_time() - start < 5.0
    planner.tile_class(**case)


@pytest.mark.parametrize(("case", "num_bytes"), SUFFICIENT)
def test_a_workspace_that_just_suffices(case, num_bytes):
    made = plan(**room(case, num_bytes))
    check(made)
    assert made.layout["float_bytes"] == num_bytes


def test_the_limits_themselves_pass():
    for case in (
        ragged([LIMIT // 2], [LIMIT], num_qo_heads=4),
        long(mask_indptr=[0, LIMIT**2 // 8]),
        long(mask_indptr=[2**63 - 1 - LIMIT**2 // 8, 2**63 - 1]),
        {"segments": [HALF, HALF]},
    ):
        planner.validate(**case)


def test_any_last_page_len_where_there_is_no_page():
    expected = planner.plan(**PAGED)
    for last in (0, 17, -(2**31), MOST):
        case = PAGED | {"last_page_len": [1, last, 16]}
        assert planner.tile_class(**case) == planner.tile_class(**PAGED)
        assert planner.plan(**case) == expected


MANY_KEYS = [heads(n) | {"head_dim_qk": 256} | more for n in (1, 128) for more in ({}, L2, SM90)]
LONG_SPLIT = {"fixed_split_size": LIMIT // 2, "float_workspace_bytes": 256 << 20}
PLANNED = [
    # 2^23 tiles of 2^24 KV tiles each.
    (long(), "prefill"),
    (long(causal=True, disable_split_kv=True), "prefill"),
    (long(fixed_split_size=MOST, **L2, **SM90), "prefill"),
    *(
        (long(qo, kv, causal=True, window_left=window), "prefill")
        for window in (0, LIMIT)
        for qo, kv in ((1000, LIMIT), (LIMIT // 64, 1))
    ),
    # Rows of packed heads up to the limit: int32 holds every row, count and offset of 2^24 items.
    (long(LIMIT // 4, 64, tile_m=64, **heads(4, 1)), "prefill"),
    # 512 requests over one page of 2^30 keys: costs add up, and so do bytes of K/V.
    *((shared_page([300] * 512, **options), "prefill") for options in MANY_KEYS),
    *((shared_page([1] * 512, **options, **LONG_SPLIT), "decode") for options in MANY_KEYS[::3]),
    # 2^8 requests of 2^15 heads, each with 2^40 bytes of K/V that two tiles read.
    (shared_page([129] * 257, **heads(32767), head_dim_qk=256, **L2), "prefill"),
    (room(HALF_SPLIT, HALF_BYTES), "prefill"),
    (long(1, LIMIT, float_workspace_bytes=2**63 - 1), "decode"),
    *((long(1, 1, graph_max_rows=1 << 20, **split), "prefill") for split in SPLITS),
]


@pytest.mark.parametrize(("case", "tile_class"), PLANNED)
def test_extremes_are_planned(case, tile_class):
    planner.write_plan(**case)
    assert planner.tile_class(**case) == tile_class


def test_the_longest_keys_do_not_overflow_a_mask():
    for qo_len, window_left in product((1, 3, 300), (-1, 0, LIMIT)):
        bounds = {"qo_len": qo_len, "kv_len": LIMIT, "window_left": window_left, "causal": True}
        begin, _, _, end = planner.touched_tiles(**bounds, first=0, last=qo_len - 1, tile_n=64)
        assert end == LIMIT // 64
        assert begin == ((LIMIT - qo_len) // 64 if window_left == 0 else 0)


def test_requests_without_queries_or_keys():
    """Rows without keys are written, by items without a tile."""
    for qo_lens, kv_lens, num_items in (([], [], 0), ([0, 0], [100, 0], 0), ([5, 3], [0, 0], 4)):
        made = checked(qo_lens, kv_lens, tile_m=16)
        assert made.sizes["num_items"] == made.sizes["num_ctas"] == num_items
        assert made.sizes["num_merges"] == made.sizes["num_kv_tiles"] == 0
        assert (made.items["partial_row"] == -1).all()
