"""Every row of docs/support.md plans in 128 MB of workspace, whatever the size of the KV cache."""

from itertools import product

import pytest
import spec
import support_table
from planned import indptr, planner, ragged
from preflash import _core

ROOM = 128 << 20
FAMILIES = {"sm90": 132, "sm80": 108}  # and SMs: an H100, an A100
# The cpu backend alone has float32.
DTYPES = [dtypes for dtypes in support_table._DTYPES if _core.DType.float32 not in dtypes]
CACHES = {
    "64x128k": ([1] * 64, [131072] * 64),
    "64x128k_appended": ([300] * 64, [131072] * 64),
    "1x1M": ([1], [1 << 20]),
    "1x1M_prefill": ([8192], [1 << 20]),
}
OF_OPTIONS = ("head_dim_qk", "head_dim_vo", "position", "q_dtype", "kv_dtype", "o_dtype")


@pytest.fixture(scope="module")
def tiles():
    return {variant.id: variant.tile for variant in spec.load_matrix().variants}


def kernel_of(family: str, tile_class: str, options) -> str:
    """Returns the id of what a build of every variant runs on the caller's own tensors."""
    wanted = _core.Variant(
        getattr(_core.Family, family),
        options.q_dtype,
        options.kv_dtype,
        options.head_dim_qk,
        options.head_dim_vo,
        tile_class=getattr(_core.TileClass, tile_class),
        logits=_core.Logits.softcap if options.soft_cap else _core.Logits.plain,
        position=options.position,
        mask=options.mask,
    )
    return _core.find_in_matrix(wanted).id


def case_of(family: str, options, cache: str) -> dict:
    qo_lens, kv_lens = CACHES[cache]
    case = ragged(qo_lens, kv_lens, family=family, num_sms=FAMILIES[family], causal=True)
    case |= {"num_qo_heads": 32, "num_kv_heads": 8, "float_workspace_bytes": ROOM}
    case |= {name: getattr(options, name) for name in OF_OPTIONS}
    if options.mask == _core.Mask.custom:
        bits = [q * k for q, k in zip(qo_lens, kv_lens, strict=True)]
        case |= {"mask_indptr": indptr(-(-n // 8) for n in bits), "causal": False}
    return case


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_row_and_column(family, cache, tiles):
    """Kernels that read the cache in place plan in captured graphs and outside."""
    features, head_dims = support_table._FEATURES, support_table._HEAD_DIMS
    cases = {}  # by what the planner is given of a row
    for feature, dtypes, dims in product(features, DTYPES, head_dims):
        options = support_table._usual(dtypes, *dims).replace(**feature.options)
        assert _core.in_matrix(getattr(_core.Family, family), options), (feature, dtypes, dims)
        case = case_of(family, options, cache)
        tile = tiles[kernel_of(family, planner.tile_class(**case), options)]
        case |= {"tile_m": tile.m, "tile_n": tile.n, "ctas_per_sm": tile.ctas_per_sm}
        cases[dims, options.mask, tile.m, tile.n, tile.ctas_per_sm] = case
    for case in cases.values():
        graph = {"graph_max_rows": case["qo_indptr"][-1]}
        graph["graph_mask_bytes"] = case.get("mask_indptr", [0])[-1]
        for mode in ({}, graph):
            planned = planner.plan(**case, **mode)
            assert planned["layout"]["float_bytes"] <= ROOM
            assert planned["sizes"]["num_items"] > 0
