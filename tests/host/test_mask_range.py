"""touched_tiles() and keeps() follow the definition of the masks, for every small shape."""

from itertools import product

import numpy as np
import pytest
from planned import keep_mask, planner

LENGTHS = list(product((0, 1, 2, 5, 8, 9, 17), repeat=2))
TILE_N = 4


def spans(qo_len, kv_len):
    """Yields one, three or all rows, and keys of one, two or all tiles."""
    for first, chunk_tiles in product(range(qo_len), (1, 2, 100)):
        chunk = chunk_tiles * TILE_N
        for last in {first, min(first + 2, qo_len - 1), qo_len - 1}:
            for begin in range(0, max(kv_len, 1), chunk):
                yield first, last, begin, min(begin + chunk, kv_len)


def check_range(keep, tiles, key_begin, key_end):
    """Checks {begin, full_begin, full_end, end} of rows whose kept keys are keep[row, key]."""
    begin, full_begin, full_end, end = tiles
    assert begin <= full_begin <= full_end <= end
    kept_keys = np.flatnonzero(keep.any(axis=0)[key_begin:key_end]) + key_begin
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

    # Every full tile is found: none pays for a mask that it does not need.
    assert list(range(full_begin, full_end)) == [tile for tile in range(begin, end) if full(tile)]


@pytest.mark.parametrize("chunk_size", [0, 1, 2, 8, 32])
@pytest.mark.parametrize("window_left", [-1, 0, 1, 4, 30])
@pytest.mark.parametrize("causal", [False, True])
def test_by_brute_force(causal, window_left, chunk_size):
    bounds = {"causal": causal, "window_left": window_left, "chunk_size": chunk_size}
    for qo_len, kv_len in LENGTHS:
        keep = keep_mask(qo_len, kv_len, **bounds)
        request = bounds | {"qo_len": qo_len, "kv_len": kv_len}
        assert np.array_equal(np.reshape(planner.keeps(**request), keep.shape), keep)
        for first, last, key_begin, key_end in spans(qo_len, kv_len):
            places = {"first": first, "last": last, "key_begin": key_begin, "key_end": key_end}
            tiles = planner.touched_tiles(**request, **places, tile_n=TILE_N)
            check_range(keep[first : last + 1], tiles, key_begin, key_end)
            under_mask = planner.touched_tiles(**request, **places, tile_n=TILE_N, custom_mask=True)
            assert (under_mask[0], under_mask[3]) == (tiles[0], tiles[3])
            assert under_mask[1] == under_mask[2], "a custom mask may hide keys of any tile"
