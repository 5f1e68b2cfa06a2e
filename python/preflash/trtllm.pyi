# Written by cmake/codegen/stubs.py (`make stubs`).
# fmt: off
# mypy: disable-error-code="assignment, override"
# pyright: reportAssignmentType=false, reportIncompatibleMethodOverride=false

from collections.abc import Sequence
from typing import Literal, overload

import torch

from ._check.arguments import KvCache, Result

__all__ = [
    "trtllm_batch_context_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache",
]

@overload
def trtllm_batch_context_with_kv_cache(
    query: torch.Tensor, kv_cache: KvCache, workspace_buffer: torch.Tensor,
    block_tables: torch.Tensor, seq_lens: torch.Tensor, max_q_len: int, max_kv_len: int,
    bmm1_scale: float | torch.Tensor, bmm2_scale: float | torch.Tensor, batch_size: int,
    cum_seq_lens_q: torch.Tensor, cum_seq_lens_kv: torch.Tensor | None, window_left: int = -1,
    out: torch.Tensor | None = None, out_dtype: str | torch.dtype | None = None,
    o_sf_scale: None = None, o_sf_vec_size: None = None, kv_layout: str = "HND",
    enable_pdl: bool | None = None, sinks: torch.Tensor | Sequence[torch.Tensor] | None = None,
    kv_cache_sf: None = None, skip_softmax_threshold_scale_factor: float | None = None,
    uses_shared_paged_kv_idx: bool = True, causal: bool = True, lse: torch.Tensor | None = None,
    return_lse: Literal[False] = False, multi_ctas_kv_counter_buffer: torch.Tensor | None = None,
    use_fp16_softmax: bool | None = None, uses_spcompress: bool | None = None,
    backend: str = "auto",
) -> torch.Tensor: ...
@overload
def trtllm_batch_context_with_kv_cache(
    query: torch.Tensor, kv_cache: KvCache, workspace_buffer: torch.Tensor,
    block_tables: torch.Tensor, seq_lens: torch.Tensor, max_q_len: int, max_kv_len: int,
    bmm1_scale: float | torch.Tensor, bmm2_scale: float | torch.Tensor, batch_size: int,
    cum_seq_lens_q: torch.Tensor, cum_seq_lens_kv: torch.Tensor | None, window_left: int = -1,
    out: torch.Tensor | None = None, out_dtype: str | torch.dtype | None = None,
    o_sf_scale: None = None, o_sf_vec_size: None = None, kv_layout: str = "HND",
    enable_pdl: bool | None = None, sinks: torch.Tensor | Sequence[torch.Tensor] | None = None,
    kv_cache_sf: None = None, skip_softmax_threshold_scale_factor: float | None = None,
    uses_shared_paged_kv_idx: bool = True, causal: bool = True, lse: torch.Tensor | None = None, *,
    return_lse: Literal[True], multi_ctas_kv_counter_buffer: torch.Tensor | None = None,
    use_fp16_softmax: bool | None = None, uses_spcompress: bool | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def trtllm_batch_context_with_kv_cache(
    query: torch.Tensor, kv_cache: KvCache, workspace_buffer: torch.Tensor,
    block_tables: torch.Tensor, seq_lens: torch.Tensor, max_q_len: int, max_kv_len: int,
    bmm1_scale: float | torch.Tensor, bmm2_scale: float | torch.Tensor, batch_size: int,
    cum_seq_lens_q: torch.Tensor, cum_seq_lens_kv: torch.Tensor | None, window_left: int = -1,
    out: torch.Tensor | None = None, out_dtype: str | torch.dtype | None = None,
    o_sf_scale: None = None, o_sf_vec_size: None = None, kv_layout: str = "HND",
    enable_pdl: bool | None = None, sinks: torch.Tensor | Sequence[torch.Tensor] | None = None,
    kv_cache_sf: None = None, skip_softmax_threshold_scale_factor: float | None = None,
    uses_shared_paged_kv_idx: bool = True, causal: bool = True, lse: torch.Tensor | None = None, *,
    return_lse: bool, multi_ctas_kv_counter_buffer: torch.Tensor | None = None,
    use_fp16_softmax: bool | None = None, uses_spcompress: bool | None = None,
    backend: str = "auto",
) -> Result: ...
@overload
def trtllm_batch_context_with_kv_cache(
    query: torch.Tensor, kv_cache: KvCache, workspace_buffer: torch.Tensor,
    block_tables: torch.Tensor, seq_lens: torch.Tensor, max_q_len: int, max_kv_len: int,
    bmm1_scale: float | torch.Tensor, bmm2_scale: float | torch.Tensor, batch_size: int,
    cum_seq_lens_q: torch.Tensor, cum_seq_lens_kv: torch.Tensor | None, window_left: int,
    out: torch.Tensor | None, out_dtype: str | torch.dtype | None, o_sf_scale: None,
    o_sf_vec_size: None, kv_layout: str, enable_pdl: bool | None,
    sinks: torch.Tensor | Sequence[torch.Tensor] | None, kv_cache_sf: None,
    skip_softmax_threshold_scale_factor: float | None, uses_shared_paged_kv_idx: bool, causal: bool,
    lse: torch.Tensor | None, return_lse: Literal[True],
    multi_ctas_kv_counter_buffer: torch.Tensor | None = None, use_fp16_softmax: bool | None = None,
    uses_spcompress: bool | None = None, backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def trtllm_batch_context_with_kv_cache(
    query: torch.Tensor, kv_cache: KvCache, workspace_buffer: torch.Tensor,
    block_tables: torch.Tensor, seq_lens: torch.Tensor, max_q_len: int, max_kv_len: int,
    bmm1_scale: float | torch.Tensor, bmm2_scale: float | torch.Tensor, batch_size: int,
    cum_seq_lens_q: torch.Tensor, cum_seq_lens_kv: torch.Tensor | None, window_left: int,
    out: torch.Tensor | None, out_dtype: str | torch.dtype | None, o_sf_scale: None,
    o_sf_vec_size: None, kv_layout: str, enable_pdl: bool | None,
    sinks: torch.Tensor | Sequence[torch.Tensor] | None, kv_cache_sf: None,
    skip_softmax_threshold_scale_factor: float | None, uses_shared_paged_kv_idx: bool, causal: bool,
    lse: torch.Tensor | None, return_lse: bool,
    multi_ctas_kv_counter_buffer: torch.Tensor | None = None, use_fp16_softmax: bool | None = None,
    uses_spcompress: bool | None = None, backend: str = "auto",
) -> Result: ...

@overload
def trtllm_batch_decode_with_kv_cache(
    query: torch.Tensor, kv_cache: KvCache, workspace_buffer: torch.Tensor,
    block_tables: torch.Tensor, seq_lens: torch.Tensor, max_seq_len: int,
    bmm1_scale: float | torch.Tensor = 1.0, bmm2_scale: float | torch.Tensor = 1.0,
    window_left: int = -1, out: torch.Tensor | None = None,
    out_dtype: str | torch.dtype | None = None, o_sf_scale: None = None, o_sf_vec_size: None = None,
    sinks: torch.Tensor | Sequence[torch.Tensor] | None = None, kv_layout: str = "HND",
    enable_pdl: bool | None = None, backend: str = "auto", q_len_per_req: int | None = 1,
    o_scale: float | None = 1.0, mask: torch.Tensor | None = None, max_q_len: int | None = None,
    cum_seq_lens_q: torch.Tensor | None = None,
    skip_softmax_threshold_scale_factor: float | None = None, kv_cache_sf: None = None,
    uses_shared_paged_kv_idx: bool = True, lse: torch.Tensor | None = None,
    return_lse: Literal[False] = False, bmm1_scale_log2: torch.Tensor | None = None,
    multi_ctas_kv_counter_buffer: torch.Tensor | None = None,
    enable_block_sparse_attention: bool = False, cp_world: int = 1, cp_rank: int = 0,
    causal_seqlens_kv_global: None = None, bf16q_fp8kv_transform_mode: str | None = None,
    request_order: None = None, request_order_plan: None = None,
) -> torch.Tensor: ...
@overload
def trtllm_batch_decode_with_kv_cache(
    query: torch.Tensor, kv_cache: KvCache, workspace_buffer: torch.Tensor,
    block_tables: torch.Tensor, seq_lens: torch.Tensor, max_seq_len: int,
    bmm1_scale: float | torch.Tensor = 1.0, bmm2_scale: float | torch.Tensor = 1.0,
    window_left: int = -1, out: torch.Tensor | None = None,
    out_dtype: str | torch.dtype | None = None, o_sf_scale: None = None, o_sf_vec_size: None = None,
    sinks: torch.Tensor | Sequence[torch.Tensor] | None = None, kv_layout: str = "HND",
    enable_pdl: bool | None = None, backend: str = "auto", q_len_per_req: int | None = 1,
    o_scale: float | None = 1.0, mask: torch.Tensor | None = None, max_q_len: int | None = None,
    cum_seq_lens_q: torch.Tensor | None = None,
    skip_softmax_threshold_scale_factor: float | None = None, kv_cache_sf: None = None,
    uses_shared_paged_kv_idx: bool = True, lse: torch.Tensor | None = None, *,
    return_lse: Literal[True], bmm1_scale_log2: torch.Tensor | None = None,
    multi_ctas_kv_counter_buffer: torch.Tensor | None = None,
    enable_block_sparse_attention: bool = False, cp_world: int = 1, cp_rank: int = 0,
    causal_seqlens_kv_global: None = None, bf16q_fp8kv_transform_mode: str | None = None,
    request_order: None = None, request_order_plan: None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def trtllm_batch_decode_with_kv_cache(
    query: torch.Tensor, kv_cache: KvCache, workspace_buffer: torch.Tensor,
    block_tables: torch.Tensor, seq_lens: torch.Tensor, max_seq_len: int,
    bmm1_scale: float | torch.Tensor = 1.0, bmm2_scale: float | torch.Tensor = 1.0,
    window_left: int = -1, out: torch.Tensor | None = None,
    out_dtype: str | torch.dtype | None = None, o_sf_scale: None = None, o_sf_vec_size: None = None,
    sinks: torch.Tensor | Sequence[torch.Tensor] | None = None, kv_layout: str = "HND",
    enable_pdl: bool | None = None, backend: str = "auto", q_len_per_req: int | None = 1,
    o_scale: float | None = 1.0, mask: torch.Tensor | None = None, max_q_len: int | None = None,
    cum_seq_lens_q: torch.Tensor | None = None,
    skip_softmax_threshold_scale_factor: float | None = None, kv_cache_sf: None = None,
    uses_shared_paged_kv_idx: bool = True, lse: torch.Tensor | None = None, *, return_lse: bool,
    bmm1_scale_log2: torch.Tensor | None = None,
    multi_ctas_kv_counter_buffer: torch.Tensor | None = None,
    enable_block_sparse_attention: bool = False, cp_world: int = 1, cp_rank: int = 0,
    causal_seqlens_kv_global: None = None, bf16q_fp8kv_transform_mode: str | None = None,
    request_order: None = None, request_order_plan: None = None,
) -> Result: ...
@overload
def trtllm_batch_decode_with_kv_cache(
    query: torch.Tensor, kv_cache: KvCache, workspace_buffer: torch.Tensor,
    block_tables: torch.Tensor, seq_lens: torch.Tensor, max_seq_len: int,
    bmm1_scale: float | torch.Tensor, bmm2_scale: float | torch.Tensor, window_left: int,
    out: torch.Tensor | None, out_dtype: str | torch.dtype | None, o_sf_scale: None,
    o_sf_vec_size: None, sinks: torch.Tensor | Sequence[torch.Tensor] | None, kv_layout: str,
    enable_pdl: bool | None, backend: str, q_len_per_req: int | None, o_scale: float | None,
    mask: torch.Tensor | None, max_q_len: int | None, cum_seq_lens_q: torch.Tensor | None,
    skip_softmax_threshold_scale_factor: float | None, kv_cache_sf: None,
    uses_shared_paged_kv_idx: bool, lse: torch.Tensor | None, return_lse: Literal[True],
    bmm1_scale_log2: torch.Tensor | None = None,
    multi_ctas_kv_counter_buffer: torch.Tensor | None = None,
    enable_block_sparse_attention: bool = False, cp_world: int = 1, cp_rank: int = 0,
    causal_seqlens_kv_global: None = None, bf16q_fp8kv_transform_mode: str | None = None,
    request_order: None = None, request_order_plan: None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def trtllm_batch_decode_with_kv_cache(
    query: torch.Tensor, kv_cache: KvCache, workspace_buffer: torch.Tensor,
    block_tables: torch.Tensor, seq_lens: torch.Tensor, max_seq_len: int,
    bmm1_scale: float | torch.Tensor, bmm2_scale: float | torch.Tensor, window_left: int,
    out: torch.Tensor | None, out_dtype: str | torch.dtype | None, o_sf_scale: None,
    o_sf_vec_size: None, sinks: torch.Tensor | Sequence[torch.Tensor] | None, kv_layout: str,
    enable_pdl: bool | None, backend: str, q_len_per_req: int | None, o_scale: float | None,
    mask: torch.Tensor | None, max_q_len: int | None, cum_seq_lens_q: torch.Tensor | None,
    skip_softmax_threshold_scale_factor: float | None, kv_cache_sf: None,
    uses_shared_paged_kv_idx: bool, lse: torch.Tensor | None, return_lse: bool,
    bmm1_scale_log2: torch.Tensor | None = None,
    multi_ctas_kv_counter_buffer: torch.Tensor | None = None,
    enable_block_sparse_attention: bool = False, cp_world: int = 1, cp_rank: int = 0,
    causal_seqlens_kv_global: None = None, bf16q_fp8kv_transform_mode: str | None = None,
    request_order: None = None, request_order_plan: None = None,
) -> Result: ...
