"""Requests of few rows take short tiles where those are faster and no bits of theirs are fixed."""

import pytest
from planned import planner, ragged
from preflash import _core

F16, BF16, E4M3 = _core.DType.float16, _core.DType.bfloat16, _core.DType.float8_e4m3fn
GQA = {"num_qo_heads": 32, "num_kv_heads": 8}
FIXED, DISABLED = {"fixed_split_size": 256}, {"disable_split_kv": True}


@pytest.mark.parametrize(
    ("qo_lens", "kv_lens", "options", "expected"),
    [
        ([1] * 8, [4000] * 8, {}, "decode"),
        ([16] * 8, [4000] * 8, {}, "decode"),
        ([17] * 8, [4000] * 8, {}, "prefill"),
        ([1] * 60 + [100], [4000] * 61, {}, "decode"),
        ([1] * 2 + [4000], [4000] * 3, {}, "prefill"),
        ([], [], {}, "prefill"),
        ([1] * 8, [4000] * 8, FIXED, "decode"),
        ([1, 16, 0] * 8, [4000] * 24, DISABLED, "decode"),
        ([1] * 60 + [17], [4000] * 61, FIXED, "prefill"),
        ([1] * 60 + [17], [4000] * 61, DISABLED, "prefill"),
        ([17] + [1] * 60, [0] + [4000] * 60, DISABLED, "prefill"),
        ([0] * 8, [4000] * 8, {"graph_max_rows": 8}, "decode"),
        ([1] * 8, [4000] * 8, {"graph_max_rows": 8 * 17}, "prefill"),
        ([1] * 8, [4000] * 8, {"graph_max_rows": 16} | FIXED, "decode"),
        ([1] * 8, [4000] * 8, {"graph_max_rows": 17} | FIXED, "prefill"),
    ],
)
def test_tiles_of_64_rows(qo_lens, kv_lens, options, expected):
    assert planner.tile_class(**ragged(qo_lens, kv_lens, **GQA, **options)) == expected


# Queries of 8 requests or more, options, and the rows of a request that takes short tiles.
@pytest.mark.parametrize(
    ("qo_lens", "options", "rows"),
    [
        ([1] * 8, {}, 4),
        ([2] * 8, {}, 8),
        ([4] * 8, {}, 16),
        ([5] * 8, {}, None),
        ([1] * 60 + [10], {}, 40),
        ([1] * 2 + [4000], {}, None),
        ([1] * 8, {"graph_max_rows": 16}, 8),
        ([1] * 8, {"graph_max_rows": 32}, 16),
        ([1] * 8, {"graph_max_rows": 33}, None),
        ([1] * 8, FIXED, None),
        ([1] * 8, DISABLED, None),
        ([1] * 8, {"graph_max_rows": 1} | DISABLED, None),
    ],
)
@pytest.mark.parametrize(("kv_dtype", "most_rows"), [(E4M3, 64), (BF16, 8)])
def test_tiles_of_16_rows_with_bits_of_their_own(qo_lens, options, rows, kv_dtype, most_rows):
    """sm90 has them, but not where a request's bits are the same in any batch. Over 16 bits they
    take 8 rows of every request."""
    case = ragged(qo_lens, [4000] * len(qo_lens), **GQA, family="sm90", **options)
    expected = "decode" if rows and rows <= most_rows else "prefill"
    assert planner.tile_class(**case, kv_dtype=kv_dtype) == expected
