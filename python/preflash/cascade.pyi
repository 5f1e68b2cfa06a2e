# Written by cmake/codegen/stubs.py (`make stubs`).
# fmt: off
# mypy: disable-error-code="assignment, override"
# pyright: reportAssignmentType=false, reportIncompatibleMethodOverride=false

from collections.abc import Sequence

import torch

from ._check.arguments import KvCache

__all__ = [
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
    "MultiLevelCascadeAttentionWrapper",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
]

def merge_state(
    v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]: ...

def merge_state_in_place(
    v: torch.Tensor, s: torch.Tensor, v_other: torch.Tensor, s_other: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> None: ...

def merge_states(v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...

class MultiLevelCascadeAttentionWrapper:
    def __init__(
        self, num_levels: int, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD",
        use_cuda_graph: bool = False, qo_indptr_buf_arr: Sequence[torch.Tensor] | None = None,
        paged_kv_indptr_buf_arr: Sequence[torch.Tensor] | None = None,
        paged_kv_indices_buf_arr: Sequence[torch.Tensor] | None = None,
        paged_kv_last_page_len_buf_arr: Sequence[torch.Tensor] | None = None,
    ) -> None: ...
    @property
    def is_cuda_graph_enabled(self) -> bool: ...
    @property
    def variant(self) -> str | None: ...
    def prewarm_paged_kv_stride_variant(self, variant: str = "independent") -> None: ...
    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffers: Sequence[torch.Tensor],
    ) -> None: ...
    def plan(
        self, qo_indptr_arr: Sequence[torch.Tensor], paged_kv_indptr_arr: Sequence[torch.Tensor],
        paged_kv_indices_arr: Sequence[torch.Tensor],
        paged_kv_last_page_len: Sequence[torch.Tensor], num_qo_heads: int, num_kv_heads: int,
        head_dim: int, page_size: int, causal: bool = False, pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False, sm_scale: float | torch.Tensor | None = None,
        window_left: int = -1, logits_soft_cap: float | None = None,
        rope_scale: float | None = None, rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16", kv_data_type: str | torch.dtype | None = None,
        *, batch_invariant: bool = False, seq_lens_arr: Sequence[torch.Tensor | None] | None = None,
        lengths_are_upper_bounds: bool = False,
    ) -> None: ...
    begin_forward = plan
    def run(self, q: torch.Tensor, paged_kv_cache: KvCache) -> torch.Tensor: ...
    forward = run
    def end_forward(self) -> None: ...

class BatchDecodeWithSharedPrefixPagedKVCacheWrapper:
    def begin_forward(
        self, unique_kv_indptr: torch.Tensor, unique_kv_indices: torch.Tensor,
        unique_kv_last_page_len: torch.Tensor, num_qo_heads: int, num_kv_heads: int, head_dim: int,
        page_size: int, data_type: str | torch.dtype = "float16", *,
        seq_lens: torch.Tensor | None = None, lengths_are_upper_bounds: bool = False,
    ) -> None: ...
    def forward(
        self, q: torch.Tensor, k_shared: torch.Tensor, v_shared: torch.Tensor,
        unique_kv_cache: KvCache,
    ) -> torch.Tensor: ...
    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None: ...
    @property
    def variant(self) -> str | None: ...
    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor,
    ) -> None: ...
    def end_forward(self) -> None: ...

class BatchPrefillWithSharedPrefixPagedKVCacheWrapper:
    def prewarm_paged_kv_stride_variant(self, variant: str = "independent") -> None: ...
    def begin_forward(
        self, qo_indptr: torch.Tensor, paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor, paged_kv_last_page_len: torch.Tensor, num_qo_heads: int,
        num_kv_heads: int, head_dim: int, page_size: int, *,
        q_data_type: str | torch.dtype = "float16", kv_data_type: str | torch.dtype | None = None,
        seq_lens: torch.Tensor | None = None, lengths_are_upper_bounds: bool = False,
    ) -> None: ...
    def forward(
        self, q: torch.Tensor, k_shared: torch.Tensor, v_shared: torch.Tensor,
        unique_kv_cache: KvCache, causal: bool = False, use_fp16_qk_reduction: bool = False,
        sm_scale: float | torch.Tensor | None = None, rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> torch.Tensor: ...
    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None: ...
    @property
    def variant(self) -> str | None: ...
    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor,
    ) -> None: ...
    def end_forward(self) -> None: ...
