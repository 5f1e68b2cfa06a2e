# Written by cmake/codegen/stubs.py (`make stubs`).
# fmt: off
# mypy: disable-error-code="assignment, override"
# pyright: reportAssignmentType=false, reportIncompatibleMethodOverride=false

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch

from ._check.arguments import KvCache, Result, Scale
from .cudnn import cudnn_batch_decode_with_kv_cache
from .prefill import BatchPrefillWithPagedKVCacheWrapper
from .trtllm import trtllm_batch_decode_with_kv_cache

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "cudnn_batch_decode_with_kv_cache",
    "fast_decode_plan",
    "single_decode_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache",
]

def fast_decode_plan(
    self: BatchDecodeWithPagedKVCacheWrapper, indptr: torch.Tensor, indices: torch.Tensor,
    last_page_len: torch.Tensor, num_qo_heads: int, num_kv_heads: int, head_dim: int,
    page_size: int, pos_encoding_mode: str = "NONE", window_left: int = -1,
    logits_soft_cap: float | None = None, q_data_type: str | torch.dtype | None = None,
    kv_data_type: str | torch.dtype | None = None, data_type: str | torch.dtype | None = None,
    sm_scale: float | torch.Tensor | None = None, rope_scale: float | None = None,
    rope_theta: float | None = None, non_blocking: bool = True, fixed_split_size: int | None = None,
    disable_split_kv: bool = False, q_len_per_req: int | torch.Tensor | None = 1,
    global_override_indptr_cpu: torch.Tensor | None = None, *, batch_invariant: bool = False,
) -> None: ...

@overload
def single_decode_with_kv_cache(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE", use_tensor_cores: bool = False,
    q_scale: float | torch.Tensor | None = None, k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None, window_left: int = -1,
    logits_soft_cap: float | None = None, sm_scale: float | torch.Tensor | None = None,
    rope_scale: float | None = None, rope_theta: float | None = None,
    return_lse: Literal[False] = False, *, batch_invariant: bool = False,
) -> torch.Tensor: ...
@overload
def single_decode_with_kv_cache(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE", use_tensor_cores: bool = False,
    q_scale: float | torch.Tensor | None = None, k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None, window_left: int = -1,
    logits_soft_cap: float | None = None, sm_scale: float | torch.Tensor | None = None,
    rope_scale: float | None = None, rope_theta: float | None = None, *, return_lse: Literal[True],
    batch_invariant: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def single_decode_with_kv_cache(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE", use_tensor_cores: bool = False,
    q_scale: float | torch.Tensor | None = None, k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None, window_left: int = -1,
    logits_soft_cap: float | None = None, sm_scale: float | torch.Tensor | None = None,
    rope_scale: float | None = None, rope_theta: float | None = None, *, return_lse: bool,
    batch_invariant: bool = False,
) -> Result: ...
@overload
def single_decode_with_kv_cache(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_layout: str, pos_encoding_mode: str,
    use_tensor_cores: bool, q_scale: float | torch.Tensor | None,
    k_scale: float | torch.Tensor | None, v_scale: float | torch.Tensor | None, window_left: int,
    logits_soft_cap: float | None, sm_scale: float | torch.Tensor | None, rope_scale: float | None,
    rope_theta: float | None, return_lse: Literal[True], *, batch_invariant: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def single_decode_with_kv_cache(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_layout: str, pos_encoding_mode: str,
    use_tensor_cores: bool, q_scale: float | torch.Tensor | None,
    k_scale: float | torch.Tensor | None, v_scale: float | torch.Tensor | None, window_left: int,
    logits_soft_cap: float | None, sm_scale: float | torch.Tensor | None, rope_scale: float | None,
    rope_theta: float | None, return_lse: bool, *, batch_invariant: bool = False,
) -> Result: ...

class BatchDecodeWithPagedKVCacheWrapper(BatchPrefillWithPagedKVCacheWrapper):
    def __init__(
        self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD",
        use_cuda_graph: bool = False, use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None, backend: str = "auto",
        jit_args: Sequence[Any] | None = None,
    ) -> None: ...
    @property
    def use_tensor_cores(self) -> bool: ...
    def plan(
        self, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor,
        num_qo_heads: int, num_kv_heads: int, head_dim: int, page_size: int,
        pos_encoding_mode: str = "NONE", window_left: int = -1,
        logits_soft_cap: float | None = None, q_data_type: str | torch.dtype | None = "float16",
        kv_data_type: str | torch.dtype | None = None, data_type: str | torch.dtype | None = None,
        sm_scale: float | torch.Tensor | None = None, rope_scale: float | None = None,
        rope_theta: float | None = None, non_blocking: bool = True,
        block_tables: torch.Tensor | None = None, seq_lens: torch.Tensor | None = None,
        fixed_split_size: int | None = None, disable_split_kv: bool = False, *,
        o_data_type: str | torch.dtype | None = None, batch_invariant: bool = False,
        lengths_are_upper_bounds: bool = False, q_len_per_req: int | None = 1,
    ) -> None: ...
    def begin_forward(
        self, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor,
        num_qo_heads: int, num_kv_heads: int, head_dim: int, page_size: int,
        pos_encoding_mode: str = "NONE", window_left: int = -1,
        logits_soft_cap: float | None = None, q_data_type: str | torch.dtype | None = "float16",
        kv_data_type: str | torch.dtype | None = None, data_type: str | torch.dtype | None = None,
        sm_scale: float | torch.Tensor | None = None, rope_scale: float | None = None,
        rope_theta: float | None = None, non_blocking: bool = True,
        block_tables: torch.Tensor | None = None, seq_lens: torch.Tensor | None = None,
        fixed_split_size: int | None = None, disable_split_kv: bool = False, *,
        o_data_type: str | torch.dtype | None = None, batch_invariant: bool = False,
        lengths_are_upper_bounds: bool = False, q_len_per_req: int | None = 1,
    ) -> None: ...
    def workspace_size(
        self, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor,
        num_qo_heads: int, num_kv_heads: int, head_dim: int, page_size: int,
        pos_encoding_mode: str = "NONE", window_left: int = -1,
        logits_soft_cap: float | None = None, q_data_type: str | torch.dtype | None = "float16",
        kv_data_type: str | torch.dtype | None = None, data_type: str | torch.dtype | None = None,
        sm_scale: float | torch.Tensor | None = None, rope_scale: float | None = None,
        rope_theta: float | None = None, non_blocking: bool = True,
        block_tables: torch.Tensor | None = None, seq_lens: torch.Tensor | None = None,
        fixed_split_size: int | None = None, disable_split_kv: bool = False, *,
        o_data_type: str | torch.dtype | None = None, batch_invariant: bool = False,
        lengths_are_upper_bounds: bool = False, q_len_per_req: int | None = 1,
    ) -> tuple[int, int]: ...
    @overload
    def run(
        self, q: torch.Tensor, paged_kv_cache: KvCache, *args: Any, k_scale: Scale = None,
        v_scale: Scale = None, out: torch.Tensor | None = None, lse: torch.Tensor | None = None,
        return_lse: Literal[False] = False, sinks: torch.Tensor | None = None,
        q_len_per_req: int | None = None, q_scale: Scale = None, lse_base: str = "log2",
        lse_layout: str = "NH", scale_q: torch.Tensor | None = None,
        scale_k: torch.Tensor | None = None, scale_v: torch.Tensor | None = None,
        window_left: int | None = None, skip_softmax_threshold_scale_factor: float | None = None,
        enable_pdl: bool | None = None, kv_cache_sf: torch.Tensor | None = None,
        o_scale: float | None = None, use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None,
    ) -> torch.Tensor: ...
    @overload
    def run(
        self, q: torch.Tensor, paged_kv_cache: KvCache, *args: Any, k_scale: Scale = None,
        v_scale: Scale = None, out: torch.Tensor | None = None, lse: torch.Tensor | None = None,
        return_lse: Literal[True], sinks: torch.Tensor | None = None,
        q_len_per_req: int | None = None, q_scale: Scale = None, lse_base: str = "log2",
        lse_layout: str = "NH", scale_q: torch.Tensor | None = None,
        scale_k: torch.Tensor | None = None, scale_v: torch.Tensor | None = None,
        window_left: int | None = None, skip_softmax_threshold_scale_factor: float | None = None,
        enable_pdl: bool | None = None, kv_cache_sf: torch.Tensor | None = None,
        o_scale: float | None = None, use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
    @overload
    def run(
        self, q: torch.Tensor, paged_kv_cache: KvCache, *args: Any, k_scale: Scale = None,
        v_scale: Scale = None, out: torch.Tensor | None = None, lse: torch.Tensor | None = None,
        return_lse: bool, sinks: torch.Tensor | None = None, q_len_per_req: int | None = None,
        q_scale: Scale = None, lse_base: str = "log2", lse_layout: str = "NH",
        scale_q: torch.Tensor | None = None, scale_k: torch.Tensor | None = None,
        scale_v: torch.Tensor | None = None, window_left: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None, enable_pdl: bool | None = None,
        kv_cache_sf: torch.Tensor | None = None, o_scale: float | None = None,
        use_fp16_softmax: bool | None = None, uses_spcompress: bool | None = None,
    ) -> Result: ...
    def run_return_lse(
        self, q: torch.Tensor, paged_kv_cache: KvCache, *args: Any, k_scale: Scale = None,
        v_scale: Scale = None, out: torch.Tensor | None = None, lse: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None, q_len_per_req: int | None = None, q_scale: Scale = None,
        lse_base: str = "log2", lse_layout: str = "NH", scale_q: torch.Tensor | None = None,
        scale_k: torch.Tensor | None = None, scale_v: torch.Tensor | None = None,
        window_left: int | None = None, skip_softmax_threshold_scale_factor: float | None = None,
        enable_pdl: bool | None = None, kv_cache_sf: torch.Tensor | None = None,
        o_scale: float | None = None, use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
    @property
    def resolved_backend(self) -> str: ...
    def forward(
        self, q: torch.Tensor, paged_kv_cache: KvCache, pos_encoding_mode: str = "NONE",
        q_scale: float | torch.Tensor | None = None, k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None, window_left: int = -1,
        logits_soft_cap: float | None = None, sm_scale: float | torch.Tensor | None = None,
        rope_scale: float | None = None, rope_theta: float | None = None,
    ) -> torch.Tensor: ...
    def forward_return_lse(
        self, q: torch.Tensor, paged_kv_cache: KvCache, pos_encoding_mode: str = "NONE",
        q_scale: float | torch.Tensor | None = None, k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None, window_left: int = -1,
        logits_soft_cap: float | None = None, sm_scale: float | torch.Tensor | None = None,
        rope_scale: float | None = None, rope_theta: float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    def __init__(
        self, workspace_buffer: torch.Tensor, indptr_buffer: torch.Tensor,
        indices_buffer: torch.Tensor, last_page_len_buffer: torch.Tensor, kv_layout: str = "NHD",
        use_tensor_cores: bool = False,
    ) -> None: ...
