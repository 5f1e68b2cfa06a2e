"""Random plans hold every kept (request, row, KV head, key) exactly once, whatever the split."""

import numpy as np
import pytest
from planned import check, checked, indptr, plan, ragged


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


@pytest.mark.parametrize("seed", range(150))
def test_random_ragged(seed):
    _, qo_lens, kv_lens, options = drawn(seed)
    checked(qo_lens, kv_lens, **options)


@pytest.mark.parametrize("seed", range(40))
def test_random_workspace(seed):
    """Whatever the float workspace holds, an automatic split stays inside it."""
    rng, qo_lens, kv_lens, options = drawn(1000 + seed)
    options |= {"fixed_split_size": 0, "float_workspace_bytes": int(rng.integers(0, 1 << 22))}
    checked(qo_lens, kv_lens, **options)


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


@pytest.mark.parametrize(
    ("qo_lens", "kv_lens", "num_items"),
    [([], [], 0), ([0, 0], [100, 0], 0), ([5, 3], [0, 0], 4)],
    ids=["no requests", "no queries", "no keys"],
)
def test_requests_without_queries_or_keys(qo_lens, kv_lens, num_items):
    """Rows without keys are written, by items without a tile."""
    made = checked(qo_lens, kv_lens, tile_m=16)
    assert made.sizes["num_items"] == made.sizes["num_ctas"] == num_items
    assert made.sizes["num_merges"] == made.sizes["num_kv_tiles"] == 0
    assert (made.items["partial_row"] == -1).all()


def test_rows_before_the_first_key_are_written():
    """More queries than keys under causal: the first rows keep nothing."""
    made = checked([300], [10], causal=True, tile_m=16)
    assert made.sizes["num_kv_tiles"] < made.sizes["num_items"]


def test_one_plan_is_one_image():
    case = ragged([3, 500, 1], [4000, 700, 9000], causal=True)
    assert plan(**case).image == plan(**case).image
