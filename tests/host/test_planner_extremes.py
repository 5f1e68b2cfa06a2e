"""The longest requests, most items and widest groups are counted right, or refused in words."""

import time

import pytest
from planned import partial_bytes, planner, ragged

LONGEST = 1 << 30  # planner.h, kMaxRequestLength
MOST = 2**31 - 1
WIDE = {"tile_m": 128, "num_qo_heads": 1, "num_kv_heads": 1}
L2, SM90 = {"l2_bytes": 50 << 20}, {"family": "sm90"}


def heads(qo: int, kv: int | None = None) -> dict:
    return {"num_qo_heads": qo, "num_kv_heads": kv or qo}


def long(qo_len=LONGEST, kv_len=LONGEST, **options) -> dict:
    return ragged([qo_len], [kv_len], **WIDE | options)


def shared_page(qo_lens, **options) -> dict:
    """Returns requests that own the same page: their keys add up to more than any tensor holds."""
    count = len(qo_lens)
    arrays = {"kv_indptr": list(range(count + 1)), "last_page_len": [LONGEST] * count}
    return ragged(qo_lens, [], page_size=LONGEST, **WIDE | options) | arrays


MANY_KEYS = [heads(n) | {"head_dim_qk": 256} | more for n in (1, 8, 128) for more in ({}, L2, SM90)]
SPLIT = {"fixed_split_size": LONGEST // 2, "float_workspace_bytes": 256 << 20}
HALF_SPLIT = long(LONGEST // 8, 128, fixed_split_size=64)
NEEDED = partial_bytes(LONGEST // 4)

PLANNED = [
    # 2^23 tiles of 2^24 KV tiles each.
    (long(), "prefill"),
    (long(causal=True, disable_split_kv=True), "prefill"),
    (long(fixed_split_size=MOST, **L2, **SM90), "prefill"),
    *(
        (long(qo, kv, causal=True, window_left=window), "prefill")
        for window in (0, 1, LONGEST - 1, LONGEST)
        for qo, kv in ((1000, LONGEST), (LONGEST // 64, 1))
    ),
    # Rows of packed heads up to the limit: int32 holds every row, count and offset of 2^24 items.
    (long(LONGEST // 4, 64, tile_m=64, **heads(4, 1)), "prefill"),
    # 512 requests over one page of 2^30 keys: costs add up, and so do bytes of K/V.
    *((shared_page([300] * 512, **options), "prefill") for options in MANY_KEYS),
    *((shared_page([1] * 512, **options, **SPLIT), "decode") for options in MANY_KEYS[::3]),
    # 2^8 requests of 2^15 heads, each with 2^40 bytes of K/V that two tiles read.
    (shared_page([129] * 257, **heads(32767), head_dim_qk=256, **L2), "prefill"),
    (HALF_SPLIT | {"float_workspace_bytes": NEEDED}, "prefill"),
    (long(1, LONGEST, float_workspace_bytes=2**63 - 1), "decode"),
    *(
        (long(1, 1, graph_max_rows=1 << 20, **split), "prefill")
        for split in ({}, {"disable_split_kv": True}, {"fixed_split_size": 4096})
    ),
]


@pytest.mark.parametrize(("case", "tile_class"), PLANNED)
def test_extremes_are_planned(case, tile_class):
    planner.write_plan(**case)
    assert planner.tile_class(**case) == tile_class


COUNT = 1 << 20
# 2^20 requests of 2^20 query heads: 2^40 rows, more tiles than int32 counts.
GROUPS = shared_page([1] * COUNT, num_qo_heads=COUNT)
TOO_FINE = long(fixed_split_size=1, float_workspace_bytes=2**62)
RESERVED = long(1, 1, graph_max_rows=MOST)

REFUSED = [
    *(
        (long(tile_m=tile_m, **heads(256)),
         rf"qo_indptr\[-1\] - qo_indptr\[0\] = {LONGEST}: .* {LONGEST // tile_m} work items for "
         "each of 256 KV heads.*several parts")
        for tile_m in (64, 128)
    ),
    (long(**heads(32767)), "work items for each of 32767 KV heads"),
    (shared_page([LONGEST, LONGEST - 1], **heads(32767)), "work items for each of 32767 KV heads"),
    (GROUPS, rf"qo_indptr\[-1\] - qo_indptr\[0\] = {COUNT}: the batch makes "
             rf"{COUNT * COUNT // 128} work items"),
    (GROUPS | {"fixed_split_size": 64}, "work items"),
    (GROUPS | {"num_qo_heads": MOST, "qo_indptr": [0] * COUNT + [1]}, "queries times"),
    (TOO_FINE, rf"fixed_split_size = 1 cuts a request into {LONGEST // 64} KV chunks; "
               "at most 32767"),
    (TOO_FINE | {"tile_n": 16}, rf"into {LONGEST // 16} KV chunks"),
    (TOO_FINE | {"fixed_split_size": LONGEST // 8},
     rf"makes {8 * LONGEST} partial rows of the batch; at most {MOST}"),
    (TOO_FINE | {"fixed_split_size": LONGEST // 32767 // 64 * 64 + 64},
     "work items for each of 1 KV heads"),
    # 2^30 rows in one chunk more than the workspace holds.
    (HALF_SPLIT, f"needs {NEEDED} bytes for partial results of {LONGEST // 4} rows"),
    (HALF_SPLIT | {"float_workspace_bytes": NEEDED - 1}, "float_workspace_buffer"),
    *(
        (RESERVED | split | heads(32767),
         rf"graph_max_rows = {MOST}: a CUDA graph would reserve \d+ work items")
        for split in ({}, {"disable_split_kv": True}, {"fixed_split_size": 4096})
    ),
    (RESERVED | {"num_qo_heads": LONGEST}, "a CUDA graph would reserve"),
]  # fmt: skip


@pytest.mark.parametrize(("case", "message"), REFUSED)
def test_refusals(case, message):
    """Items are counted before they are made, and choosing a tile class overflows nothing."""
    start = time.perf_counter()
    with pytest.raises(ValueError, match=message):
        planner.plan(**case)
    assert time.perf_counter() - start < 5.0
    planner.tile_class(**case)


def test_masks_of_the_longest_prompt():
    case, whole = long(), LONGEST * (LONGEST // 8)
    for mask_indptr in ([0, whole], [2**63 - 1 - whole, 2**63 - 1]):
        planner.validate(**case, mask_indptr=mask_indptr)
    with pytest.raises(ValueError, match=f"which take {whole} bytes"):
        planner.validate(**case, mask_indptr=[0, whole - 1])
