"""Random plans hold every kept (request, row, KV head, key) exactly once, whatever the split."""

import dataclasses

import numpy as np
import pytest
from planned import check, check_covered, checked, indptr, plan, ragged, segment

LAUNCH_OPTIONS = ("num_sms", "l2_bytes", "family", "schedule")


def random_lengths(rng):
    """Returns lengths of few requests: zero, odd, equal and very unequal ones."""
    batch = int(rng.integers(1, 7))
    longest_q = int(rng.choice([1, 4, 40, 150]))
    longest_kv = int(rng.choice([3, 200, 900, 2500]))
    return rng.integers(0, longest_q + 1, batch), rng.integers(0, longest_kv + 1, batch)


def random_options(rng):
    kv_heads = int(rng.integers(1, 4))
    split = {}
    match rng.integers(0, 4):
        case 0:
            split = {"fixed_split_size": int(rng.choice([1, 64, 100, 333]))}
        case 1:
            split = {"disable_split_kv": True}
    return split | {
        "num_kv_heads": kv_heads,
        "num_qo_heads": kv_heads * int(rng.integers(1, 8)),
        "causal": bool(rng.integers(0, 2)),
        "window_left": int(rng.choice([-1, -1, 0, 7, 130, 1000])),
        "chunk_size": int(rng.choice([0, 0, 1, 64, 512])),
        "tile_m": int(rng.choice([16, 64, 128, 192])),
        "tile_n": int(rng.choice([16, 48, 64, 80, 112, 176])),
        "num_sms": int(rng.choice([1, 4, 132])),
        "ctas_per_sm": int(rng.choice([1, 2])),
        "l2_bytes": int(rng.choice([0, 1 << 16, 50 << 20])),
        "family": str(rng.choice(["cpu", "sm80", "sm90"])),
        "schedule": str(rng.choice(["auto", "persistent", "one_per_item"])),
        "head_dim_vo": int(rng.choice([64, 128])),
    }


def drawn(seed):
    rng = np.random.default_rng(seed)
    return rng, *random_lengths(rng), random_options(rng)


def drawn_pair(seed):
    """Returns two segments with lengths, heads, tiles, masks and splits of their own."""
    rng = np.random.default_rng(seed)
    segments, launch = [], {}
    for _ in range(2):
        options = random_options(rng)
        launch = {name: options.pop(name) for name in LAUNCH_OPTIONS}
        segments.append(segment(*random_lengths(rng), **options))
    return rng, {"segments": segments, **launch}


@pytest.mark.parametrize("seed", range(150))
def test_random_ragged(seed):
    _, qo_lens, kv_lens, options = drawn(seed)
    checked(qo_lens, kv_lens, **options)


def drawn_aligned(seed):
    rng, qo_lens, kv_lens, options = drawn(seed)
    if not options.get("disable_split_kv"):
        options["fixed_split_size"] = int(rng.choice([64, 333]))
    return rng, qo_lens, kv_lens, options | {"aligns_query_tiles": True}


@pytest.mark.parametrize("seed", range(100))
def test_random_aligned(seed):
    """Tiles of rows begin at fixed positions of a prompt, so its first one may have fewer rows."""
    _, qo_lens, kv_lens, options = drawn_aligned(5000 + seed)
    checked(qo_lens, kv_lens, **options)


@pytest.mark.parametrize("seed", range(60))
def test_aligned_tiles_of_fewer_keys_than_planned(seed):
    """Tiles of plans for upper bounds begin where the device finds it."""
    rng, qo_lens, kv_lens, options = drawn_aligned(6000 + seed)
    options |= {"window_left": -1, "chunk_size": 0, "lengths_are_upper_bounds": True}
    made = plan(**ragged(qo_lens, kv_lens, **options))
    room = {int(merge["first_row"]): made.partial_rows_of(merge) for merge in made.merges}
    requests = made.requests.copy()
    requests["kv_len"] = rng.integers(0, requests["kv_len"] + 1)
    now = dataclasses.replace(made, requests=requests)
    check_covered(now)
    assert room == {int(merge["first_row"]): now.partial_rows_of(merge) for merge in now.merges}


@pytest.mark.parametrize("seed", range(100))
def test_windows_of_fewer_keys_than_planned(seed):
    """Chunks under a window begin where the device finds it."""
    rng, qo_lens, kv_lens, options = drawn(7000 + seed)
    options |= {
        "fixed_split_size": 0,
        "disable_split_kv": False,
        "window_left": int(rng.choice([7, 130, 1000, 2100])),
        "lengths_are_upper_bounds": True,
    }
    made = plan(**ragged(qo_lens, kv_lens, **options))
    requests = made.requests.copy()
    requests["kv_len"] = rng.integers(0, requests["kv_len"] + 1)
    check_covered(dataclasses.replace(made, requests=requests))


@pytest.mark.parametrize(("reach", "split"), [(30000, True), (1 << 22, True), (1 << 23, False)])
def test_long_windows_of_upper_bounds_are_split(reach, split):
    """Chunks of the longest would have too high numbers."""
    window = {"window_left": reach, "lengths_are_upper_bounds": True}
    assert (plan(**ragged([1], [2 * reach], **window)).sizes["num_merges"] > 0) == split


@pytest.mark.parametrize("seed", range(120))
def test_random_pairs(seed):
    check(plan(**drawn_pair(seed)[1]))


@pytest.mark.parametrize("seed", range(40))
def test_random_workspace(seed):
    """Whatever the float workspace holds, automatic splits of one or two segments stay inside."""
    rng, qo_lens, kv_lens, options = drawn(1000 + seed)
    options |= {"fixed_split_size": 0, "float_workspace_bytes": int(rng.integers(0, 1 << 22))}
    checked(qo_lens, kv_lens, **options)
    rng, pair = drawn_pair(1000 + seed)
    for one in pair["segments"]:
        one.pop("fixed_split_size", None)
    check(plan(**pair, float_workspace_bytes=int(rng.integers(0, 1 << 22))))


@pytest.mark.parametrize("seed", range(40))
def test_random_paged(seed):
    """A request has (pages - 1) * page_size + last_page_len keys, and none without a page."""
    rng, qo_lens, kv_lens, options = drawn(2000 + seed)
    page_size = int(rng.choice([1, 3, 16, 64]))
    pages = -(-kv_lens // page_size)
    last = np.where(pages > 0, kv_lens - (pages - 1) * page_size, rng.integers(0, page_size + 1))
    arrays = {"qo_indptr": indptr(qo_lens), "kv_indptr": indptr(pages)}
    made = plan(**arrays, last_page_len=last.tolist(), page_size=page_size, **options)
    check(made)
    assert made.requests["kv_len"].tolist() == kv_lens.tolist()
    assert made.requests["qo_len"].tolist() == qo_lens.tolist()
    assert made.requests["qo_begin"].tolist() == indptr(qo_lens)[:-1]
    assert made.requests["kv_begin"].tolist() == indptr(pages)[:-1]


@pytest.mark.parametrize("seed", range(20))
def test_random_custom_mask(seed):
    """Bits of a request begin at its mask_indptr; its items touch all keys that a mask may keep."""
    rng, qo_lens, kv_lens, options = drawn(3000 + seed)
    mask_indptr = indptr(-(-qo_lens * kv_lens // 8) + rng.integers(0, 3))
    made = checked(qo_lens, kv_lens, mask_indptr=mask_indptr, **options | {"causal": False})
    assert made.requests["mask_begin"].tolist() == mask_indptr[:-1]


@pytest.mark.parametrize("family", ["cpu", "sm80", "sm90"])
@pytest.mark.parametrize("group", [1, 3, 4, 7, 128, 131])
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
