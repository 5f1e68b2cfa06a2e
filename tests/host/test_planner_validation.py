"""The planner refuses arguments by name and value, and says what would be right."""

import pytest
from planned import planner, ragged

LIMIT = 1 << 30

GOOD_RAGGED = ragged([3, 0, 5], [10, 4, 0])
GOOD_PAGED = ragged([3, 0, 5], [2, 0, 1], page_size=16, last_page_len=[1, 0, 16])
GOOD_MASK = ragged([3, 0, 5], [10, 4, 0], mask_indptr=[0, 4, 4, 4])

RAGGED = [
    ({"qo_indptr": []}, r"qo_indptr is empty"),
    ({"qo_indptr": [-1, 3, 3, 8]}, r"qo_indptr\[0\] = -1"),
    ({"qo_indptr": [0, 3, 2, 8]}, r"qo_indptr\[2\] = 2 .*qo_indptr\[1\] = 3"),
    ({"qo_indptr": [0, -3, 2, 8]}, r"qo_indptr\[1\] = -3"),
    ({"kv_indptr": [-2, 10, 14, 14]}, r"^kv_indptr\[0\] = -2"),
    ({"kv_indptr": [0, 10, 14, 13]}, r"^kv_indptr\[3\] = 13 .*\[2\] = 14"),
    ({"kv_indptr": [0, 10]}, r"^kv_indptr has 2 elements, qo_indptr has 4"),
    ({"kv_indptr": []}, r"^kv_indptr has 0 elements"),
    ({"num_qo_heads": 0}, r"num_qo_heads = 0"),
    ({"num_kv_heads": 0}, r"num_kv_heads = 0"),
    ({"num_kv_heads": -2}, r"num_kv_heads = -2"),
    ({"num_qo_heads": 32768, "num_kv_heads": 32768}, r"num_kv_heads = 32768"),
    ({"num_qo_heads": 5}, r"num_qo_heads = 5 .*num_kv_heads = 2"),
    ({"head_dim_qk": 4, "head_dim_vo": 64}, r"head_dim_qk = 4.* to 8 columns"),
    ({"head_dim_qk": 100}, r"head_dim_qk = 100.*padded with zeros to 104 .*sqrt\(100\)"),
    ({"head_dim_qk": 520}, r"head_dim_qk = 520.*512.*scaled_dot_product_attention"),
    ({"head_dim_vo": 0}, r"head_dim_vo = 0: must be a multiple of 8 from 8 to 512$"),
    ({"head_dim_vo": 12}, r"head_dim_vo = 12"),
    ({"window_left": -2}, r"window_left = -2"),
    ({"window_left": 2**31 - 1}, r"window_left = 2147483647.*-1"),
    ({"chunk_size": -4}, r"chunk_size = -4.*power of two"),
    ({"chunk_size": 48}, r"chunk_size = 48.*power of two"),
    ({"fixed_split_size": -7}, r"fixed_split_size = -7"),
    ({"float_workspace_bytes": -1}, r"float_workspace_buffer: .*-1"),
    ({"graph_max_rows": -1}, r"graph_max_rows = -1"),
    ({"graph_max_rows": 7}, r"qo_indptr\[-1\] - qo_indptr\[0\] = 8.* 7 "),
    (
        {"qo_indptr": [0, LIMIT // 2 + 1], "kv_indptr": [0, 1], "num_qo_heads": 4},
        rf"qo_indptr\[1\]: request 0 .*{LIMIT + 2} rows",
    ),
    (
        {"qo_indptr": [0, 1], "kv_indptr": [0, LIMIT + 1]},
        rf"^kv_indptr\[1\]: request 0 has {LIMIT + 1} keys",
    ),
    ({"custom_mask": True}, r"mask_indptr has 0 elements"),
    ({"last_page_len": [1, 1, 1]}, r"page_size = 0"),
]
PAGED = [
    ({"page_size": -1}, r"page_size = -1"),
    ({"page_size": 0}, r"page_size = 0"),
    ({"kv_indptr": [-1, 2, 2, 3]}, r"^paged_kv_indptr\[0\] = -1"),
    ({"kv_indptr": [0, 2, 1, 3]}, r"^paged_kv_indptr\[2\] = 1 .*\[1\] = 2"),
    ({"kv_indptr": [0, 2, 2]}, r"^paged_kv_indptr has 3 elements"),
    ({"last_page_len": [1, 1]}, r"paged_kv_last_page_len has 2 elements"),
    ({"last_page_len": []}, r"paged_kv_last_page_len has 0 elements"),
    ({"last_page_len": [0, 0, 16]}, r"last_page_len\[0\] = 0: .*page_size = 16.*\[1, 16\]"),
    ({"last_page_len": [1, 0, 17]}, r"paged_kv_last_page_len\[2\] = 17"),
    ({"last_page_len": [1, 0, -1]}, r"paged_kv_last_page_len\[2\] = -1"),
    ({"last_page_len": [-(2**31), 0, 1]}, r"last_page_len\[0\] = -2147483648: .*\[1, 16\]"),
    (
        {"page_size": LIMIT, "last_page_len": [1, 0, 1]},
        rf"paged_kv_indptr\[1\]: request 0 has {LIMIT + 1} keys",
    ),
]
MASK = [
    ({"mask_indptr": [0, 4, 4]}, r"mask_indptr has 3 elements"),
    ({"mask_indptr": [-1, 4, 4, 4]}, r"mask_indptr\[0\] = -1"),
    ({"mask_indptr": [0, 3, 3, 3]}, r"mask_indptr\[1\] = 3: request 0 .* 4 bytes"),
    ({"mask_indptr": [0, 4, 3, 3]}, r"mask_indptr\[2\] = 3"),
    ({"custom_mask": False}, r"mask_indptr has 4 elements but no custom mask"),
]
REFUSED = [
    (good | change, message)
    for good, rows in ((GOOD_RAGGED, RAGGED), (GOOD_PAGED, PAGED), (GOOD_MASK, MASK))
    for change, message in rows
]


@pytest.mark.parametrize(("case", "message"), REFUSED)
def test_refusals(case, message):
    for call in (planner.validate, planner.plan):
        with pytest.raises(ValueError, match=message):
            call(**case)


def test_any_last_page_len_where_there_is_no_page():
    expected = planner.plan(**GOOD_PAGED)
    for last in (0, 1, 16, 17, -1, -16, -(2**31), 2**31 - 1):
        case = GOOD_PAGED | {"last_page_len": [1, last, 16]}
        planner.validate(**case)
        assert planner.tile_class(**case) == planner.tile_class(**GOOD_PAGED)
        assert planner.plan(**case) == expected


@pytest.mark.parametrize(
    "case",
    [
        GOOD_RAGGED,
        GOOD_PAGED,
        GOOD_MASK,
        GOOD_RAGGED | {"window_left": LIMIT},
        ragged([LIMIT // 2], [LIMIT], num_qo_heads=4),
    ],
)
def test_good_cases_and_the_limits_themselves_pass(case):
    planner.validate(**case)


def test_unknown_arguments_are_refused():
    with pytest.raises(TypeError, match="page_sise"):
        planner.validate(**GOOD_RAGGED, page_sise=3)
