"""sm90 loads token-aligned tiles of Q: they begin at a token's first head, whatever the group."""

import pytest
from planned import checked, partial_bytes, rows_per_tile

GROUPS = [1, 3, 5, 6, 7, 12, 128, 131]  # the last one is larger than a tile
# (tile_m, tile_n) as sm90 kernels have them, and keys that are no power of two.
TILES = [(128, 128), (192, 128), (128, 176), (128, 112), (128, 80)]


def aligned(lengths, group, tile=(128, 128), **options):
    heads = {"num_qo_heads": group, "num_kv_heads": 1, "tile_m": tile[0], "tile_n": tile[1]}
    return checked(*lengths, **{"family": "sm90"} | heads | options)


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: f"{tile[0]}x{tile[1]}")
@pytest.mark.parametrize("group", GROUPS)
def test_tiles_begin_at_tokens(group, tile):
    lengths = ([1, 37, 0, 70, 3], [300, 400, 9, 70, 0])
    made = aligned(lengths, group, tile, causal=True, fixed_split_size=tile[1])
    rows = tile[0] - tile[0] % group if group <= tile[0] else tile[0]
    assert rows_per_tile(made.case) == rows
    if group <= tile[0]:
        assert (made.items["row_begin"] % group == 0).all()
        assert (made.merges["row_begin"] % group == 0).all()
    assert (made.requests["chunk_keys"] == tile[1]).all()


@pytest.mark.parametrize(("family", "second_row"), [("cpu", 128), ("sm80", 128), ("sm90", 126)])
def test_other_families_fill_their_tiles(family, second_row):
    made = aligned(([37], [400]), 7, (128, 64), family=family)
    assert sorted({*made.items["row_begin"]})[1] == second_row


@pytest.mark.parametrize("group", GROUPS)
def test_partials_are_the_rows_of_the_request(group):
    made = aligned(([1], [300]), group, fixed_split_size=128)
    assert made.sizes["num_partial_rows"] == 3 * group
    assert made.layout["float_bytes"] == partial_bytes(3 * group)


@pytest.mark.parametrize("group", [3, 5, 7, 12])
def test_a_graph_reserves_for_the_worst_batch(group):
    """Requests of one row over a tile each make the most tiles, counted in token-aligned rows."""
    length = 128 // group + 1
    options = {"graph_max_rows": 4 * length, "disable_split_kv": True}
    made = aligned(([length] * 4, [64] * 4), group, (128, 64), **options)
    assert made.sizes["num_items"] == 8
