"""TensorRT-LLM's calls over a paged KV cache, preflash.prefill.trtllm_batch_context_with_kv_cache
and preflash.decode.trtllm_batch_decode_with_kv_cache."""

# The API fixes long signatures, so functions are over 80 lines. Their bodies are short:
# check, convert and hand over.

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ._check import dtypes, torch_modes, validate
from ._check.arguments import KvCache, Result
from ._fmha import arguments, direct

__all__ = ["trtllm_batch_context_with_kv_cache", "trtllm_batch_decode_with_kv_cache"]

_NAMES = {"qkv": "query, kv_cache"}


@torch_modes.eager
def trtllm_batch_context_with_kv_cache(
    query: torch.Tensor,
    kv_cache: KvCache,
    workspace_buffer: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: float | torch.Tensor,
    bmm2_scale: float | torch.Tensor,
    batch_size: int,
    cum_seq_lens_q: torch.Tensor,
    cum_seq_lens_kv: torch.Tensor | None,
    window_left: int = -1,
    out: torch.Tensor | None = None,
    out_dtype: str | torch.dtype | None = None,
    o_sf_scale: None = None,
    o_sf_vec_size: None = None,
    kv_layout: str = "HND",
    enable_pdl: bool | None = None,
    sinks: torch.Tensor | Sequence[torch.Tensor] | None = None,
    kv_cache_sf: None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    uses_shared_paged_kv_idx: bool = True,
    causal: bool = True,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
    multi_ctas_kv_counter_buffer: torch.Tensor | None = None,
    use_fp16_softmax: bool | None = None,
    uses_spcompress: bool | None = None,
    backend: str = "auto",
) -> Result:
    """Attention of a batch over a paged KV cache in one call, without plan(), on every GPU from
    SM80 on and on the CPU; see trtllm_fmha_v2_prefill for lengths on the GPU and CUDA graphs.

    Args:
        query: [tokens, num_qo_heads, head_dim].
        kv_cache: [pages, 2, num_kv_heads, page_size, head_dim] with kv_layout "HND", [pages, 2,
            page_size, num_kv_heads, head_dim] with "NHD"; with 1 instead of 2 keys are values; or a
            tuple of two without that dimension. Of query's dtype or, under wider queries, 8 bits.
        block_tables: [batch_size, pages of the longest request] int32.
        seq_lens: [batch_size] int32 or uint32, keys of each request.
        window_left: how many keys left of the diagonal are kept, with causal=True; -1 is all.
        out_dtype: by default that of out, or of query.
        o_sf_scale, o_sf_vec_size, kv_cache_sf: None only.
        cum_seq_lens_kv: not needed and not read: seq_lens says it.
        uses_shared_paged_kv_idx: False: block_tables are [batch_size, 2, pages], of k's pool and of
            v's, which may be one. The pages of v are those of k plus one number. Tables on the GPU
            are waited for, so that such a call cannot be captured.
        causal: keep keys up to the diagonal that ends at the last key.
        lse, return_lse: base 2, [tokens, num_qo_heads] float32; lse is written also without
            return_lse.
        multi_ctas_kv_counter_buffer: not needed, neither read nor written.
        enable_pdl: a permission.
        use_fp16_softmax, uses_spcompress: None or False only.
        backend: "auto", "fa2", "fa3" or "cpu".
        The others are those of trtllm_fmha_v2_prefill.

    Returns:
        out, or (out, lse) with return_lse. Rows of no request are 0 in an out that the call
        allocates, -inf in such an lse, and untouched in the caller's.

    Raises as trtllm_fmha_v2_prefill, and NotImplementedError for options of other kernels.
    """
    given = dict(locals())
    _check_unserved(enable_pdl, kv_cache_sf, multi_ctas_kv_counter_buffer)
    validate.absent(o_sf_scale=o_sf_scale, o_sf_vec_size=o_sf_vec_size)
    if cum_seq_lens_kv is not None:
        validate.is_tensor("cum_seq_lens_kv", cum_seq_lens_kv)
    validate.neutral("use_fp16_softmax", use_fp16_softmax, False)
    validate.neutral("uses_spcompress", uses_spcompress, False)
    if (
        not validate.flag("causal", causal)
        and validate.window_left("window_left", window_left) >= 0
    ):
        raise NotImplementedError(
            f"window_left={window_left} with causal=False: use -1, or "
            "BatchPrefillWithPagedKVCacheWrapper"
        )
    _refuse_nvfp4(out_dtype)
    lengths = direct.lengths_of("seq_lens", seq_lens)
    cache, layout, block_tables = direct.paged_by_tables(
        "kv_cache", kv_cache, kv_layout, block_tables, lengths, uses_shared_paged_kv_idx
    )
    return direct.attend(
        _NAMES, given, causal=causal, qkv=(query, cache), input_layout=layout, seq_lens=lengths,
        block_tables=block_tables, cum_seq_lens_kv=None,
    )  # fmt: skip


@torch_modes.eager
def trtllm_batch_decode_with_kv_cache(
    query: torch.Tensor,
    kv_cache: KvCache,
    workspace_buffer: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    bmm1_scale: float | torch.Tensor = 1.0,
    bmm2_scale: float | torch.Tensor = 1.0,
    window_left: int = -1,
    out: torch.Tensor | None = None,
    out_dtype: str | torch.dtype | None = None,
    o_sf_scale: None = None,
    o_sf_vec_size: None = None,
    sinks: torch.Tensor | Sequence[torch.Tensor] | None = None,
    kv_layout: str = "HND",
    enable_pdl: bool | None = None,
    backend: str = "auto",
    q_len_per_req: int | None = 1,
    o_scale: float | None = 1.0,
    mask: torch.Tensor | None = None,
    max_q_len: int | None = None,
    cum_seq_lens_q: torch.Tensor | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    kv_cache_sf: None = None,
    uses_shared_paged_kv_idx: bool = True,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
    bmm1_scale_log2: torch.Tensor | None = None,
    multi_ctas_kv_counter_buffer: torch.Tensor | None = None,
    enable_block_sparse_attention: bool = False,
    cp_world: int = 1,
    cp_rank: int = 0,
    causal_seqlens_kv_global: None = None,
    bf16q_fp8kv_transform_mode: str | None = None,
    request_order: None = None,
    request_order_plan: None = None,
) -> Result:
    """Attention of one or a few queries per request in one call, without plan(), on every GPU from
    SM80 on and on the CPU; see trtllm_fmha_v2_prefill for lengths on the GPU and CUDA graphs.

    With lengths on the GPU, keys are not split over the machine. With few requests of long
    keys BatchDecodeWithPagedKVCacheWrapper is faster.

    Args:
        query: [batch_size * q_len_per_req, num_qo_heads, head_dim]; the queries of a request are
            causal among themselves.
        kv_cache, block_tables, seq_lens: as in trtllm_batch_context_with_kv_cache.
        max_seq_len: no request has more keys.
        bmm1_scale, bmm2_scale: as in trtllm_fmha_v2_prefill.
        bmm1_scale_log2: one-element tensor, log2(e) times a bmm1_scale that it replaces.
        q_len_per_req: queries of each request; with cum_seq_lens_q 1 or None.
        max_q_len, cum_seq_lens_q: int32 [batch_size + 1], first row of each request, where their
            numbers of queries differ, and the largest.
        o_scale: what 8-bit outputs are to be multiplied by later. bmm2_scale is divided by it
            already: without effect. 1 or None with other outputs.
        mask: [batch_size, q_len_per_req, words] of 16 or 32 bits, a draft tree: bit j of row i
            keeps key j of the request's last q_len_per_req for query i, and every query keeps the
            keys before. None is causal. The host waits for a mask on the GPU; one that is not
            causal also costs a wait for seq_lens and a plan in each call, and cannot be captured
            into a CUDA graph. Not read with backend="trtllm-gen", as in FlashInfer.
        enable_block_sparse_attention, cp_world, cp_rank, causal_seqlens_kv_global, request_order,
        request_order_plan: their defaults only.
        bf16q_fp8kv_transform_mode: None, "k_only" or "separate_kv", without effect.
        The others, the result and the errors are those of trtllm_batch_context_with_kv_cache.
    """
    given = dict(locals())
    _check_unserved(enable_pdl, kv_cache_sf, multi_ctas_kv_counter_buffer)
    validate.absent(
        o_sf_scale=o_sf_scale, o_sf_vec_size=o_sf_vec_size,
        causal_seqlens_kv_global=causal_seqlens_kv_global, request_order=request_order,
        request_order_plan=request_order_plan,
    )  # fmt: skip
    validate.neutral("enable_block_sparse_attention", enable_block_sparse_attention, False)
    validate.neutral("cp_world", cp_world, 1)
    validate.neutral("cp_rank", cp_rank, 0)
    if bf16q_fp8kv_transform_mode is not None:
        validate.one_of(
            "bf16q_fp8kv_transform_mode", bf16q_fp8kv_transform_mode, ("k_only", "separate_kv")
        )
    _refuse_nvfp4(out_dtype)
    q_dtype = validate.is_tensor("query", query).dtype
    _check_o_scale(o_scale, arguments.out_dtype_of(out, out_dtype, q_dtype))
    lengths = direct.lengths_of("seq_lens", seq_lens)
    batch_size, draft_mask = lengths.numel(), None
    if cum_seq_lens_q is None:
        max_q_len = _uniform(max_q_len, q_len_per_req, query, batch_size)
        cum_seq_lens_q = direct.uniform_indptr(batch_size, max_q_len, lengths)
        if mask is not None and backend != "trtllm-gen":
            draft_mask = _draft_mask(mask, batch_size, max_q_len)
    elif mask is not None:
        raise NotImplementedError("mask with cum_seq_lens_q: leave it None")
    elif max_q_len is None or q_len_per_req not in (None, 1):
        raise ValueError(
            f"cum_seq_lens_q is given with max_q_len={max_q_len} and q_len_per_req="
            f"{q_len_per_req}; must be with max_q_len, and without q_len_per_req"
        )
    if bmm1_scale_log2 is not None:
        bmm1_scale = validate.scale("bmm1_scale_log2", bmm1_scale_log2) * math.log(2.0)
    cache, layout, block_tables = direct.paged_by_tables(
        "kv_cache", kv_cache, kv_layout, block_tables, lengths, uses_shared_paged_kv_idx
    )
    return direct.attend(
        {**_NAMES, "max_kv_len": "max_seq_len"}, given, causal=True, qkv=(query, cache),
        input_layout=layout, seq_lens=lengths, max_q_len=max_q_len, max_kv_len=max_seq_len,
        bmm1_scale=bmm1_scale, batch_size=batch_size, cum_seq_lens_q=cum_seq_lens_q,
        block_tables=block_tables, draft_mask=draft_mask,
    )  # fmt: skip


def _check_unserved(enable_pdl: Any, kv_cache_sf: Any, counters: Any) -> None:
    validate.permission("enable_pdl", enable_pdl)
    validate.absent(kv_cache_sf=kv_cache_sf)
    if counters is not None:
        validate.is_tensor("multi_ctas_kv_counter_buffer", counters)


def _refuse_nvfp4(out_dtype: Any) -> None:
    if out_dtype == "nvfp4":
        raise NotImplementedError("out_dtype='nvfp4': 4 bits are not served; use 8 or 16")


def _uniform(max_q_len: Any, q_len_per_req: Any, query: Any, batch_size: int) -> int:
    if q_len_per_req is None:
        raise ValueError("q_len_per_req=None: must be given without cum_seq_lens_q")
    each = validate.size("q_len_per_req", q_len_per_req)
    if max_q_len is not None and validate.size("max_q_len", max_q_len) < each:
        raise ValueError(f"max_q_len={max_q_len}: every request has q_len_per_req = {each} queries")
    rows = validate.is_tensor("query", query).shape[0]
    if rows < batch_size * each:
        raise ValueError(
            f"query has {rows} rows; seq_lens of {batch_size} requests with q_len_per_req = {each} "
            f"need {batch_size * each}"
        )
    return each


def _draft_mask(mask: Any, batch_size: int, q_len: int) -> torch.Tensor | None:
    """Unpacks a mask to [batch_size, q_len, q_len] bool on the CPU. Returns None for the causal
    mask, which kernels compute from lengths."""
    mask = validate.tensor("mask", validate.is_tensor("mask", mask))
    if mask.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "mask is read on the host, which a capture does not allow; leave it None: the queries "
            "of a request are causal among themselves"
        )
    if mask.dim() != 3 or mask.shape[:2] != (batch_size, q_len) or mask.is_floating_point():
        raise ValueError(
            f"mask is {mask.dtype} and has shape {tuple(mask.shape)}; must be integers "
            f"[batch_size, q_len_per_req, words] = [{batch_size}, {q_len}, words]"
        )
    mask = mask.cpu().contiguous().view(torch.uint8)
    bits = ((mask[..., None] >> torch.arange(8, dtype=torch.uint8, device="cpu")) & 1).flatten(-2)
    if bits.shape[-1] < q_len:
        raise ValueError(
            f"mask has {bits.shape[-1]} bits for each query; must have q_len_per_req = {q_len}"
        )
    kept = bits[..., :q_len].to(torch.bool)
    causal = torch.ones(q_len, q_len, dtype=torch.bool, device="cpu").tril()
    if torch.equal(kept, causal.expand_as(kept)):
        return None
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "mask is not causal, so that this call makes a plan, which a capture does not allow; "
            "use BatchPrefillWithPagedKVCacheWrapper with use_cuda_graph=True and custom_mask"
        )
    return kept


def _check_o_scale(o_scale: Any, wanted: torch.dtype) -> None:
    scale = 1.0 if o_scale is None else validate.real("o_scale", o_scale)
    if scale != 1.0 and (wanted not in dtypes.FP8_DTYPES or not scale > 0.0):
        raise ValueError(
            f"o_scale={o_scale} with an output of {wanted}: must be positive, and 1 or None where "
            "the output has more than 8 bits"
        )
