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


# fa3 takes short tiles over 16 bits at head_dim 64 for short requests alone.


def limit_of(q_dtype, kv_dtype, dims, **options):
    """Returns the average of keys up to which short tiles are taken; 0: of any number."""
    short = {"tile_class": _core.TileClass.decode, **options}
    wanted = _core.Variant(_core.Family.sm90, q_dtype, kv_dtype, *dims, **short)
    return planner.most_keys_of(_core.find_in_matrix(wanted))


def test_which_kernels_have_a_limit():
    """Requests of 300 keys gain much, those of 4096 lose: the limit is in between."""
    for dtype, dims in ((F16, (8, 8)), (BF16, (40, 40)), (BF16, (64, 64))):
        assert 600 < limit_of(dtype, dtype, dims) < 4000
    for dims in ((72, 72), (128, 128), (192, 128), (256, 256)):
        assert limit_of(BF16, BF16, dims) == limit_of(BF16, E4M3, dims) == 0
    assert limit_of(BF16, E4M3, (64, 64)) == 0
    # Those with ALiBi have a tall tile already.
    assert limit_of(BF16, BF16, (64, 64), position=_core.Position.alibi) == 0


@pytest.mark.parametrize(
    ("qo_lens", "kv_lens", "options", "expected"),
    [
        ([1] * 8, [3000] * 8, {}, False),
        ([1] * 8, [3000] * 7 + [3001], {}, True),
        ([1] * 8, [300] * 7 + [21900], {}, False),
        ([1] * 8, [300] * 7 + [21901], {}, True),
        ([1] * 8, [3001] * 8, {"num_sms": 5}, False),
        ([1] * 16, [2501] * 16, {}, True),
        ([1] * 8, [4001] * 8, {"num_kv_heads": 1}, False),
        ([1] * 7 + [0], [3000] * 7 + [90000], {}, False),
        ([0] * 8, [4000] * 8, {}, False),
        ([], [], {}, False),
        ([1] * 8, [4000] * 8, {"window_left": 2999}, False),
        ([1] * 8, [4000] * 8, {"window_left": 3000}, True),
        ([2] * 8, [4000] * 8, {"chunk_size": 1024}, False),
        # A captured launch, and one whose lengths only the device knows, serve any lengths.
        ([1] * 8, [4000] * 8, {"graph_max_rows": 8}, False),
        ([1] * 8, [4000] * 8, {"lengths_are_upper_bounds": True}, False),
    ],
)
def test_average_length(qo_lens, kv_lens, options, expected):
    """The average is over the 16 items that keep keys and 16 more for the cost of a launch."""
    case = ragged(qo_lens, kv_lens, **{"family": "sm90", "num_sms": 4} | options)
    assert planner.prefers_tall_tiles(1500, **case) == expected


# Batch, keys: the short tile's time in the tall one's, H100, 64:16 heads of 64.
MEASURED = {
    (256, 300): 0.69, (128, 1024): 0.93, (64, 2048): 0.98, (16, 4096): 0.98, (1, 8192): 0.94,
    (64, 4096): 1.02, (32, 8192): 1.04, (16, 16384): 1.05, (4, 32768): 1.04, (2, 32768): 1.02,
}  # fmt: skip


def test_the_faster_tile_of_head_dim_64():
    limit, options = limit_of(BF16, BF16, (64, 64)), {"num_qo_heads": 64, "num_kv_heads": 16}
    for (batch, keys), time in MEASURED.items():
        case = ragged([1] * batch, [keys] * batch, family="sm90", **options)
        assert planner.prefers_tall_tiles(limit, **case) == (time > 1), (batch, keys)
