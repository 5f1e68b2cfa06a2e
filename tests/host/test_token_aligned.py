"""sm90 loads token-aligned tiles of Q: they begin at a token's first head, whatever the group size.

The plans run on the CPU, which executes any family's: forward, partials and combine.
"""

import numpy as np
import pytest
from planned import check, partial_bytes, plan, planner, ragged, rows_per_tile

GROUPS = [1, 3, 5, 6, 7, 12, 128, 131]  # the last one is larger than a tile
# (tile_m, tile_n) as sm90 kernels have them, and keys that are no power of two.
TILES = [(128, 128), (192, 128), (128, 176), (128, 112), (128, 80)]
LENGTHS = ([1, 37, 0, 70, 3], [300, 400, 9, 70, 0])


def token_aligned(group, tile, **options):
    tile_m, tile_n = tile
    heads = {"num_qo_heads": group, "num_kv_heads": 1}
    return ragged(*LENGTHS, family="sm90", tile_m=tile_m, tile_n=tile_n, **heads, **options)


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("group", GROUPS)
def test_tiles_begin_at_tokens(group, tile):
    made = plan(**token_aligned(group, tile, causal=True, fixed_split_size=tile[1]))
    check(made)
    rows = rows_per_tile(made.case)
    assert rows == made.tile_rows <= tile[0]
    if group <= tile[0]:
        assert rows == tile[0] - tile[0] % group
        assert (made.items["row_begin"] % group == 0).all()
        assert (made.merges["row_begin"] % group == 0).all()
    else:
        assert rows == tile[0]
    assert (made.requests["chunk_keys"] == tile[1]).all()


@pytest.mark.parametrize("family", ["cpu", "sm80"])
def test_other_families_fill_their_tiles(family):
    case = token_aligned(7, (128, 64)) | {"family": family}
    made = plan(**case)
    assert 128 in made.items["row_begin"]
    assert 126 in plan(**case | {"family": "sm90"}).items["row_begin"]


@pytest.mark.parametrize("group", GROUPS)
def test_partials_are_the_rows_of_the_request(group):
    options = {"fixed_split_size": 128, "num_qo_heads": group, "num_kv_heads": 1}
    made = plan(**ragged([1], [300], family="sm90", tile_m=128, tile_n=128, **options))
    assert made.sizes["num_partial_rows"] == 3 * group
    assert made.layout["float_bytes"] == partial_bytes(3 * group)


@pytest.mark.parametrize("group", [3, 5, 7, 12])
def test_a_graph_reserves_for_the_worst_batch(group):
    """Requests of one row over a tile each make the most tiles, counted in token-aligned rows."""
    tile_rows = 128 // group * group
    length = tile_rows // group + 1
    options = {"num_qo_heads": group, "num_kv_heads": 1, "family": "sm90", "tile_m": 128}
    case = ragged([length] * 4, [64] * 4, graph_max_rows=4 * length, **options)
    made = plan(**case, disable_split_kv=True)
    check(made)
    assert made.sizes["num_items"] == 8


def attention(q, k, v, causal):
    """float64 output and base-2 LSE of one request: [rows, heads, dim], [rows, heads]."""
    rows, heads, dim = q.shape
    group = heads // k.shape[1]
    out, lse = np.zeros((rows, heads, v.shape[2])), np.full((rows, heads), -np.inf)
    for head in range(heads):
        scores = q[:, head] @ k[:, head // group].T / np.sqrt(dim)
        for row in range(rows):
            keep = len(k) if not causal else max(0, min(len(k), row + len(k) - rows + 1))
            if keep == 0:
                continue
            top = scores[row, :keep].max()
            weights = np.exp(scores[row, :keep] - top)
            out[row, head] = weights @ v[:keep, head // group] / weights.sum()
            lse[row, head] = (top + np.log(weights.sum())) / np.log(2)
    return out, lse


SPLITS = [{"disable_split_kv": True}, {"fixed_split_size": 100}, {"num_sms": 400}]


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("group", GROUPS)
def test_the_plan_computes_attention(group, tile, split):
    dims = {"head_dim_qk": 16, "head_dim_vo": 8}
    case = token_aligned(group, tile, causal=True, **dims, **split)
    rng = np.random.default_rng(group)
    q, k, v = (
        rng.standard_normal(shape, np.float32)
        for shape in (
            (case["qo_indptr"][-1], group, 16),
            (case["kv_indptr"][-1], 1, 16),
            (case["kv_indptr"][-1], 1, 8),
        )
    )
    o, lse = np.full((len(q), group, 8), np.nan, np.float32), np.full(q.shape[:2], 7.0, np.float32)
    planner.attend(*(array.ctypes.data for array in (q, k, v, o, lse)), **case)
    for i in range(len(LENGTHS[0])):
        rows = slice(case["qo_indptr"][i], case["qo_indptr"][i + 1])
        keys = slice(case["kv_indptr"][i], case["kv_indptr"][i + 1])
        expected, expected_lse = attention(
            *(x.astype(float) for x in (q[rows], k[keys], v[keys])), True
        )
        np.testing.assert_allclose(o[rows], expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(lse[rows], expected_lse, rtol=1e-5, atol=1e-5)
