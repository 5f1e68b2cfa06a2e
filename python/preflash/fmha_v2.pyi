# Written by cmake/codegen/stubs.py (`make stubs`).
# fmt: off
# mypy: disable-error-code="assignment, override"
# pyright: reportAssignmentType=false, reportIncompatibleMethodOverride=false

from collections.abc import Sequence
from typing import Literal, overload

import torch

from ._check.arguments import Result
from ._fmha.arguments import Qkv

__all__ = [
    "fmha_varlen",
    "trtllm_fmha_v2_prefill",
]

@overload
def fmha_varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, qo_segment_offsets: torch.Tensor,
    kv_segment_offsets: torch.Tensor, plan_info: None = None, max_qo_len: int | None = None,
    out: torch.Tensor | None = None, lse: torch.Tensor | None = None, causal: bool = False,
    sm_scale: float | None = None, q_scale: float | torch.Tensor | None = None,
    k_scale: float | torch.Tensor | None = None, v_scale: float | torch.Tensor | None = None,
    o_scale: None = None, return_lse: Literal[False] = False, *, backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor | None]: ...
@overload
def fmha_varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, qo_segment_offsets: torch.Tensor,
    kv_segment_offsets: torch.Tensor, plan_info: None = None, max_qo_len: int | None = None,
    out: torch.Tensor | None = None, lse: torch.Tensor | None = None, causal: bool = False,
    sm_scale: float | None = None, q_scale: float | torch.Tensor | None = None,
    k_scale: float | torch.Tensor | None = None, v_scale: float | torch.Tensor | None = None,
    o_scale: None = None, *, return_lse: Literal[True], backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def fmha_varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, qo_segment_offsets: torch.Tensor,
    kv_segment_offsets: torch.Tensor, plan_info: None = None, max_qo_len: int | None = None,
    out: torch.Tensor | None = None, lse: torch.Tensor | None = None, causal: bool = False,
    sm_scale: float | None = None, q_scale: float | torch.Tensor | None = None,
    k_scale: float | torch.Tensor | None = None, v_scale: float | torch.Tensor | None = None,
    o_scale: None = None, *, return_lse: bool, backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor | None]: ...
@overload
def fmha_varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, qo_segment_offsets: torch.Tensor,
    kv_segment_offsets: torch.Tensor, plan_info: None, max_qo_len: int | None,
    out: torch.Tensor | None, lse: torch.Tensor | None, causal: bool, sm_scale: float | None,
    q_scale: float | torch.Tensor | None, k_scale: float | torch.Tensor | None,
    v_scale: float | torch.Tensor | None, o_scale: None, return_lse: Literal[True], *,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def fmha_varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, qo_segment_offsets: torch.Tensor,
    kv_segment_offsets: torch.Tensor, plan_info: None, max_qo_len: int | None,
    out: torch.Tensor | None, lse: torch.Tensor | None, causal: bool, sm_scale: float | None,
    q_scale: float | torch.Tensor | None, k_scale: float | torch.Tensor | None,
    v_scale: float | torch.Tensor | None, o_scale: None, return_lse: bool, *, backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor | None]: ...

@overload
def trtllm_fmha_v2_prefill(
    qkv: Qkv, input_layout: str, workspace_buffer: torch.Tensor, seq_lens: torch.Tensor,
    max_q_len: int, max_kv_len: int, bmm1_scale: float | torch.Tensor,
    bmm2_scale: float | torch.Tensor, batch_size: int, cum_seq_lens_q: torch.Tensor,
    cum_seq_lens_kv: torch.Tensor | None, block_tables: torch.Tensor | None = None,
    out: torch.Tensor | None = None, out_dtype: str | torch.dtype | None = None,
    sinks: torch.Tensor | Sequence[torch.Tensor] | None = None,
    pos_encoding_mode: str | None = None, logits_soft_cap_scale: float | None = None,
    mask_mode: str = "causal", window_left: int = -1, chunked_attention_size: int = 0,
    save_softmax_stats: Literal[False] = False, skip_softmax_threshold_scale_factor: float = 0, *,
    backend: str = "auto",
) -> torch.Tensor: ...
@overload
def trtllm_fmha_v2_prefill(
    qkv: Qkv, input_layout: str, workspace_buffer: torch.Tensor, seq_lens: torch.Tensor,
    max_q_len: int, max_kv_len: int, bmm1_scale: float | torch.Tensor,
    bmm2_scale: float | torch.Tensor, batch_size: int, cum_seq_lens_q: torch.Tensor,
    cum_seq_lens_kv: torch.Tensor | None, block_tables: torch.Tensor | None = None,
    out: torch.Tensor | None = None, out_dtype: str | torch.dtype | None = None,
    sinks: torch.Tensor | Sequence[torch.Tensor] | None = None,
    pos_encoding_mode: str | None = None, logits_soft_cap_scale: float | None = None,
    mask_mode: str = "causal", window_left: int = -1, chunked_attention_size: int = 0, *,
    save_softmax_stats: Literal[True], skip_softmax_threshold_scale_factor: float = 0,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def trtllm_fmha_v2_prefill(
    qkv: Qkv, input_layout: str, workspace_buffer: torch.Tensor, seq_lens: torch.Tensor,
    max_q_len: int, max_kv_len: int, bmm1_scale: float | torch.Tensor,
    bmm2_scale: float | torch.Tensor, batch_size: int, cum_seq_lens_q: torch.Tensor,
    cum_seq_lens_kv: torch.Tensor | None, block_tables: torch.Tensor | None = None,
    out: torch.Tensor | None = None, out_dtype: str | torch.dtype | None = None,
    sinks: torch.Tensor | Sequence[torch.Tensor] | None = None,
    pos_encoding_mode: str | None = None, logits_soft_cap_scale: float | None = None,
    mask_mode: str = "causal", window_left: int = -1, chunked_attention_size: int = 0, *,
    save_softmax_stats: bool, skip_softmax_threshold_scale_factor: float = 0, backend: str = "auto",
) -> Result: ...
@overload
def trtllm_fmha_v2_prefill(
    qkv: Qkv, input_layout: str, workspace_buffer: torch.Tensor, seq_lens: torch.Tensor,
    max_q_len: int, max_kv_len: int, bmm1_scale: float | torch.Tensor,
    bmm2_scale: float | torch.Tensor, batch_size: int, cum_seq_lens_q: torch.Tensor,
    cum_seq_lens_kv: torch.Tensor | None, block_tables: torch.Tensor | None,
    out: torch.Tensor | None, out_dtype: str | torch.dtype | None,
    sinks: torch.Tensor | Sequence[torch.Tensor] | None, pos_encoding_mode: str | None,
    logits_soft_cap_scale: float | None, mask_mode: str, window_left: int,
    chunked_attention_size: int, save_softmax_stats: Literal[True],
    skip_softmax_threshold_scale_factor: float = 0, *, backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def trtllm_fmha_v2_prefill(
    qkv: Qkv, input_layout: str, workspace_buffer: torch.Tensor, seq_lens: torch.Tensor,
    max_q_len: int, max_kv_len: int, bmm1_scale: float | torch.Tensor,
    bmm2_scale: float | torch.Tensor, batch_size: int, cum_seq_lens_q: torch.Tensor,
    cum_seq_lens_kv: torch.Tensor | None, block_tables: torch.Tensor | None,
    out: torch.Tensor | None, out_dtype: str | torch.dtype | None,
    sinks: torch.Tensor | Sequence[torch.Tensor] | None, pos_encoding_mode: str | None,
    logits_soft_cap_scale: float | None, mask_mode: str, window_left: int,
    chunked_attention_size: int, save_softmax_stats: bool,
    skip_softmax_threshold_scale_factor: float = 0, *, backend: str = "auto",
) -> Result: ...
