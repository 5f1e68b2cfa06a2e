"""Random plans hold every kept (request, row, KV head, key) exactly once, whatever the split."""

import dataclasses

import numpy as np
import pytest
from planned import check, check_covered, checked, indptr, plan, ragged, segment


def draw_lengths(rng):
    """Returns lengths of few requests: zero, odd, equal and very unequal ones."""
    batch = int(rng.integers(1, 7))
    longest_q = int(rng.choice([1, 4, 40, 150]))
    longest_kv = int(rng.choice([3, 200, 900, 2500]))
    return rng.integers(0, longest_q + 1, batch), rng.integers(0, longest_kv + 1, batch)


def draw_options(rng):
    """Returns options of a segment."""
    kv_heads = int(rng.integers(1, 4))
    splits = [{}, {}, {"disable_split_kv": True}]
    splits.append({"fixed_split_size": int(rng.choice([1, 64, 100, 333]))})
    return splits[rng.integers(4)] | {
        "num_kv_heads": kv_heads,
        "num_qo_heads": kv_heads * int(rng.integers(1, 8)),
        "causal": bool(rng.integers(0, 2)),
        "window_left": int(rng.choice([-1, -1, 0, 7, 130, 1000])),
        "chunk_size": int(rng.choice([0, 0, 1, 64, 512])),
        "tile_m": int(rng.choice([16, 64, 128, 192])),
        "tile_n": int(rng.choice([16, 48, 64, 80, 112, 176])),
        "ctas_per_sm": int(rng.choice([1, 2])),
        "head_dim_vo": int(rng.choice([64, 128])),
        "aligns_query_tiles": bool(rng.integers(0, 2)),
    }


def draw_launch(rng):
    return {
        "num_sms": int(rng.choice([1, 4, 132])),
        "l2_bytes": int(rng.choice([0, 1 << 16, 50 << 20])),
        "family": str(rng.choice(["cpu", "sm80", "sm90"])),
        "schedule": str(rng.choice(["auto", "persistent", "one_per_item"])),
    }


def draw_segment(rng):
    """Returns a segment, and for each request: qo_begin, qo_len, kv_begin, kv_len, mask_begin."""
    qo_lens, kv_lens = draw_lengths(rng)
    options = draw_options(rng)
    kv_indptr, mask_indptr = indptr(kv_lens), indptr(0 * kv_lens)
    match rng.integers(0, 4):
        case 0:
            # Requests without a page have any last_page_len.
            page_size = int(rng.choice([1, 3, 16, 64]))
            pages = -(-kv_lens // page_size)
            any_length = rng.integers(0, page_size + 1)
            last = np.where(pages > 0, kv_lens - (pages - 1) * page_size, any_length)
            options |= {"page_size": page_size, "last_page_len": last.tolist()}
            kv_indptr = indptr(pages)
        case 1:
            mask_indptr = indptr(-(-qo_lens * kv_lens // 8) + rng.integers(0, 3))
            options |= {"mask_indptr": mask_indptr, "causal": False}
    requests = zip(
        indptr(qo_lens)[:-1], qo_lens, kv_indptr[:-1], kv_lens, mask_indptr[:-1], strict=True
    )
    return segment(qo_lens, []) | options | {"kv_indptr": kv_indptr}, list(requests)


@pytest.mark.parametrize("num_segments", [1, 2])
@pytest.mark.parametrize("seed", range(200))
def test_random_plans(seed, num_segments):
    rng = np.random.default_rng([seed, num_segments])
    segments, requests = zip(*(draw_segment(rng) for _ in range(num_segments)), strict=True)
    launch = draw_launch(rng)
    if not any("fixed_split_size" in one for one in segments):
        launch["float_workspace_bytes"] = int(rng.choice([rng.integers(0, 1 << 22), 128 << 20]))
    made = plan(segments=list(segments), **launch)
    check(made)
    fields = ["qo_begin", "qo_len", "kv_begin", "kv_len", "mask_begin", "segment"]
    expected = [(*row, index) for index, rows in enumerate(requests) for row in rows]
    assert made.requests[fields].tolist() == expected


@pytest.mark.parametrize("kind", ["aligned tiles", "window"])
@pytest.mark.parametrize("seed", range(80))
def test_fewer_keys_than_planned(seed, kind):
    """Plans for upper bounds: tiles, and chunks under a window, begin where the device finds it."""
    rng = np.random.default_rng(6000 + seed)
    qo_lens, kv_lens = draw_lengths(rng)
    options = draw_options(rng) | {"lengths_are_upper_bounds": True}
    if kind == "window":
        window_left = int(rng.choice([7, 130, 1000, 2100]))
        options |= {"fixed_split_size": 0, "disable_split_kv": False, "window_left": window_left}
    else:
        options |= {"window_left": -1, "chunk_size": 0, "aligns_query_tiles": True}
        if not options.get("disable_split_kv"):
            options["fixed_split_size"] = int(rng.choice([64, 333]))
    made = plan(**ragged(qo_lens, kv_lens, **options, **draw_launch(rng)))
    requests = made.requests.copy()
    requests["kv_len"] = rng.integers(0, requests["kv_len"] + 1)
    now = dataclasses.replace(made, requests=requests)
    check_covered(now)
    for merge in made.merges:
        assert now.partial_rows_of(merge) == made.partial_rows_of(merge)


@pytest.mark.parametrize(("reach", "split"), [(30000, True), (1 << 22, True), (1 << 23, False)])
def test_long_windows_of_upper_bounds_are_split(reach, split):
    """Chunks of the longest would have too high numbers."""
    window = {"window_left": reach, "lengths_are_upper_bounds": True}
    assert (plan(**ragged([1], [2 * reach], **window)).sizes["num_merges"] > 0) == split


@pytest.mark.parametrize("family", ["sm80", "sm90"])
@pytest.mark.parametrize("group", [1, 3, 128, 131])
def test_decode_append_and_prefill_in_one_batch(group, family):
    """Tiles of sm90 are token-aligned: they begin at a token's first head, whatever the group."""
    heads = {"num_qo_heads": 2 * group, "num_kv_heads": 2, "family": family, "tile_m": 128}
    lengths = ([1, 70, 0, 129, 1, 3], [700, 300, 50, 129, 64, 0])
    made = checked(*lengths, **heads, causal=True, fixed_split_size=64)
    rows = 128 - 128 % group if family == "sm90" and group < 128 else 128
    assert sorted({*made.items["row_begin"][made.items["request"] == 3]})[:2] == [0, rows]


def test_one_plan_is_one_image():
    case = ragged([3, 500, 1], [4000, 700, 9000], causal=True)
    assert plan(**case).image == plan(**case).image
