# Written by cmake/codegen/stubs.py (`make stubs`).
# fmt: off
# mypy: disable-error-code="assignment, override"
# pyright: reportAssignmentType=false, reportIncompatibleMethodOverride=false

from typing import Literal, overload

import torch

from ._check.arguments import Result

__all__ = [
    "cudnn_batch_decode_with_kv_cache",
    "cudnn_batch_prefill_with_kv_cache",
]

@overload
def cudnn_batch_decode_with_kv_cache(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, scale: float,
    workspace_buffer: torch.Tensor, *, max_sequence_kv: int,
    actual_seq_lens_kv: torch.Tensor | None = None, block_tables: torch.Tensor | None = None,
    is_cuda_graph_compatible: bool = False, batch_offsets_q: torch.Tensor | None = None,
    batch_offsets_o: torch.Tensor | None = None, batch_offsets_k: None = None,
    batch_offsets_v: None = None, out: torch.Tensor | None = None,
    return_lse: Literal[False] = False, lse: torch.Tensor | None = None, q_len_per_req: int = 1,
    window_left: int = -1, sinks: torch.Tensor | None = None, backend: str | None = None,
) -> torch.Tensor: ...
@overload
def cudnn_batch_decode_with_kv_cache(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, scale: float,
    workspace_buffer: torch.Tensor, *, max_sequence_kv: int,
    actual_seq_lens_kv: torch.Tensor | None = None, block_tables: torch.Tensor | None = None,
    is_cuda_graph_compatible: bool = False, batch_offsets_q: torch.Tensor | None = None,
    batch_offsets_o: torch.Tensor | None = None, batch_offsets_k: None = None,
    batch_offsets_v: None = None, out: torch.Tensor | None = None, return_lse: Literal[True],
    lse: torch.Tensor | None = None, q_len_per_req: int = 1, window_left: int = -1,
    sinks: torch.Tensor | None = None, backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def cudnn_batch_decode_with_kv_cache(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, scale: float,
    workspace_buffer: torch.Tensor, *, max_sequence_kv: int,
    actual_seq_lens_kv: torch.Tensor | None = None, block_tables: torch.Tensor | None = None,
    is_cuda_graph_compatible: bool = False, batch_offsets_q: torch.Tensor | None = None,
    batch_offsets_o: torch.Tensor | None = None, batch_offsets_k: None = None,
    batch_offsets_v: None = None, out: torch.Tensor | None = None, return_lse: bool,
    lse: torch.Tensor | None = None, q_len_per_req: int = 1, window_left: int = -1,
    sinks: torch.Tensor | None = None, backend: str | None = None,
) -> Result: ...

@overload
def cudnn_batch_prefill_with_kv_cache(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, scale: float,
    workspace_buffer: torch.Tensor, *, max_token_per_sequence: int, max_sequence_kv: int,
    actual_seq_lens_q: torch.Tensor | None = None, actual_seq_lens_kv: torch.Tensor | None = None,
    block_tables: torch.Tensor | None = None, causal: bool, return_lse: Literal[False],
    q_scale: float | torch.Tensor | None = None, k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None, batch_offsets_q: torch.Tensor | None = None,
    batch_offsets_o: torch.Tensor | None = None, batch_offsets_k: torch.Tensor | None = None,
    batch_offsets_v: torch.Tensor | None = None, batch_offsets_stats: torch.Tensor | None = None,
    batch_offsets_units: str = "elements", out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None, is_cuda_graph_compatible: bool = False,
    backend: str | None = None, o_data_type: str | torch.dtype | None = None,
    lse_base: str = "log2",
) -> tuple[torch.Tensor, torch.Tensor | None]: ...
@overload
def cudnn_batch_prefill_with_kv_cache(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, scale: float,
    workspace_buffer: torch.Tensor, *, max_token_per_sequence: int, max_sequence_kv: int,
    actual_seq_lens_q: torch.Tensor | None = None, actual_seq_lens_kv: torch.Tensor | None = None,
    block_tables: torch.Tensor | None = None, causal: bool, return_lse: Literal[True],
    q_scale: float | torch.Tensor | None = None, k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None, batch_offsets_q: torch.Tensor | None = None,
    batch_offsets_o: torch.Tensor | None = None, batch_offsets_k: torch.Tensor | None = None,
    batch_offsets_v: torch.Tensor | None = None, batch_offsets_stats: torch.Tensor | None = None,
    batch_offsets_units: str = "elements", out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None, is_cuda_graph_compatible: bool = False,
    backend: str | None = None, o_data_type: str | torch.dtype | None = None,
    lse_base: str = "log2",
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def cudnn_batch_prefill_with_kv_cache(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, scale: float,
    workspace_buffer: torch.Tensor, *, max_token_per_sequence: int, max_sequence_kv: int,
    actual_seq_lens_q: torch.Tensor | None = None, actual_seq_lens_kv: torch.Tensor | None = None,
    block_tables: torch.Tensor | None = None, causal: bool, return_lse: bool,
    q_scale: float | torch.Tensor | None = None, k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None, batch_offsets_q: torch.Tensor | None = None,
    batch_offsets_o: torch.Tensor | None = None, batch_offsets_k: torch.Tensor | None = None,
    batch_offsets_v: torch.Tensor | None = None, batch_offsets_stats: torch.Tensor | None = None,
    batch_offsets_units: str = "elements", out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None, is_cuda_graph_compatible: bool = False,
    backend: str | None = None, o_data_type: str | torch.dtype | None = None,
    lse_base: str = "log2",
) -> tuple[torch.Tensor, torch.Tensor | None]: ...
