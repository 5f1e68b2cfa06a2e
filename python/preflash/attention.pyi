# Written by cmake/codegen/stubs.py (`make stubs`).
# fmt: off
# mypy: disable-error-code="assignment, override"
# pyright: reportAssignmentType=false, reportIncompatibleMethodOverride=false

from typing import Literal, overload

import torch

from ._check.arguments import KvCache, Result, Scale
from .prefill import BatchPrefillWithPagedKVCacheWrapper

__all__ = [
    "BatchAttention",
    "BatchAttentionWithAttentionSinkWrapper",
    "BatchPrefillWithCausalBidirectionalRangesWrapper",
]

class BatchAttention:
    def __init__(
        self, kv_layout: str = "NHD", device: str | torch.device = "cuda", *, backend: str = "auto",
    ) -> None: ...
    @property
    def float_workspace_buffer(self) -> torch.Tensor: ...
    def prewarm_paged_kv_stride_variant(self, variant: str = "independent") -> None: ...
    def plan(
        self, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor, num_qo_heads: int, num_kv_heads: int, head_dim_qk: int,
        head_dim_vo: int, page_size: int, causal: bool = False, sm_scale: float | None = None,
        logits_soft_cap: float | None = None, q_data_type: str | torch.dtype = torch.bfloat16,
        kv_data_type: str | torch.dtype = torch.bfloat16, use_profiler: bool = False, *,
        seq_lens: torch.Tensor | None = None, lengths_are_upper_bounds: bool = False,
        batch_invariant: bool = False,
    ) -> None: ...
    def run(
        self, q: torch.Tensor, kv_cache: KvCache, out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None, k_scale: Scale = None, v_scale: Scale = None,
        logits_soft_cap: float = 0.0, profiler_buffer: None = None, kv_cache_sf: None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def variant(self) -> str | None: ...

class BatchAttentionWithAttentionSinkWrapper(BatchPrefillWithPagedKVCacheWrapper):
    def __init__(
        self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD",
        use_cuda_graph: bool = False, qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None, mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto", pos_encoding_mode: str = "NONE", use_fp16_qk_reduction: bool = False,
        q_data_type: str | torch.dtype = torch.bfloat16,
        kv_data_type: str | torch.dtype = torch.bfloat16, head_dim_qk: int = 128,
        head_dim_vo: int = 128, window_left: int = -1,
    ) -> None: ...
    @overload
    def run(
        self, q: torch.Tensor, paged_kv_cache: KvCache, sinks: torch.Tensor | None = None,
        sm_scale: Scale = None, *args: None, k_scale: Scale = None, v_scale: Scale = None,
        q_scale: Scale = None, out: torch.Tensor | None = None, lse: torch.Tensor | None = None,
        return_lse: Literal[False] = False, lse_base: str = "log2", lse_layout: str = "NH",
        scale_q: torch.Tensor | None = None, scale_k: torch.Tensor | None = None,
        scale_v: torch.Tensor | None = None, window_left: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None, enable_pdl: bool | None = None,
        kv_cache_sf: torch.Tensor | None = None, o_scale: float | None = None,
        use_fp16_softmax: bool | None = None, uses_spcompress: bool | None = None,
    ) -> torch.Tensor: ...
    @overload
    def run(
        self, q: torch.Tensor, paged_kv_cache: KvCache, sinks: torch.Tensor | None = None,
        sm_scale: Scale = None, *args: None, k_scale: Scale = None, v_scale: Scale = None,
        q_scale: Scale = None, out: torch.Tensor | None = None, lse: torch.Tensor | None = None,
        return_lse: Literal[True], lse_base: str = "log2", lse_layout: str = "NH",
        scale_q: torch.Tensor | None = None, scale_k: torch.Tensor | None = None,
        scale_v: torch.Tensor | None = None, window_left: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None, enable_pdl: bool | None = None,
        kv_cache_sf: torch.Tensor | None = None, o_scale: float | None = None,
        use_fp16_softmax: bool | None = None, uses_spcompress: bool | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
    @overload
    def run(
        self, q: torch.Tensor, paged_kv_cache: KvCache, sinks: torch.Tensor | None = None,
        sm_scale: Scale = None, *args: None, k_scale: Scale = None, v_scale: Scale = None,
        q_scale: Scale = None, out: torch.Tensor | None = None, lse: torch.Tensor | None = None,
        return_lse: bool, lse_base: str = "log2", lse_layout: str = "NH",
        scale_q: torch.Tensor | None = None, scale_k: torch.Tensor | None = None,
        scale_v: torch.Tensor | None = None, window_left: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None, enable_pdl: bool | None = None,
        kv_cache_sf: torch.Tensor | None = None, o_scale: float | None = None,
        use_fp16_softmax: bool | None = None, uses_spcompress: bool | None = None,
    ) -> Result: ...
    def run_return_lse(
        self, q: torch.Tensor, paged_kv_cache: KvCache, sinks: torch.Tensor | None = None,
        sm_scale: Scale = None, *args: None, k_scale: Scale = None, v_scale: Scale = None,
        q_scale: Scale = None, out: torch.Tensor | None = None, lse: torch.Tensor | None = None,
        lse_base: str = "log2", lse_layout: str = "NH", scale_q: torch.Tensor | None = None,
        scale_k: torch.Tensor | None = None, scale_v: torch.Tensor | None = None,
        window_left: int | None = None, skip_softmax_threshold_scale_factor: float | None = None,
        enable_pdl: bool | None = None, kv_cache_sf: torch.Tensor | None = None,
        o_scale: float | None = None, use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

class BatchPrefillWithCausalBidirectionalRangesWrapper(BatchPrefillWithPagedKVCacheWrapper):
    def __init__(
        self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD",
        use_cuda_graph: bool = False, qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None, pos_encoding_mode: str = "NONE",
        q_data_type: str | torch.dtype = torch.bfloat16,
        kv_data_type: str | torch.dtype = torch.bfloat16,
        o_data_type: str | torch.dtype | None = None, head_dim_qk: int = 128,
        head_dim_vo: int = 128, *, backend: str = "auto",
    ) -> None: ...
    def plan(
        self, qo_indptr: torch.Tensor, paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor, paged_kv_last_page_len: torch.Tensor, num_qo_heads: int,
        num_kv_heads: int, head_dim_qk: int, page_size: int, head_dim_vo: int | None = None,
        custom_mask: None = None, packed_custom_mask: None = None, causal: bool = False,
        pos_encoding_mode: str = "NONE", use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None, window_left: int = -1, logits_soft_cap: float | None = None,
        q_data_type: str | torch.dtype | None = None, kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None, non_blocking: bool = True,
        prefix_len_ptr: None = None, token_pos_in_items_ptr: None = None,
        token_pos_in_items_len: int = 0, max_item_len_ptr: None = None,
        max_token_per_sequence: int | None = None, max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None, disable_split_kv: bool = False,
        batch_invariant: bool = False,
    ) -> None: ...
    begin_forward = plan
    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor,
    ) -> None: ...
    @property
    def variant(self) -> str | None: ...
    def workspace_size(
        self, qo_indptr: torch.Tensor, paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor, paged_kv_last_page_len: torch.Tensor, num_qo_heads: int,
        num_kv_heads: int, head_dim_qk: int, page_size: int, head_dim_vo: int | None = None,
        custom_mask: None = None, packed_custom_mask: None = None, causal: bool = False,
        pos_encoding_mode: str = "NONE", use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None, window_left: int = -1, logits_soft_cap: float | None = None,
        q_data_type: str | torch.dtype | None = None, kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None, prefix_len_ptr: None = None,
        token_pos_in_items_ptr: None = None, token_pos_in_items_len: int = 0,
        max_item_len_ptr: None = None, max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None, fixed_split_size: int | None = None,
        disable_split_kv: bool = False, batch_invariant: bool = False,
    ) -> tuple[int, int]: ...
    @overload
    def run(
        self, q: torch.Tensor, paged_kv_cache: KvCache, bidirectional_ranges: torch.Tensor,
        causal_window_left: int = -1, range_window_left: int = -1, q_scale: Scale = None,
        k_scale: Scale = None, v_scale: Scale = None, out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None, return_lse: Literal[False] = False,
        enable_pdl: bool | None = None, kv_cache_sf: None = None,
    ) -> torch.Tensor: ...
    @overload
    def run(
        self, q: torch.Tensor, paged_kv_cache: KvCache, bidirectional_ranges: torch.Tensor,
        causal_window_left: int = -1, range_window_left: int = -1, q_scale: Scale = None,
        k_scale: Scale = None, v_scale: Scale = None, out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None, *, return_lse: Literal[True],
        enable_pdl: bool | None = None, kv_cache_sf: None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
    @overload
    def run(
        self, q: torch.Tensor, paged_kv_cache: KvCache, bidirectional_ranges: torch.Tensor,
        causal_window_left: int = -1, range_window_left: int = -1, q_scale: Scale = None,
        k_scale: Scale = None, v_scale: Scale = None, out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None, *, return_lse: bool, enable_pdl: bool | None = None,
        kv_cache_sf: None = None,
    ) -> Result: ...
    @overload
    def run(
        self, q: torch.Tensor, paged_kv_cache: KvCache, bidirectional_ranges: torch.Tensor,
        causal_window_left: int, range_window_left: int, q_scale: Scale, k_scale: Scale,
        v_scale: Scale, out: torch.Tensor | None, lse: torch.Tensor | None,
        return_lse: Literal[True], enable_pdl: bool | None = None, kv_cache_sf: None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
    @overload
    def run(
        self, q: torch.Tensor, paged_kv_cache: KvCache, bidirectional_ranges: torch.Tensor,
        causal_window_left: int, range_window_left: int, q_scale: Scale, k_scale: Scale,
        v_scale: Scale, out: torch.Tensor | None, lse: torch.Tensor | None, return_lse: bool,
        enable_pdl: bool | None = None, kv_cache_sf: None = None,
    ) -> Result: ...
    def run_return_lse(
        self, q: torch.Tensor, paged_kv_cache: KvCache, bidirectional_ranges: torch.Tensor,
        causal_window_left: int = -1, range_window_left: int = -1, q_scale: Scale = None,
        k_scale: Scale = None, v_scale: Scale = None, out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None, *, enable_pdl: bool | None = None,
        kv_cache_sf: None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
    def forward(
        self, q: torch.Tensor, paged_kv_cache: KvCache, bidirectional_ranges: torch.Tensor,
        causal_window_left: int = -1, range_window_left: int = -1, q_scale: Scale = None,
        k_scale: Scale = None, v_scale: Scale = None, enable_pdl: bool | None = None,
        kv_cache_sf: None = None,
    ) -> torch.Tensor: ...
    def forward_return_lse(
        self, q: torch.Tensor, paged_kv_cache: KvCache, bidirectional_ranges: torch.Tensor,
        causal_window_left: int = -1, range_window_left: int = -1, q_scale: Scale = None,
        k_scale: Scale = None, v_scale: Scale = None, enable_pdl: bool | None = None,
        kv_cache_sf: None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
