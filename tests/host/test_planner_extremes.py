"""The longest requests, the most items, the widest groups: counted right, or refused in words."""

import time

import pytest
from planned import partial_bytes, planner, ragged

LONGEST = 1 << 30  # planner.h, kMaxRequestLength
MOST = 2**31 - 1
WIDE = {"tile_m": 128, "num_qo_heads": 1, "num_kv_heads": 1}
# Every request owns the same page, so that keys add up to more than any tensor holds.
SHARED = {"page_size": LONGEST, **WIDE}


def shared_page(qo_lens, **options):
    count = len(qo_lens)
    case = ragged(qo_lens, range(0), **(SHARED | options))
    return case | {"kv_indptr": list(range(count + 1)), "last_page_len": [LONGEST] * count}


def chosen(case):
    """The tile class; a plan is made and written too, without the copies that plan() makes."""
    assert planner.time_plan(1, **case)
    return planner.tile_class(**case)


def refused(case, message):
    start = time.perf_counter()
    with pytest.raises(ValueError, match=message):
        planner.plan(**case)
    planner.tile_class(**case)  # says something, and overflows nothing
    return time.perf_counter() - start


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True, "disable_split_kv": True},
        {"fixed_split_size": 2**31 - 1, "l2_bytes": 50 << 20, "family": "sm90"},
    ],
    ids=str,
)
def test_the_longest_prompt(options):
    """2^23 tiles of 2^24 KV tiles each."""
    assert chosen(ragged([LONGEST], [LONGEST], **WIDE, **options)) == "prefill"


def test_window_as_long_as_the_prompt():
    for window in (0, 1, LONGEST - 1, LONGEST):
        assert chosen(ragged([1000], [LONGEST], causal=True, window_left=window, **WIDE))
        assert chosen(ragged([LONGEST // 64], [1], causal=True, window_left=window, **WIDE))


def test_sixteen_million_items():
    """Rows of packed heads right up to the limit: int32 holds every row, count and offset."""
    case = ragged([LONGEST // 4], [64], num_qo_heads=4, num_kv_heads=1, tile_m=64)
    assert chosen(case) == "prefill"


@pytest.mark.parametrize("tile_m", [64, 128])
def test_too_many_items_are_refused_before_they_are_made(tile_m):
    case = ragged([LONGEST], [LONGEST], num_qo_heads=256, num_kv_heads=256, tile_m=tile_m)
    per_head = LONGEST // tile_m
    message = rf"qo_indptr\[-1\] - qo_indptr\[0\] = {LONGEST}: "
    message += rf".* {per_head} work items for each of 256 KV heads.*"
    assert refused(case, message + "several parts") < 5.0
    most = {"num_qo_heads": 32767, "num_kv_heads": 32767}
    refused(case | most, "work items for each of 32767 KV heads")
    several = shared_page([LONGEST, LONGEST - 1], tile_m=tile_m, **most)
    refused(several, "work items for each of 32767 KV heads")


def test_wide_groups_of_many_requests():
    """2^20 requests of 2^20 query heads: 2^40 rows, more tiles than int32 counts."""
    count = 1 << 20
    case = shared_page([1] * count, num_qo_heads=count)
    message = rf"qo_indptr\[-1\] - qo_indptr\[0\] = {count}: the batch makes "
    refused(case, message + rf"{count * count // 128} work items")
    refused(case | {"fixed_split_size": 64}, "work items")
    refused(case | {"num_qo_heads": 2**31 - 1, "qo_indptr": [0] * count + [1]}, "queries times")


@pytest.mark.parametrize("heads", [1, 8, 128])
def test_more_keys_than_any_memory(heads):
    """512 requests over one page of 2^30 keys: costs add up, and so do bytes of K/V."""
    options = {"num_qo_heads": heads, "num_kv_heads": heads, "head_dim_qk": 256}
    for extra in ({}, {"l2_bytes": 50 << 20}, {"family": "sm90"}):
        assert chosen(shared_page([300] * 512, **options, **extra))
    split = {"fixed_split_size": LONGEST // 2, "float_workspace_bytes": 256 << 20}
    assert chosen(shared_page([1] * 512, **options, **split)) == "decode"


def test_kv_bytes_beyond_int64():
    """2^8 requests of 2^15 heads, each with 2^40 bytes of K/V that two tiles read."""
    heads = {"num_qo_heads": 32767, "num_kv_heads": 32767, "head_dim_qk": 256}
    assert chosen(shared_page([129] * 257, **heads, l2_bytes=50 << 20)) == "prefill"


def test_fixed_splits_that_nobody_can_count():
    case = ragged([LONGEST], [LONGEST], fixed_split_size=1, **WIDE, float_workspace_bytes=2**62)
    chunks = LONGEST // 64
    refused(case, rf"fixed_split_size = 1 cuts a request into {chunks} KV chunks; at most 32767")
    refused(case | {"tile_n": 16}, rf"into {LONGEST // 16} KV chunks")
    case |= {"fixed_split_size": LONGEST // 8}
    refused(case, rf"makes {8 * LONGEST} partial rows of the batch; at most {MOST}")
    case |= {"fixed_split_size": LONGEST // 32767 // 64 * 64 + 64}
    refused(case, "work items for each of 1 KV heads")


def test_partial_rows_up_to_the_limit():
    """2^30 rows in one chunk more than the workspace holds, and one that int32 does not count."""
    case = ragged([LONGEST // 8], [128], **WIDE, fixed_split_size=64)
    needed = partial_bytes(LONGEST // 4)
    refused(case, f"needs {needed} bytes for {LONGEST // 4} partial rows")
    assert chosen(case | {"float_workspace_bytes": needed}) == "prefill"
    refused(case | {"float_workspace_bytes": needed - 1}, "float_workspace_buffer")
    assert chosen(ragged([1], [LONGEST], **WIDE, float_workspace_bytes=2**63 - 1)) == "decode"


@pytest.mark.parametrize("split", [{}, {"disable_split_kv": True}, {"fixed_split_size": 4096}])
def test_graphs_that_reserve_too_much(split):
    case = ragged([1], [1], **WIDE, **split, graph_max_rows=MOST)
    heads = {"num_qo_heads": 32767, "num_kv_heads": 32767}
    refused(case | heads, rf"graph_max_rows = {MOST}: a CUDA graph would reserve \d+ work items")
    refused(case | {"num_qo_heads": LONGEST}, "a CUDA graph would reserve")
    assert planner.plan(**case | {"graph_max_rows": 1 << 20})["sizes"]["num_items"] == 1


def test_masks_of_the_longest_prompt():
    case = ragged([LONGEST], [LONGEST], **WIDE)
    whole = LONGEST * (LONGEST // 8)
    planner.validate(**case | {"mask_indptr": [0, whole]})
    planner.validate(**case | {"mask_indptr": [2**63 - 1 - whole, 2**63 - 1]})
    with pytest.raises(ValueError, match=f"which take {whole} bytes"):
        planner.validate(**case | {"mask_indptr": [0, whole - 1]})
