"""touched_tiles() and keeps() follow the definition of the masks, for every small shape."""

from itertools import product

import numpy as np
import pytest
from planned import keep_mask, planner

LENGTHS = (0, 1, 2, 5, 8, 9, 17)
WINDOWS = (-1, 0, 1, 4, 30)
CHUNKS = (0, 1, 2, 8, 32)
TILE_N = 4


MASKS = pytest.mark.parametrize(
    "bounds",
    [
        {"causal": causal, "window_left": window_left, "chunk_size": chunk_size}
        for causal, window_left, chunk_size in product((False, True), WINDOWS, CHUNKS)
    ],
)


@MASKS
def test_keeps_is_the_definition(bounds):
    for qo_len, kv_len in product(LENGTHS, LENGTHS):
        got = planner.keeps(qo_len=qo_len, kv_len=kv_len, **bounds)
        expected = keep_mask(qo_len, kv_len, **bounds)
        assert np.array_equal(np.array(got, bool).reshape(qo_len, kv_len), expected)


def row_spans(qo_len):
    """Yields every span of one, three or all rows."""
    for first in range(qo_len):
        for last in {first, min(first + 2, qo_len - 1), qo_len - 1}:
            yield first, last


def check_range(keep, tiles, keys, custom_mask):
    begin, full_begin, full_end, end = tiles
    key_begin, key_end = keys
    assert begin <= full_begin <= full_end <= end
    columns = keep.copy()
    columns[:, :key_begin] = False
    columns[:, key_end:] = False
    kept_keys = np.flatnonzero(columns.any(axis=0))
    if kept_keys.size == 0:
        # A window without causal may leave a hole between rows' intervals but never in one row's.
        assert begin == end
        return
    # Nothing kept lies outside, and neither end of the range is idle.
    assert begin == kept_keys[0] // TILE_N
    assert end == kept_keys[-1] // TILE_N + 1

    def full(tile):
        """All rows keep the tile, and the end of the keys does not cut it."""
        of_tile = keep[:, tile * TILE_N : (tile + 1) * TILE_N]
        return of_tile.shape[1] == TILE_N and of_tile.all()

    assert all(map(full, range(full_begin, full_end)))
    if custom_mask:
        assert full_begin == full_end
        return
    # Every full tile is found: none pays for a mask that it does not need.
    assert list(range(full_begin, full_end)) == [tile for tile in range(begin, end) if full(tile)]


@pytest.mark.parametrize("custom_mask", [False, True])
@MASKS
def test_touched_tiles_by_brute_force(bounds, custom_mask):
    for qo_len, kv_len in product(LENGTHS, LENGTHS):
        keep = keep_mask(qo_len, kv_len, **bounds)
        for (first, last), chunk_tiles in product(row_spans(qo_len), (1, 2, 100)):
            chunk = chunk_tiles * TILE_N
            for key_begin in range(0, max(kv_len, 1), chunk):
                keys = key_begin, min(key_begin + chunk, kv_len)
                tiles = planner.touched_tiles(
                    qo_len=qo_len,
                    kv_len=kv_len,
                    **bounds,
                    first=first,
                    last=last,
                    key_begin=keys[0],
                    key_end=keys[1],
                    tile_n=TILE_N,
                    custom_mask=custom_mask,
                )
                check_range(keep[first : last + 1], tiles, keys, custom_mask)


@pytest.mark.parametrize("qo_len", [1, 3, 300])
@pytest.mark.parametrize("window_left", [-1, 0, 1 << 30])
def test_extreme_lengths_do_not_overflow(qo_len, window_left):
    kv_len = 1 << 30
    begin, _, _, end = planner.touched_tiles(
        qo_len=qo_len,
        kv_len=kv_len,
        window_left=window_left,
        causal=True,
        first=0,
        last=qo_len - 1,
        tile_n=64,
    )
    assert end == kv_len // 64
    assert begin == ((kv_len - qo_len) // 64 if window_left == 0 else 0)
