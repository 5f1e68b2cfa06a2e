"""Refusals: each names the argument, its value and what would be right."""

import pytest
from planned import planner, ragged

LIMIT = 1 << 30

GOOD_RAGGED = ragged([3, 0, 5], [10, 4, 0])
GOOD_PAGED = ragged([3, 0, 5], [2, 0, 1], page_size=16, last_page_len=[1, 0, 16])
GOOD_MASK = ragged([3, 0, 5], [10, 4, 0], mask_indptr=[0, 4, 4, 4])

BAD_RAGGED = {
    "qo_indptr empty": ({"qo_indptr": []}, r"qo_indptr is empty"),
    "qo_indptr start": ({"qo_indptr": [-1, 3, 3, 8]}, r"qo_indptr\[0\] = -1"),
    "qo_indptr decreases": (
        {"qo_indptr": [0, 3, 2, 8]},
        r"qo_indptr\[2\] = 2 .*qo_indptr\[1\] = 3",
    ),
    "qo_indptr negative": ({"qo_indptr": [0, -3, 2, 8]}, r"qo_indptr\[1\] = -3"),
    "kv_indptr start": ({"kv_indptr": [-2, 10, 14, 14]}, r"^kv_indptr\[0\] = -2"),
    "kv_indptr decreases": ({"kv_indptr": [0, 10, 14, 13]}, r"^kv_indptr\[3\] = 13 .*\[2\] = 14"),
    "kv_indptr size": ({"kv_indptr": [0, 10]}, r"^kv_indptr has 2 elements, qo_indptr has 4"),
    "kv_indptr empty": ({"kv_indptr": []}, r"^kv_indptr has 0 elements"),
    "no query heads": ({"num_qo_heads": 0}, r"num_qo_heads = 0"),
    "no KV heads": ({"num_kv_heads": 0}, r"num_kv_heads = 0"),
    "negative KV heads": ({"num_kv_heads": -2}, r"num_kv_heads = -2"),
    "too many KV heads": ({"num_qo_heads": 32768, "num_kv_heads": 32768}, r"num_kv_heads = 32768"),
    "head ratio": ({"num_qo_heads": 5}, r"num_qo_heads = 5 .*num_kv_heads = 2"),
    "head_dim_qk 4": ({"head_dim_qk": 4, "head_dim_vo": 64}, r"head_dim_qk = 4.* to 8 columns"),
    "head_dim_qk 100": (
        {"head_dim_qk": 100},
        r"head_dim_qk = 100.*padded with zeros to 104 .*sqrt\(100\)",
    ),
    "head_dim_qk 520": (
        {"head_dim_qk": 520},
        r"head_dim_qk = 520.*512.*scaled_dot_product_attention",
    ),
    "head_dim_vo 0": (
        {"head_dim_vo": 0},
        r"head_dim_vo = 0: must be a multiple of 8 from 8 to 512$",
    ),
    "head_dim_vo 12": ({"head_dim_vo": 12}, r"head_dim_vo = 12"),
    "window_left -2": ({"window_left": -2}, r"window_left = -2"),
    "chunk_size -4": ({"chunk_size": -4}, r"chunk_size = -4.*power of two"),
    "chunk_size 48": ({"chunk_size": 48}, r"chunk_size = 48.*power of two"),
    "window_left huge": ({"window_left": 2**31 - 1}, r"window_left = 2147483647.*-1"),
    "fixed_split_size": ({"fixed_split_size": -7}, r"fixed_split_size = -7"),
    "workspace": ({"float_workspace_bytes": -1}, r"float_workspace_buffer: .*-1"),
    "graph rows": ({"graph_max_rows": -1}, r"graph_max_rows = -1"),
    "graph rows exceeded": ({"graph_max_rows": 7}, r"qo_indptr\[-1\] - qo_indptr\[0\] = 8.* 7 "),
    "rows overflow": (
        {"qo_indptr": [0, LIMIT // 2 + 1], "kv_indptr": [0, 1], "num_qo_heads": 4},
        rf"qo_indptr\[1\]: request 0 .*{LIMIT + 2} rows",
    ),
    "keys overflow": (
        {"qo_indptr": [0, 1], "kv_indptr": [0, LIMIT + 1]},
        rf"^kv_indptr\[1\]: request 0 has {LIMIT + 1} keys",
    ),
    "mask without indptr": ({"custom_mask": True}, r"mask_indptr has 0 elements"),
    "last_page_len without page_size": (
        {"last_page_len": [1, 1, 1]},
        r"page_size = 0",
    ),
}

BAD_PAGED = {
    "page_size": ({"page_size": -1}, r"page_size = -1"),
    "page_size 0": ({"page_size": 0}, r"page_size = 0"),
    "start": ({"kv_indptr": [-1, 2, 2, 3]}, r"^paged_kv_indptr\[0\] = -1"),
    "decreases": ({"kv_indptr": [0, 2, 1, 3]}, r"^paged_kv_indptr\[2\] = 1 .*\[1\] = 2"),
    "size": ({"kv_indptr": [0, 2, 2]}, r"^paged_kv_indptr has 3 elements"),
    "last_page_len size": ({"last_page_len": [1, 1]}, r"paged_kv_last_page_len has 2 elements"),
    "last_page_len none": ({"last_page_len": []}, r"paged_kv_last_page_len has 0 elements"),
    "last_page_len 0": (
        {"last_page_len": [0, 0, 16]},
        r"paged_kv_last_page_len\[0\] = 0: .*page_size = 16.*\[1, 16\]",
    ),
    "last_page_len 17": ({"last_page_len": [1, 0, 17]}, r"paged_kv_last_page_len\[2\] = 17"),
    "last_page_len negative": ({"last_page_len": [1, 0, -1]}, r"paged_kv_last_page_len\[2\] = -1"),
    "last_page_len least": (
        {"last_page_len": [-(2**31), 0, 1]},
        r"paged_kv_last_page_len\[0\] = -2147483648: .*\[1, 16\]",
    ),
    "keys overflow": (
        {"page_size": LIMIT, "last_page_len": [1, 0, 1]},
        rf"paged_kv_indptr\[1\]: request 0 has {LIMIT + 1} keys",
    ),
}

BAD_MASK = {
    "size": ({"mask_indptr": [0, 4, 4]}, r"mask_indptr has 3 elements"),
    "negative": ({"mask_indptr": [-1, 4, 4, 4]}, r"mask_indptr\[0\] = -1"),
    "too short": ({"mask_indptr": [0, 3, 3, 3]}, r"mask_indptr\[1\] = 3: request 0 .* 4 bytes"),
    "decreases": ({"mask_indptr": [0, 4, 3, 3]}, r"mask_indptr\[2\] = 3"),
    "not custom": ({"custom_mask": False}, r"mask_indptr has 4 elements but no custom mask"),
}


def cases(table):
    return [pytest.param(change, message, id=name) for name, (change, message) in table.items()]


@pytest.mark.parametrize("good", [GOOD_RAGGED, GOOD_PAGED, GOOD_MASK])
def test_good_cases_pass(good):
    planner.validate(**good)
    planner.plan(**good)


@pytest.mark.parametrize(("change", "message"), cases(BAD_RAGGED))
def test_ragged(change, message):
    check_refused(GOOD_RAGGED | change, message)


@pytest.mark.parametrize(("change", "message"), cases(BAD_PAGED))
def test_paged(change, message):
    check_refused(GOOD_PAGED | change, message)


@pytest.mark.parametrize(("change", "message"), cases(BAD_MASK))
def test_mask(change, message):
    check_refused(GOOD_MASK | change, message)


def check_refused(case, message):
    with pytest.raises(ValueError, match=message):
        planner.validate(**case)
    with pytest.raises(ValueError, match=message):
        planner.plan(**case)


def test_any_last_page_len_where_there_is_no_page():
    expected = planner.plan(**GOOD_PAGED)
    for last in (0, 1, 16, 17, -1, -16, -(2**31), 2**31 - 1):
        case = GOOD_PAGED | {"last_page_len": [1, last, 16]}
        planner.validate(**case)
        assert planner.tile_class(**case) == planner.tile_class(**GOOD_PAGED)
        assert planner.plan(**case) == expected


def test_limits_themselves_pass():
    planner.validate(**GOOD_RAGGED | {"window_left": LIMIT})
    planner.validate(
        **GOOD_RAGGED | {"qo_indptr": [0, LIMIT // 2], "kv_indptr": [0, LIMIT], "num_qo_heads": 4}
    )


def test_unknown_arguments_are_refused():
    with pytest.raises(TypeError, match="page_sise"):
        planner.validate(**GOOD_RAGGED, page_sise=3)
