# Written by cmake/codegen/stubs.py (`make stubs`).
# fmt: off
# mypy: disable-error-code="assignment, override"
# pyright: reportAssignmentType=false, reportIncompatibleMethodOverride=false

from typing import Literal, overload

import torch

from ._check.arguments import KvCache, Result, Scale

__all__ = [
    "BatchPODWithPagedKVCacheWrapper",
    "PODWithPagedKVCacheWrapper",
]

class BatchPODWithPagedKVCacheWrapper:
    def __init__(
        self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", *,
        backend: str = "auto",
    ) -> None: ...
    def plan(
        self, qo_indptr_p: torch.Tensor, kv_indptr_p: torch.Tensor, kv_indices_p: torch.Tensor,
        last_page_len_p: torch.Tensor, qo_indptr_d: torch.Tensor, kv_indptr_d: torch.Tensor,
        kv_indices_d: torch.Tensor, last_page_len_d: torch.Tensor, num_qo_heads: int,
        num_kv_heads: int, head_dim: int, page_size: int, pos_encoding_mode: str = "NONE",
        window_left: int = -1, q_data_type: str | torch.dtype | None = "float16",
        kv_data_type: str | torch.dtype | None = None, data_type: str | torch.dtype | None = None,
        sm_scale: float | torch.Tensor | None = None, rope_scale: float | None = None,
        rope_theta: float | None = None, non_blocking: bool = True, *,
        batch_invariant: bool = False, seq_lens_p: torch.Tensor | None = None,
        seq_lens_d: torch.Tensor | None = None, lengths_are_upper_bounds: bool = False,
    ) -> None: ...
    begin_forward = plan
    @overload
    def run(
        self, q_p: torch.Tensor, paged_kv_cache_p: KvCache, q_d: torch.Tensor,
        paged_kv_cache_d: KvCache, custom_mask_p: torch.Tensor | None = None,
        packed_custom_mask_p: torch.Tensor | None = None, causal_p: bool = False,
        q_scale: Scale = None, k_scale: Scale = None, v_scale: Scale = None,
        return_lse: Literal[False] = False, use_fp16_qk_reduction: bool = False,
        enable_pdl: bool | None = None, *, out_p: torch.Tensor | None = None,
        lse_p: torch.Tensor | None = None, out_d: torch.Tensor | None = None,
        lse_d: torch.Tensor | None = None, lse_base: str = "log2", lse_layout: str = "NH",
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
    @overload
    def run(
        self, q_p: torch.Tensor, paged_kv_cache_p: KvCache, q_d: torch.Tensor,
        paged_kv_cache_d: KvCache, custom_mask_p: torch.Tensor | None = None,
        packed_custom_mask_p: torch.Tensor | None = None, causal_p: bool = False,
        q_scale: Scale = None, k_scale: Scale = None, v_scale: Scale = None, *,
        return_lse: Literal[True], use_fp16_qk_reduction: bool = False,
        enable_pdl: bool | None = None, out_p: torch.Tensor | None = None,
        lse_p: torch.Tensor | None = None, out_d: torch.Tensor | None = None,
        lse_d: torch.Tensor | None = None, lse_base: str = "log2", lse_layout: str = "NH",
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]: ...
    @overload
    def run(
        self, q_p: torch.Tensor, paged_kv_cache_p: KvCache, q_d: torch.Tensor,
        paged_kv_cache_d: KvCache, custom_mask_p: torch.Tensor | None = None,
        packed_custom_mask_p: torch.Tensor | None = None, causal_p: bool = False,
        q_scale: Scale = None, k_scale: Scale = None, v_scale: Scale = None, *, return_lse: bool,
        use_fp16_qk_reduction: bool = False, enable_pdl: bool | None = None,
        out_p: torch.Tensor | None = None, lse_p: torch.Tensor | None = None,
        out_d: torch.Tensor | None = None, lse_d: torch.Tensor | None = None,
        lse_base: str = "log2", lse_layout: str = "NH",
    ) -> tuple[Result, Result]: ...
    @overload
    def run(
        self, q_p: torch.Tensor, paged_kv_cache_p: KvCache, q_d: torch.Tensor,
        paged_kv_cache_d: KvCache, custom_mask_p: torch.Tensor | None,
        packed_custom_mask_p: torch.Tensor | None, causal_p: bool, q_scale: Scale, k_scale: Scale,
        v_scale: Scale, return_lse: Literal[True], use_fp16_qk_reduction: bool = False,
        enable_pdl: bool | None = None, *, out_p: torch.Tensor | None = None,
        lse_p: torch.Tensor | None = None, out_d: torch.Tensor | None = None,
        lse_d: torch.Tensor | None = None, lse_base: str = "log2", lse_layout: str = "NH",
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]: ...
    @overload
    def run(
        self, q_p: torch.Tensor, paged_kv_cache_p: KvCache, q_d: torch.Tensor,
        paged_kv_cache_d: KvCache, custom_mask_p: torch.Tensor | None,
        packed_custom_mask_p: torch.Tensor | None, causal_p: bool, q_scale: Scale, k_scale: Scale,
        v_scale: Scale, return_lse: bool, use_fp16_qk_reduction: bool = False,
        enable_pdl: bool | None = None, *, out_p: torch.Tensor | None = None,
        lse_p: torch.Tensor | None = None, out_d: torch.Tensor | None = None,
        lse_d: torch.Tensor | None = None, lse_base: str = "log2", lse_layout: str = "NH",
    ) -> tuple[Result, Result]: ...
    def run_return_lse(
        self, q_p: torch.Tensor, paged_kv_cache_p: KvCache, q_d: torch.Tensor,
        paged_kv_cache_d: KvCache, custom_mask_p: torch.Tensor | None = None,
        packed_custom_mask_p: torch.Tensor | None = None, causal_p: bool = False,
        q_scale: Scale = None, k_scale: Scale = None, v_scale: Scale = None, *,
        use_fp16_qk_reduction: bool = False, enable_pdl: bool | None = None,
        out_p: torch.Tensor | None = None, lse_p: torch.Tensor | None = None,
        out_d: torch.Tensor | None = None, lse_d: torch.Tensor | None = None,
        lse_base: str = "log2", lse_layout: str = "NH",
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]: ...
    forward = run
    forward_return_lse = run_return_lse
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
    @property
    def launches(self) -> int | None: ...

class PODWithPagedKVCacheWrapper:
    def __init__(
        self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD",
        use_cuda_graph: bool = False, paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None, jit_args: None = None, *,
        backend: str = "auto",
    ) -> None: ...
    def plan(
        self, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor,
        num_qo_heads: int, num_kv_heads: int, head_dim: int, page_size: int,
        pos_encoding_mode: str = "NONE", window_left: int = -1,
        q_data_type: str | torch.dtype | None = "float16",
        kv_data_type: str | torch.dtype | None = None, data_type: str | torch.dtype | None = None,
        sm_scale: float | torch.Tensor | None = None, rope_scale: float | None = None,
        rope_theta: float | None = None, non_blocking: bool = True, *,
        batch_invariant: bool = False, seq_lens: torch.Tensor | None = None,
        lengths_are_upper_bounds: bool = False,
    ) -> None: ...
    begin_forward = plan
    @overload
    def run(
        self, q_p: torch.Tensor, k_p: torch.Tensor, v_p: torch.Tensor, q_d: torch.Tensor,
        paged_kv_cache_d: KvCache, custom_mask_p: torch.Tensor | None = None,
        packed_custom_mask_p: torch.Tensor | None = None, causal_p: bool = False,
        kv_layout_p: str = "NHD", pos_encoding_mode_p: str = "NONE", sm_scale_p: Scale = None,
        window_left_p: int = -1, rope_scale_p: float | None = None,
        rope_theta_p: float | None = None, return_lse_p: Literal[False] = False,
        custom_mask_d: None = None, packed_custom_mask_d: None = None, causal_d: bool = False,
        kv_layout_d: str = "NHD", pos_encoding_mode_d: str = "NONE", sm_scale_d: Scale = None,
        window_left_d: int = -1, rope_scale_d: float | None = None,
        rope_theta_d: float | None = None, q_scale: Scale = None, k_scale: Scale = None,
        v_scale: Scale = None, return_lse_d: Literal[False] = False,
        use_fp16_qk_reduction: bool = False, enable_pdl: bool | None = None, *args: None,
        out_p: torch.Tensor | None = None, lse_p: torch.Tensor | None = None,
        out_d: torch.Tensor | None = None, lse_d: torch.Tensor | None = None,
        lse_base: str = "log2", lse_layout: str = "NH",
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
    @overload
    def run(
        self, q_p: torch.Tensor, k_p: torch.Tensor, v_p: torch.Tensor, q_d: torch.Tensor,
        paged_kv_cache_d: KvCache, custom_mask_p: torch.Tensor | None = None,
        packed_custom_mask_p: torch.Tensor | None = None, causal_p: bool = False,
        kv_layout_p: str = "NHD", pos_encoding_mode_p: str = "NONE", sm_scale_p: Scale = None,
        window_left_p: int = -1, rope_scale_p: float | None = None,
        rope_theta_p: float | None = None, return_lse_p: Literal[False] = False,
        custom_mask_d: None = None, packed_custom_mask_d: None = None, causal_d: bool = False,
        kv_layout_d: str = "NHD", pos_encoding_mode_d: str = "NONE", sm_scale_d: Scale = None,
        window_left_d: int = -1, rope_scale_d: float | None = None,
        rope_theta_d: float | None = None, q_scale: Scale = None, k_scale: Scale = None,
        v_scale: Scale = None, *, return_lse_d: Literal[True], use_fp16_qk_reduction: bool = False,
        enable_pdl: bool | None = None, out_p: torch.Tensor | None = None,
        lse_p: torch.Tensor | None = None, out_d: torch.Tensor | None = None,
        lse_d: torch.Tensor | None = None, lse_base: str = "log2", lse_layout: str = "NH",
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]: ...
    @overload
    def run(
        self, q_p: torch.Tensor, k_p: torch.Tensor, v_p: torch.Tensor, q_d: torch.Tensor,
        paged_kv_cache_d: KvCache, custom_mask_p: torch.Tensor | None = None,
        packed_custom_mask_p: torch.Tensor | None = None, causal_p: bool = False,
        kv_layout_p: str = "NHD", pos_encoding_mode_p: str = "NONE", sm_scale_p: Scale = None,
        window_left_p: int = -1, rope_scale_p: float | None = None,
        rope_theta_p: float | None = None, *, return_lse_p: Literal[True],
        custom_mask_d: None = None, packed_custom_mask_d: None = None, causal_d: bool = False,
        kv_layout_d: str = "NHD", pos_encoding_mode_d: str = "NONE", sm_scale_d: Scale = None,
        window_left_d: int = -1, rope_scale_d: float | None = None,
        rope_theta_d: float | None = None, q_scale: Scale = None, k_scale: Scale = None,
        v_scale: Scale = None, return_lse_d: Literal[False] = False,
        use_fp16_qk_reduction: bool = False, enable_pdl: bool | None = None,
        out_p: torch.Tensor | None = None, lse_p: torch.Tensor | None = None,
        out_d: torch.Tensor | None = None, lse_d: torch.Tensor | None = None,
        lse_base: str = "log2", lse_layout: str = "NH",
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]: ...
    @overload
    def run(
        self, q_p: torch.Tensor, k_p: torch.Tensor, v_p: torch.Tensor, q_d: torch.Tensor,
        paged_kv_cache_d: KvCache, custom_mask_p: torch.Tensor | None = None,
        packed_custom_mask_p: torch.Tensor | None = None, causal_p: bool = False,
        kv_layout_p: str = "NHD", pos_encoding_mode_p: str = "NONE", sm_scale_p: Scale = None,
        window_left_p: int = -1, rope_scale_p: float | None = None,
        rope_theta_p: float | None = None, *, return_lse_p: Literal[True],
        custom_mask_d: None = None, packed_custom_mask_d: None = None, causal_d: bool = False,
        kv_layout_d: str = "NHD", pos_encoding_mode_d: str = "NONE", sm_scale_d: Scale = None,
        window_left_d: int = -1, rope_scale_d: float | None = None,
        rope_theta_d: float | None = None, q_scale: Scale = None, k_scale: Scale = None,
        v_scale: Scale = None, return_lse_d: Literal[True], use_fp16_qk_reduction: bool = False,
        enable_pdl: bool | None = None, out_p: torch.Tensor | None = None,
        lse_p: torch.Tensor | None = None, out_d: torch.Tensor | None = None,
        lse_d: torch.Tensor | None = None, lse_base: str = "log2", lse_layout: str = "NH",
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]: ...
    @overload
    def run(
        self, q_p: torch.Tensor, k_p: torch.Tensor, v_p: torch.Tensor, q_d: torch.Tensor,
        paged_kv_cache_d: KvCache, custom_mask_p: torch.Tensor | None = None,
        packed_custom_mask_p: torch.Tensor | None = None, causal_p: bool = False,
        kv_layout_p: str = "NHD", pos_encoding_mode_p: str = "NONE", sm_scale_p: Scale = None,
        window_left_p: int = -1, rope_scale_p: float | None = None,
        rope_theta_p: float | None = None, *, return_lse_p: bool, custom_mask_d: None = None,
        packed_custom_mask_d: None = None, causal_d: bool = False, kv_layout_d: str = "NHD",
        pos_encoding_mode_d: str = "NONE", sm_scale_d: Scale = None, window_left_d: int = -1,
        rope_scale_d: float | None = None, rope_theta_d: float | None = None, q_scale: Scale = None,
        k_scale: Scale = None, v_scale: Scale = None, return_lse_d: bool = False,
        use_fp16_qk_reduction: bool = False, enable_pdl: bool | None = None,
        out_p: torch.Tensor | None = None, lse_p: torch.Tensor | None = None,
        out_d: torch.Tensor | None = None, lse_d: torch.Tensor | None = None,
        lse_base: str = "log2", lse_layout: str = "NH",
    ) -> tuple[Result, Result]: ...
    @overload
    def run(
        self, q_p: torch.Tensor, k_p: torch.Tensor, v_p: torch.Tensor, q_d: torch.Tensor,
        paged_kv_cache_d: KvCache, custom_mask_p: torch.Tensor | None = None,
        packed_custom_mask_p: torch.Tensor | None = None, causal_p: bool = False,
        kv_layout_p: str = "NHD", pos_encoding_mode_p: str = "NONE", sm_scale_p: Scale = None,
        window_left_p: int = -1, rope_scale_p: float | None = None,
        rope_theta_p: float | None = None, return_lse_p: bool = False, custom_mask_d: None = None,
        packed_custom_mask_d: None = None, causal_d: bool = False, kv_layout_d: str = "NHD",
        pos_encoding_mode_d: str = "NONE", sm_scale_d: Scale = None, window_left_d: int = -1,
        rope_scale_d: float | None = None, rope_theta_d: float | None = None, q_scale: Scale = None,
        k_scale: Scale = None, v_scale: Scale = None, *, return_lse_d: bool,
        use_fp16_qk_reduction: bool = False, enable_pdl: bool | None = None,
        out_p: torch.Tensor | None = None, lse_p: torch.Tensor | None = None,
        out_d: torch.Tensor | None = None, lse_d: torch.Tensor | None = None,
        lse_base: str = "log2", lse_layout: str = "NH",
    ) -> tuple[Result, Result]: ...
    @overload
    def run(
        self, q_p: torch.Tensor, k_p: torch.Tensor, v_p: torch.Tensor, q_d: torch.Tensor,
        paged_kv_cache_d: KvCache, custom_mask_p: torch.Tensor | None,
        packed_custom_mask_p: torch.Tensor | None, causal_p: bool, kv_layout_p: str,
        pos_encoding_mode_p: str, sm_scale_p: Scale, window_left_p: int, rope_scale_p: float | None,
        rope_theta_p: float | None, return_lse_p: bool, custom_mask_d: None = None,
        packed_custom_mask_d: None = None, causal_d: bool = False, kv_layout_d: str = "NHD",
        pos_encoding_mode_d: str = "NONE", sm_scale_d: Scale = None, window_left_d: int = -1,
        rope_scale_d: float | None = None, rope_theta_d: float | None = None, q_scale: Scale = None,
        k_scale: Scale = None, v_scale: Scale = None, return_lse_d: bool = False,
        use_fp16_qk_reduction: bool = False, enable_pdl: bool | None = None, *args: None,
        out_p: torch.Tensor | None = None, lse_p: torch.Tensor | None = None,
        out_d: torch.Tensor | None = None, lse_d: torch.Tensor | None = None,
        lse_base: str = "log2", lse_layout: str = "NH",
    ) -> tuple[Result, Result]: ...
    def run_return_lse(
        self, q_p: torch.Tensor, k_p: torch.Tensor, v_p: torch.Tensor, q_d: torch.Tensor,
        paged_kv_cache_d: KvCache, custom_mask_p: torch.Tensor | None = None,
        packed_custom_mask_p: torch.Tensor | None = None, causal_p: bool = False,
        kv_layout_p: str = "NHD", pos_encoding_mode_p: str = "NONE", sm_scale_p: Scale = None,
        window_left_p: int = -1, rope_scale_p: float | None = None,
        rope_theta_p: float | None = None, *, custom_mask_d: None = None,
        packed_custom_mask_d: None = None, causal_d: bool = False, kv_layout_d: str = "NHD",
        pos_encoding_mode_d: str = "NONE", sm_scale_d: Scale = None, window_left_d: int = -1,
        rope_scale_d: float | None = None, rope_theta_d: float | None = None, q_scale: Scale = None,
        k_scale: Scale = None, v_scale: Scale = None, use_fp16_qk_reduction: bool = False,
        enable_pdl: bool | None = None, out_p: torch.Tensor | None = None,
        lse_p: torch.Tensor | None = None, out_d: torch.Tensor | None = None,
        lse_d: torch.Tensor | None = None, lse_base: str = "log2", lse_layout: str = "NH",
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]: ...
    forward = run
    forward_return_lse = run_return_lse
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
    @property
    def launches(self) -> int | None: ...
