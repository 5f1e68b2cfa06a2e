# Written by cmake/codegen/stubs.py (`make stubs`).
# fmt: off
# mypy: disable-error-code="assignment, override"
# pyright: reportAssignmentType=false, reportIncompatibleMethodOverride=false

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch

from ._check.arguments import KvCache, Result, Scale
from .cudnn import cudnn_batch_prefill_with_kv_cache
from .fmha_v2 import fmha_varlen, trtllm_fmha_v2_prefill
from .trtllm import trtllm_batch_context_with_kv_cache

__all__ = [
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "cudnn_batch_prefill_with_kv_cache",
    "fmha_varlen",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
    "trtllm_batch_context_with_kv_cache",
    "trtllm_fmha_v2_prefill",
]

@overload
def single_prefill_with_kv_cache(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, custom_mask: torch.Tensor | None = None,
    packed_custom_mask: torch.Tensor | None = None, causal: bool = False, kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE", allow_fp16_qk_reduction: bool = False,
    sm_scale: float | torch.Tensor | None = None, window_left: int = -1,
    logits_soft_cap: float | None = None, rope_scale: float | None = None,
    rope_theta: float | None = None, *, out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None, sinks: torch.Tensor | None = None,
    scale_q: torch.Tensor | None = None, scale_k: torch.Tensor | None = None,
    scale_v: torch.Tensor | None = None, kv_cache_sf: None = None,
    o_data_type: str | torch.dtype | None = None, o_dtype: str | torch.dtype | None = None,
    q_scale: float | torch.Tensor | None = None, k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None, backend: str = "auto",
    batch_invariant: bool = False, use_fp16_qk_reduction: bool | None = None,
    q_quantization: str = "none", enable_pdl: bool | None = None,
    return_lse: Literal[False] = False, lse_base: str = "log2", lse_layout: str = "NH",
) -> torch.Tensor: ...
@overload
def single_prefill_with_kv_cache(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, custom_mask: torch.Tensor | None = None,
    packed_custom_mask: torch.Tensor | None = None, causal: bool = False, kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE", allow_fp16_qk_reduction: bool = False,
    sm_scale: float | torch.Tensor | None = None, window_left: int = -1,
    logits_soft_cap: float | None = None, rope_scale: float | None = None,
    rope_theta: float | None = None, *, out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None, sinks: torch.Tensor | None = None,
    scale_q: torch.Tensor | None = None, scale_k: torch.Tensor | None = None,
    scale_v: torch.Tensor | None = None, kv_cache_sf: None = None,
    o_data_type: str | torch.dtype | None = None, o_dtype: str | torch.dtype | None = None,
    q_scale: float | torch.Tensor | None = None, k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None, backend: str = "auto",
    batch_invariant: bool = False, use_fp16_qk_reduction: bool | None = None,
    q_quantization: str = "none", enable_pdl: bool | None = None, return_lse: Literal[True],
    lse_base: str = "log2", lse_layout: str = "NH",
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def single_prefill_with_kv_cache(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, custom_mask: torch.Tensor | None = None,
    packed_custom_mask: torch.Tensor | None = None, causal: bool = False, kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE", allow_fp16_qk_reduction: bool = False,
    sm_scale: float | torch.Tensor | None = None, window_left: int = -1,
    logits_soft_cap: float | None = None, rope_scale: float | None = None,
    rope_theta: float | None = None, *, out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None, sinks: torch.Tensor | None = None,
    scale_q: torch.Tensor | None = None, scale_k: torch.Tensor | None = None,
    scale_v: torch.Tensor | None = None, kv_cache_sf: None = None,
    o_data_type: str | torch.dtype | None = None, o_dtype: str | torch.dtype | None = None,
    q_scale: float | torch.Tensor | None = None, k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None, backend: str = "auto",
    batch_invariant: bool = False, use_fp16_qk_reduction: bool | None = None,
    q_quantization: str = "none", enable_pdl: bool | None = None, return_lse: bool,
    lse_base: str = "log2", lse_layout: str = "NH",
) -> Result: ...

@overload
def single_prefill_with_kv_cache_return_lse(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, custom_mask: torch.Tensor | None = None,
    packed_custom_mask: torch.Tensor | None = None, causal: bool = False, kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE", allow_fp16_qk_reduction: bool = False,
    sm_scale: float | torch.Tensor | None = None, window_left: int = -1,
    logits_soft_cap: float | None = None, rope_scale: float | None = None,
    rope_theta: float | None = None, *, out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None, sinks: torch.Tensor | None = None,
    scale_q: torch.Tensor | None = None, scale_k: torch.Tensor | None = None,
    scale_v: torch.Tensor | None = None, kv_cache_sf: None = None,
    o_data_type: str | torch.dtype | None = None, o_dtype: str | torch.dtype | None = None,
    q_scale: float | torch.Tensor | None = None, k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None, backend: str = "auto",
    batch_invariant: bool = False, use_fp16_qk_reduction: bool | None = None,
    q_quantization: str = "none", enable_pdl: bool | None = None, return_lse: Literal[True] = True,
    lse_base: str = "log2", lse_layout: str = "NH",
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def single_prefill_with_kv_cache_return_lse(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, custom_mask: torch.Tensor | None = None,
    packed_custom_mask: torch.Tensor | None = None, causal: bool = False, kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE", allow_fp16_qk_reduction: bool = False,
    sm_scale: float | torch.Tensor | None = None, window_left: int = -1,
    logits_soft_cap: float | None = None, rope_scale: float | None = None,
    rope_theta: float | None = None, *, out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None, sinks: torch.Tensor | None = None,
    scale_q: torch.Tensor | None = None, scale_k: torch.Tensor | None = None,
    scale_v: torch.Tensor | None = None, kv_cache_sf: None = None,
    o_data_type: str | torch.dtype | None = None, o_dtype: str | torch.dtype | None = None,
    q_scale: float | torch.Tensor | None = None, k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None, backend: str = "auto",
    batch_invariant: bool = False, use_fp16_qk_reduction: bool | None = None,
    q_quantization: str = "none", enable_pdl: bool | None = None, return_lse: Literal[False],
    lse_base: str = "log2", lse_layout: str = "NH",
) -> torch.Tensor: ...
@overload
def single_prefill_with_kv_cache_return_lse(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, custom_mask: torch.Tensor | None = None,
    packed_custom_mask: torch.Tensor | None = None, causal: bool = False, kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE", allow_fp16_qk_reduction: bool = False,
    sm_scale: float | torch.Tensor | None = None, window_left: int = -1,
    logits_soft_cap: float | None = None, rope_scale: float | None = None,
    rope_theta: float | None = None, *, out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None, sinks: torch.Tensor | None = None,
    scale_q: torch.Tensor | None = None, scale_k: torch.Tensor | None = None,
    scale_v: torch.Tensor | None = None, kv_cache_sf: None = None,
    o_data_type: str | torch.dtype | None = None, o_dtype: str | torch.dtype | None = None,
    q_scale: float | torch.Tensor | None = None, k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None, backend: str = "auto",
    batch_invariant: bool = False, use_fp16_qk_reduction: bool | None = None,
    q_quantization: str = "none", enable_pdl: bool | None = None, return_lse: bool,
    lse_base: str = "log2", lse_layout: str = "NH",
) -> Result: ...

class BatchPrefillWithPagedKVCacheWrapper:
    def __init__(
        self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD",
        use_cuda_graph: bool = False, qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None, qk_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto", *, mask_indptr_buf: torch.Tensor | None = None,
        jit_args: Sequence[Any] | None = None, jit_kwargs: dict[str, Any] | None = None,
        variant_owns_mask: bool = False,
    ) -> None: ...
    def plan(
        self, qo_indptr: torch.Tensor, paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor, paged_kv_last_page_len: torch.Tensor, num_qo_heads: int,
        num_kv_heads: int, head_dim: int, page_size: int, custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None, causal: bool = False,
        pos_encoding_mode: str = "NONE", allow_fp16_qk_reduction: bool = False,
        sm_scale: float | torch.Tensor | None = None, window_left: int = -1,
        logits_soft_cap: float | None = None, rope_scale: float | None = None,
        rope_theta: float | None = None, q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None, non_blocking: bool = True, *,
        head_dim_qk: int | None = None, head_dim_vo: int | None = None,
        o_data_type: str | torch.dtype | None = None, o_dtype: str | torch.dtype | None = None,
        fixed_split_size: int | None = None, disable_split_kv: bool = False,
        batch_invariant: bool = False, use_fp16_qk_reduction: bool | None = None,
        q_quantization: str = "none", seq_lens: torch.Tensor | None = None,
        lengths_are_upper_bounds: bool = False, seq_lens_q: torch.Tensor | None = None,
        block_tables: torch.Tensor | None = None, max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None, uniform_q_len: int | None = None,
        prefix_len_ptr: torch.Tensor | None = None,
        token_pos_in_items_ptr: torch.Tensor | None = None, token_pos_in_items_len: int = 0,
        max_item_len_ptr: torch.Tensor | None = None,
    ) -> None: ...
    def begin_forward(
        self, qo_indptr: torch.Tensor, paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor, paged_kv_last_page_len: torch.Tensor, num_qo_heads: int,
        num_kv_heads: int, head_dim: int, page_size: int, custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None, causal: bool = False,
        pos_encoding_mode: str = "NONE", allow_fp16_qk_reduction: bool = False,
        sm_scale: float | torch.Tensor | None = None, window_left: int = -1,
        logits_soft_cap: float | None = None, rope_scale: float | None = None,
        rope_theta: float | None = None, q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None, non_blocking: bool = True, *,
        head_dim_qk: int | None = None, head_dim_vo: int | None = None,
        o_data_type: str | torch.dtype | None = None, o_dtype: str | torch.dtype | None = None,
        fixed_split_size: int | None = None, disable_split_kv: bool = False,
        batch_invariant: bool = False, use_fp16_qk_reduction: bool | None = None,
        q_quantization: str = "none", seq_lens: torch.Tensor | None = None,
        lengths_are_upper_bounds: bool = False, seq_lens_q: torch.Tensor | None = None,
        block_tables: torch.Tensor | None = None, max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None, uniform_q_len: int | None = None,
        prefix_len_ptr: torch.Tensor | None = None,
        token_pos_in_items_ptr: torch.Tensor | None = None, token_pos_in_items_len: int = 0,
        max_item_len_ptr: torch.Tensor | None = None,
    ) -> None: ...
    def workspace_size(
        self, qo_indptr: torch.Tensor, paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor, paged_kv_last_page_len: torch.Tensor, num_qo_heads: int,
        num_kv_heads: int, head_dim: int, page_size: int, custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None, causal: bool = False,
        pos_encoding_mode: str = "NONE", allow_fp16_qk_reduction: bool = False,
        sm_scale: float | torch.Tensor | None = None, window_left: int = -1,
        logits_soft_cap: float | None = None, rope_scale: float | None = None,
        rope_theta: float | None = None, q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None, non_blocking: bool = True, *,
        head_dim_qk: int | None = None, head_dim_vo: int | None = None,
        o_data_type: str | torch.dtype | None = None, o_dtype: str | torch.dtype | None = None,
        fixed_split_size: int | None = None, disable_split_kv: bool = False,
        batch_invariant: bool = False, use_fp16_qk_reduction: bool | None = None,
        q_quantization: str = "none", seq_lens: torch.Tensor | None = None,
        lengths_are_upper_bounds: bool = False, seq_lens_q: torch.Tensor | None = None,
        block_tables: torch.Tensor | None = None, max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None, uniform_q_len: int | None = None,
        prefix_len_ptr: torch.Tensor | None = None,
        token_pos_in_items_ptr: torch.Tensor | None = None, token_pos_in_items_len: int = 0,
        max_item_len_ptr: torch.Tensor | None = None,
    ) -> tuple[int, int]: ...
    @overload
    def run(
        self, q: torch.Tensor, paged_kv_cache: KvCache, k_scale: Scale = None,
        v_scale: Scale = None, return_lse: Literal[False] = False, *args: Any,
        q_scale: Scale = None, out: torch.Tensor | None = None, lse: torch.Tensor | None = None,
        lse_base: str = "log2", lse_layout: str = "NH", sinks: torch.Tensor | None = None,
        scale_q: torch.Tensor | None = None, scale_k: torch.Tensor | None = None,
        scale_v: torch.Tensor | None = None, window_left: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None, enable_pdl: bool | None = None,
        kv_cache_sf: torch.Tensor | None = None, o_scale: float | None = None,
        use_fp16_softmax: bool | None = None, uses_spcompress: bool | None = None,
    ) -> torch.Tensor: ...
    @overload
    def run(
        self, q: torch.Tensor, paged_kv_cache: KvCache, k_scale: Scale = None,
        v_scale: Scale = None, *, return_lse: Literal[True], q_scale: Scale = None,
        out: torch.Tensor | None = None, lse: torch.Tensor | None = None, lse_base: str = "log2",
        lse_layout: str = "NH", sinks: torch.Tensor | None = None,
        scale_q: torch.Tensor | None = None, scale_k: torch.Tensor | None = None,
        scale_v: torch.Tensor | None = None, window_left: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None, enable_pdl: bool | None = None,
        kv_cache_sf: torch.Tensor | None = None, o_scale: float | None = None,
        use_fp16_softmax: bool | None = None, uses_spcompress: bool | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
    @overload
    def run(
        self, q: torch.Tensor, paged_kv_cache: KvCache, k_scale: Scale = None,
        v_scale: Scale = None, *, return_lse: bool, q_scale: Scale = None,
        out: torch.Tensor | None = None, lse: torch.Tensor | None = None, lse_base: str = "log2",
        lse_layout: str = "NH", sinks: torch.Tensor | None = None,
        scale_q: torch.Tensor | None = None, scale_k: torch.Tensor | None = None,
        scale_v: torch.Tensor | None = None, window_left: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None, enable_pdl: bool | None = None,
        kv_cache_sf: torch.Tensor | None = None, o_scale: float | None = None,
        use_fp16_softmax: bool | None = None, uses_spcompress: bool | None = None,
    ) -> Result: ...
    @overload
    def run(
        self, q: torch.Tensor, paged_kv_cache: KvCache, k_scale: Scale, v_scale: Scale,
        return_lse: Literal[True], *args: Any, q_scale: Scale = None,
        out: torch.Tensor | None = None, lse: torch.Tensor | None = None, lse_base: str = "log2",
        lse_layout: str = "NH", sinks: torch.Tensor | None = None,
        scale_q: torch.Tensor | None = None, scale_k: torch.Tensor | None = None,
        scale_v: torch.Tensor | None = None, window_left: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None, enable_pdl: bool | None = None,
        kv_cache_sf: torch.Tensor | None = None, o_scale: float | None = None,
        use_fp16_softmax: bool | None = None, uses_spcompress: bool | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
    @overload
    def run(
        self, q: torch.Tensor, paged_kv_cache: KvCache, k_scale: Scale, v_scale: Scale,
        return_lse: bool, *args: Any, q_scale: Scale = None, out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None, lse_base: str = "log2", lse_layout: str = "NH",
        sinks: torch.Tensor | None = None, scale_q: torch.Tensor | None = None,
        scale_k: torch.Tensor | None = None, scale_v: torch.Tensor | None = None,
        window_left: int | None = None, skip_softmax_threshold_scale_factor: float | None = None,
        enable_pdl: bool | None = None, kv_cache_sf: torch.Tensor | None = None,
        o_scale: float | None = None, use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None,
    ) -> Result: ...
    def run_return_lse(
        self, q: torch.Tensor, paged_kv_cache: KvCache, k_scale: Scale = None,
        v_scale: Scale = None, *, q_scale: Scale = None, out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None, lse_base: str = "log2", lse_layout: str = "NH",
        sinks: torch.Tensor | None = None, scale_q: torch.Tensor | None = None,
        scale_k: torch.Tensor | None = None, scale_v: torch.Tensor | None = None,
        window_left: int | None = None, skip_softmax_threshold_scale_factor: float | None = None,
        enable_pdl: bool | None = None, kv_cache_sf: torch.Tensor | None = None,
        o_scale: float | None = None, use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
    def forward(
        self, q: torch.Tensor, paged_kv_cache: KvCache, causal: bool = False,
        pos_encoding_mode: str = "NONE", use_fp16_qk_reduction: bool = False,
        k_scale: float | torch.Tensor | None = None, v_scale: float | torch.Tensor | None = None,
        window_left: int = -1, logits_soft_cap: float | None = None,
        sm_scale: float | torch.Tensor | None = None, rope_scale: float | None = None,
        rope_theta: float | None = None, *, allow_fp16_qk_reduction: bool | None = None,
    ) -> torch.Tensor: ...
    def forward_return_lse(
        self, q: torch.Tensor, paged_kv_cache: KvCache, causal: bool = False,
        pos_encoding_mode: str = "NONE", use_fp16_qk_reduction: bool = False,
        k_scale: float | torch.Tensor | None = None, v_scale: float | torch.Tensor | None = None,
        window_left: int = -1, logits_soft_cap: float | None = None,
        sm_scale: float | torch.Tensor | None = None, rope_scale: float | None = None,
        rope_theta: float | None = None, *, allow_fp16_qk_reduction: bool | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
    def prewarm_paged_kv_stride_variant(self, variant: str = "independent") -> None: ...
    def end_forward(self) -> None: ...
    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor,
    ) -> None: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def is_cuda_graph_enabled(self) -> bool: ...
    @property
    def variant(self) -> str | None: ...

class BatchPrefillWithRaggedKVCacheWrapper:
    def __init__(
        self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD",
        use_cuda_graph: bool = False, qo_indptr_buf: torch.Tensor | None = None,
        kv_indptr_buf: torch.Tensor | None = None, custom_mask_buf: torch.Tensor | None = None,
        qk_indptr_buf: torch.Tensor | None = None, backend: str = "auto", *,
        mask_indptr_buf: torch.Tensor | None = None, jit_args: Sequence[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None, variant_owns_mask: bool = False,
    ) -> None: ...
    def plan(
        self, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, num_qo_heads: int,
        num_kv_heads: int, head_dim: int, custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None, causal: bool = False,
        pos_encoding_mode: str = "NONE", allow_fp16_qk_reduction: bool = False,
        window_left: int = -1, logits_soft_cap: float | None = None,
        sm_scale: float | torch.Tensor | None = None, rope_scale: float | None = None,
        rope_theta: float | None = None, q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None, *, v_indptr: torch.Tensor | None = None,
        o_indptr: torch.Tensor | None = None, head_dim_qk: int | None = None,
        head_dim_vo: int | None = None, o_data_type: str | torch.dtype | None = None,
        o_dtype: str | torch.dtype | None = None, fixed_split_size: int | None = None,
        disable_split_kv: bool = False, batch_invariant: bool = False, non_blocking: bool = True,
        use_fp16_qk_reduction: bool | None = None, q_quantization: str = "none",
        seq_lens: torch.Tensor | None = None, lengths_are_upper_bounds: bool = False,
        seq_lens_q: torch.Tensor | None = None, max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None, uniform_q_len: int | None = None,
        prefix_len_ptr: torch.Tensor | None = None,
        token_pos_in_items_ptr: torch.Tensor | None = None, token_pos_in_items_len: int = 0,
        max_item_len_ptr: torch.Tensor | None = None,
    ) -> None: ...
    def begin_forward(
        self, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, num_qo_heads: int,
        num_kv_heads: int, head_dim: int, custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None, causal: bool = False,
        pos_encoding_mode: str = "NONE", allow_fp16_qk_reduction: bool = False,
        window_left: int = -1, logits_soft_cap: float | None = None,
        sm_scale: float | torch.Tensor | None = None, rope_scale: float | None = None,
        rope_theta: float | None = None, q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None, *, v_indptr: torch.Tensor | None = None,
        o_indptr: torch.Tensor | None = None, head_dim_qk: int | None = None,
        head_dim_vo: int | None = None, o_data_type: str | torch.dtype | None = None,
        o_dtype: str | torch.dtype | None = None, fixed_split_size: int | None = None,
        disable_split_kv: bool = False, batch_invariant: bool = False, non_blocking: bool = True,
        use_fp16_qk_reduction: bool | None = None, q_quantization: str = "none",
        seq_lens: torch.Tensor | None = None, lengths_are_upper_bounds: bool = False,
        seq_lens_q: torch.Tensor | None = None, max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None, uniform_q_len: int | None = None,
        prefix_len_ptr: torch.Tensor | None = None,
        token_pos_in_items_ptr: torch.Tensor | None = None, token_pos_in_items_len: int = 0,
        max_item_len_ptr: torch.Tensor | None = None,
    ) -> None: ...
    def workspace_size(
        self, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, num_qo_heads: int,
        num_kv_heads: int, head_dim: int, custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None, causal: bool = False,
        pos_encoding_mode: str = "NONE", allow_fp16_qk_reduction: bool = False,
        window_left: int = -1, logits_soft_cap: float | None = None,
        sm_scale: float | torch.Tensor | None = None, rope_scale: float | None = None,
        rope_theta: float | None = None, q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None, *, v_indptr: torch.Tensor | None = None,
        o_indptr: torch.Tensor | None = None, head_dim_qk: int | None = None,
        head_dim_vo: int | None = None, o_data_type: str | torch.dtype | None = None,
        o_dtype: str | torch.dtype | None = None, fixed_split_size: int | None = None,
        disable_split_kv: bool = False, batch_invariant: bool = False, non_blocking: bool = True,
        use_fp16_qk_reduction: bool | None = None, q_quantization: str = "none",
        seq_lens: torch.Tensor | None = None, lengths_are_upper_bounds: bool = False,
        seq_lens_q: torch.Tensor | None = None, max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None, uniform_q_len: int | None = None,
        prefix_len_ptr: torch.Tensor | None = None,
        token_pos_in_items_ptr: torch.Tensor | None = None, token_pos_in_items_len: int = 0,
        max_item_len_ptr: torch.Tensor | None = None,
    ) -> tuple[int, int]: ...
    @overload
    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, return_lse: Literal[False] = False,
        *args: Any, k_scale: Scale = None, v_scale: Scale = None, q_scale: Scale = None,
        out: torch.Tensor | None = None, lse: torch.Tensor | None = None, lse_base: str = "log2",
        lse_layout: str = "NH", sinks: torch.Tensor | None = None,
        scale_q: torch.Tensor | None = None, scale_k: torch.Tensor | None = None,
        scale_v: torch.Tensor | None = None, window_left: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None, enable_pdl: bool | None = None,
        kv_cache_sf: torch.Tensor | None = None, o_scale: float | None = None,
        use_fp16_softmax: bool | None = None, uses_spcompress: bool | None = None,
    ) -> torch.Tensor: ...
    @overload
    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, return_lse: Literal[True],
        k_scale: Scale = None, v_scale: Scale = None, q_scale: Scale = None,
        out: torch.Tensor | None = None, lse: torch.Tensor | None = None, lse_base: str = "log2",
        lse_layout: str = "NH", sinks: torch.Tensor | None = None,
        scale_q: torch.Tensor | None = None, scale_k: torch.Tensor | None = None,
        scale_v: torch.Tensor | None = None, window_left: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None, enable_pdl: bool | None = None,
        kv_cache_sf: torch.Tensor | None = None, o_scale: float | None = None,
        use_fp16_softmax: bool | None = None, uses_spcompress: bool | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
    @overload
    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, return_lse: bool,
        k_scale: Scale = None, v_scale: Scale = None, q_scale: Scale = None,
        out: torch.Tensor | None = None, lse: torch.Tensor | None = None, lse_base: str = "log2",
        lse_layout: str = "NH", sinks: torch.Tensor | None = None,
        scale_q: torch.Tensor | None = None, scale_k: torch.Tensor | None = None,
        scale_v: torch.Tensor | None = None, window_left: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None, enable_pdl: bool | None = None,
        kv_cache_sf: torch.Tensor | None = None, o_scale: float | None = None,
        use_fp16_softmax: bool | None = None, uses_spcompress: bool | None = None,
    ) -> Result: ...
    @overload
    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, return_lse: Literal[True],
        *args: Any, k_scale: Scale = None, v_scale: Scale = None, q_scale: Scale = None,
        out: torch.Tensor | None = None, lse: torch.Tensor | None = None, lse_base: str = "log2",
        lse_layout: str = "NH", sinks: torch.Tensor | None = None,
        scale_q: torch.Tensor | None = None, scale_k: torch.Tensor | None = None,
        scale_v: torch.Tensor | None = None, window_left: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None, enable_pdl: bool | None = None,
        kv_cache_sf: torch.Tensor | None = None, o_scale: float | None = None,
        use_fp16_softmax: bool | None = None, uses_spcompress: bool | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
    @overload
    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, return_lse: bool, *args: Any,
        k_scale: Scale = None, v_scale: Scale = None, q_scale: Scale = None,
        out: torch.Tensor | None = None, lse: torch.Tensor | None = None, lse_base: str = "log2",
        lse_layout: str = "NH", sinks: torch.Tensor | None = None,
        scale_q: torch.Tensor | None = None, scale_k: torch.Tensor | None = None,
        scale_v: torch.Tensor | None = None, window_left: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None, enable_pdl: bool | None = None,
        kv_cache_sf: torch.Tensor | None = None, o_scale: float | None = None,
        use_fp16_softmax: bool | None = None, uses_spcompress: bool | None = None,
    ) -> Result: ...
    def run_return_lse(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, k_scale: Scale = None,
        v_scale: Scale = None, q_scale: Scale = None, out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None, lse_base: str = "log2", lse_layout: str = "NH",
        sinks: torch.Tensor | None = None, scale_q: torch.Tensor | None = None,
        scale_k: torch.Tensor | None = None, scale_v: torch.Tensor | None = None,
        window_left: int | None = None, skip_softmax_threshold_scale_factor: float | None = None,
        enable_pdl: bool | None = None, kv_cache_sf: torch.Tensor | None = None,
        o_scale: float | None = None, use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False,
        pos_encoding_mode: str = "NONE", use_fp16_qk_reduction: bool = False, window_left: int = -1,
        logits_soft_cap: float | None = None, sm_scale: float | torch.Tensor | None = None,
        rope_scale: float | None = None, rope_theta: float | None = None, *,
        k_scale: float | torch.Tensor | None = None, v_scale: float | torch.Tensor | None = None,
        allow_fp16_qk_reduction: bool | None = None,
    ) -> torch.Tensor: ...
    def forward_return_lse(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False,
        pos_encoding_mode: str = "NONE", use_fp16_qk_reduction: bool = False, window_left: int = -1,
        logits_soft_cap: float | None = None, sm_scale: float | torch.Tensor | None = None,
        rope_scale: float | None = None, rope_theta: float | None = None, *,
        k_scale: float | torch.Tensor | None = None, v_scale: float | torch.Tensor | None = None,
        allow_fp16_qk_reduction: bool | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
    def prewarm_paged_kv_stride_variant(self, variant: str = "independent") -> None: ...
    def end_forward(self) -> None: ...
    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor,
    ) -> None: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def is_cuda_graph_enabled(self) -> bool: ...
    @property
    def variant(self) -> str | None: ...
