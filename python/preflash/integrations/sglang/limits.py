"""Configurations of SGLang that preflash refuses, each by a sentence, before the server starts."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.runtime_context import get_parallel, get_spec
from sglang.srt.speculative.spec_utils import resolve_draft_decode_window

from .layers import FP8_DTYPES, attention_layers, layer_refusal


def check_runner(model_runner: Any) -> None:
    """Raises NotImplementedError for a model or an option that preflash does not serve."""
    refusal = _configuration_refusal(model_runner)
    if refusal is not None:
        raise NotImplementedError(refusal)
    with_trees = not model_runner.is_draft_worker and verifies_trees(model_runner)
    for layer in attention_layers(model_runner.model):
        check_layer(layer, model_runner.kv_cache_dtype, with_trees)


def check_layer(layer: Any, kv_dtype: torch.dtype, with_trees: bool) -> None:
    """Raises NotImplementedError for a layer that preflash does not serve."""
    refusal = layer_refusal(layer, kv_dtype, with_trees)
    if refusal is not None:
        raise NotImplementedError(f"layer {layer.layer_id}: {refusal}")


def check_draft_window(model_runner: Any) -> None:
    """Raises NotImplementedError for --speculative-draft-window-size."""
    if resolve_draft_decode_window(model_runner) != (0, 0):
        raise NotImplementedError(
            "preflash's draft steps see all keys of a request; unset "
            "--speculative-draft-window-size"
        )


def verifies_trees(model_runner: Any) -> bool:
    """True if the target verifies drafts with branches, which take a custom mask."""
    algorithm = model_runner.spec_algorithm
    return algorithm.is_ngram() or (
        not algorithm.is_none() and (get_spec().speculative_eagle_topk or 1) > 1
    )


def _configuration_refusal(model_runner: Any) -> str | None:
    dtype, kv_dtype = model_runner.dtype, model_runner.kv_cache_dtype
    algorithm, parallel = model_runner.spec_algorithm, get_parallel()
    if model_runner.use_mla_backend:
        return "preflash has no MLA backend of SGLang; use another --attention-backend"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"preflash serves models in float16 and bfloat16, not in {dtype}"
    if kv_dtype not in (dtype, *FP8_DTYPES) or model_runner.kv_cache_dtype_str == "mxfp8":
        return (
            f"preflash reads a cache in the model's dtype {dtype}, in fp8_e4m3 and in fp8_e5m2, "
            f"not --kv-cache-dtype {model_runner.kv_cache_dtype_str} ({kv_dtype})"
        )
    pool = model_runner.token_to_kv_pool
    layout = getattr(getattr(pool, "full_kv_pool", pool), "kv_cache_layout", "nhd")
    if layout != "nhd":
        return (
            "preflash reads SGLang's cache as rows of tokens (nhd), not in the layout "
            f"{layout}: unset SGLANG_USE_HND_KVCACHE"
        )
    if max(parallel.attn_dcp_size, parallel.attn_cp_size) > 1:
        return "preflash serves no context parallelism in SGLang"
    if model_runner.kv_index_translator.reads_are_translated:
        return "preflash reads cache slots as req_to_token has them; unset --enable-unified-memory"
    if model_runner.attention_chunk_size is not None:
        return "preflash has no chunked local attention in SGLang (attention_chunk_size)"
    known = algorithm.is_eagle() or algorithm.is_standalone() or algorithm.is_ngram()
    if algorithm.is_frozen_kv_mtp() or not (algorithm.is_none() or known):
        return (
            "preflash serves the speculative algorithms EAGLE, EAGLE3, NEXTN, STANDALONE and "
            f"NGRAM in SGLang, not {algorithm.name}"
        )
    return None
