"""Every row of docs/support.md plans in 128 MB of workspace, whatever the size of the KV cache."""

import sys
from pathlib import Path

import preflash
import prepass_policy
import pytest
import support_table
import torch
from planned import indptr, planner, ragged
from preflash import _core

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "cmake" / "codegen"))

import spec

ROOM = 128 << 20
ANY_TILE = spec.Tile(m=64, n=64, stages=1, warps=4, ctas_per_sm=1)
FAMILIES = {"sm90": 132, "sm80": 108}  # and SMs: an H100, an A100
# The cpu backend alone has float32.
DTYPES = [dtypes for dtypes in support_table._DTYPES if _core.DType.float32 not in dtypes]
HEADS = {"num_qo_heads": 32, "num_kv_heads": 8}
CACHES = {
    "64x128k": ([1] * 64, [131072] * 64),
    "64x128k_appended": ([300] * 64, [131072] * 64),
    "1x1M": ([1], [1 << 20]),
    "1x1M_prefill": ([8192], [1 << 20]),
}


@pytest.fixture(scope="module")
def tiles():
    return {variant.id: variant.tile for variant in spec.load_matrix().variants}


def kernel_of(family: str, tile_class: _core.TileClass, options) -> str | None:
    """The id of what a build of every variant would run on the caller's own tensors."""
    wanted = _core.Variant(
        getattr(_core.Family, family),
        options.q_dtype,
        options.kv_dtype,
        options.head_dim_qk,
        options.head_dim_vo,
        tile_class=tile_class,
        logits=_core.Logits.softcap if options.soft_cap else _core.Logits.plain,
        position=options.position,
        mask=options.mask,
    )
    found = _core.find_in_matrix(wanted)
    return None if found is None else found.id


def case_of(family: str, tile: spec.Tile, options, cache: str) -> dict:
    qo_lens, kv_lens = CACHES[cache]
    case = ragged(
        qo_lens,
        kv_lens,
        family=family,
        num_sms=FAMILIES[family],
        float_workspace_bytes=ROOM,
        tile_m=tile.m,
        tile_n=tile.n,
        ctas_per_sm=tile.ctas_per_sm,
        head_dim_qk=options.head_dim_qk,
        head_dim_vo=options.head_dim_vo,
        causal=True,
        position=options.position,
        q_dtype=options.q_dtype,
        kv_dtype=options.kv_dtype,
        o_dtype=options.o_dtype,
        **HEADS,
    )
    if options.mask == _core.Mask.custom:
        bits = [q * k for q, k in zip(qo_lens, kv_lens, strict=True)]
        case |= {"mask_indptr": indptr(-(-n // 8) for n in bits), "causal": False}
    return case


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("dtypes", DTYPES, ids=lambda dtypes: str(dtypes).replace(" ", ""))
@pytest.mark.parametrize("feature", support_table._FEATURES, ids=lambda feature: feature.name)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_row_and_column(family, feature, dtypes, cache, tiles):
    """Covers kernels that read the cache in place, in captured graphs and outside."""
    for dims in support_table._HEAD_DIMS:
        options = support_table._usual(dtypes, *dims).replace(**feature.options)
        assert _core.in_matrix(getattr(_core.Family, family), options), dims
        case = case_of(family, ANY_TILE, options, cache)
        tile_class = getattr(_core.TileClass, planner.tile_class(**case))
        kernel = kernel_of(family, tile_class, options)
        assert kernel is not None, dims
        case = case_of(family, tiles[kernel], options, cache)
        rows = case["qo_indptr"][-1]
        mask_bytes = case["mask_indptr"][-1] if "mask_indptr" in case else 0
        for graph in ({}, {"graph_max_rows": rows, "graph_mask_bytes": mask_bytes}):
            planned = planner.plan(**case, **graph)
            assert planned["layout"]["float_bytes"] <= ROOM
            assert planned["sizes"]["num_items"] > 0


@pytest.mark.parametrize("use_cuda_graph", [False, True])
@pytest.mark.parametrize("lengths", [(64, 1 << 17), (1, 1 << 20)], ids=str)
@pytest.mark.parametrize("policy", ["auto", "always"])
@pytest.mark.parametrize(
    "options",
    [
        {"pos_encoding_mode": "ROPE_LLAMA"},
        {"kv_data_type": torch.float8_e4m3fn},
        {"q_data_type": torch.float8_e4m3fn, "kv_data_type": torch.float8_e4m3fn},
    ],
    ids=["rope", "fp8_cache", "fp8"],
)
def test_copies_are_no_condition(options, policy, lengths, use_cuda_graph):
    """A plan without room for requested copies makes none."""
    batch, kv_len = lengths
    pages = kv_len // 16
    arrays = {
        "qo_indptr": torch.arange(batch + 1, dtype=torch.int32) * 256,
        "paged_kv_indptr": torch.arange(batch + 1, dtype=torch.int32) * pages,
        "paged_kv_indices": torch.arange(batch * pages, dtype=torch.int32),
        "paged_kv_last_page_len": torch.full((batch,), 16, dtype=torch.int32),
    }
    buffers = {}
    if use_cuda_graph:
        buffers = {f"{name}_buf": torch.empty_like(array) for name, array in arrays.items()}
    wrapper = preflash.BatchPrefillWithPagedKVCacheWrapper(
        torch.empty(ROOM, dtype=torch.uint8), "NHD", use_cuda_graph, backend="cpu", **buffers
    )
    arguments = (*arrays.values(), 32, 8, 512, 16)
    with prepass_policy.forced(policy):
        wrapper.plan(*arguments, **options)
        assert wrapper.variant.startswith("cpu_")
        assert "prepass+" not in repr(wrapper)
        needed, _ = wrapper.workspace_size(*arguments, **options)
    copies = 2 * batch * kv_len * 8 * (512 + 512)
    assert (needed >= copies) == (policy == "always" and not use_cuda_graph)
