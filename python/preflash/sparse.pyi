# Written by cmake/codegen/stubs.py (`make stubs`).
# fmt: off
# mypy: disable-error-code="assignment, override"
# pyright: reportAssignmentType=false, reportIncompatibleMethodOverride=false

from typing import Literal, overload

import torch

from ._check.arguments import Result

__all__ = [
    "BlockSparseAttentionWrapper",
    "VariableBlockSparseAttentionWrapper",
]

class BlockSparseAttentionWrapper:
    def plan(
        self, indptr: torch.Tensor, indices: torch.Tensor, M: int, N: int, R: int, C: int,
        num_qo_heads: int, num_kv_heads: int, head_dim: int, mask: torch.Tensor | None = None,
        packed_mask: torch.Tensor | None = None, causal: bool = False,
        pos_encoding_mode: str = "NONE", use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None, sm_scale: float | None = None,
        rope_scale: float | None = None, rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16", kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype = "float16", non_blocking: bool = True,
        block_mask: None = None, kv_block_lens: None = None, q2k_indices: None = None,
        q2k_num: None = None, kv_splits: None = None, use_clc: None = None, q_scale: None = None,
        k_scale: None = None, v_scale: None = None,
    ) -> None: ...
    begin_forward = plan
    @overload
    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        scale_q: torch.Tensor | None = None, scale_k: torch.Tensor | None = None,
        scale_v: torch.Tensor | None = None, out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None, return_lse: Literal[False] = False,
        enable_pdl: bool | None = None,
    ) -> torch.Tensor: ...
    @overload
    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        scale_q: torch.Tensor | None = None, scale_k: torch.Tensor | None = None,
        scale_v: torch.Tensor | None = None, out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None, *, return_lse: Literal[True],
        enable_pdl: bool | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
    @overload
    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        scale_q: torch.Tensor | None = None, scale_k: torch.Tensor | None = None,
        scale_v: torch.Tensor | None = None, out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None, *, return_lse: bool, enable_pdl: bool | None = None,
    ) -> Result: ...
    @overload
    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale_q: torch.Tensor | None,
        scale_k: torch.Tensor | None, scale_v: torch.Tensor | None, out: torch.Tensor | None,
        lse: torch.Tensor | None, return_lse: Literal[True], enable_pdl: bool | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
    @overload
    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale_q: torch.Tensor | None,
        scale_k: torch.Tensor | None, scale_v: torch.Tensor | None, out: torch.Tensor | None,
        lse: torch.Tensor | None, return_lse: bool, enable_pdl: bool | None = None,
    ) -> Result: ...
    def run_return_lse(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        scale_q: torch.Tensor | None = None, scale_k: torch.Tensor | None = None,
        scale_v: torch.Tensor | None = None, out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None, *, enable_pdl: bool | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale_q: None = None,
        scale_k: None = None, scale_v: None = None, pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False, logits_soft_cap: float | None = None,
        sm_scale: float | None = None, rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> torch.Tensor: ...
    def __init__(self, float_workspace_buffer: torch.Tensor, backend: str = "auto") -> None: ...
    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor,
    ) -> None: ...
    def end_forward(self) -> None: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def variant(self) -> str | None: ...

class VariableBlockSparseAttentionWrapper:
    def plan(
        self, block_mask_map: torch.Tensor, block_row_sz: torch.Tensor, block_col_sz: torch.Tensor,
        num_qo_heads: int, num_kv_heads: int, head_dim: int, causal: bool = False,
        pos_encoding_mode: str = "NONE", use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None, sm_scale: float | None = None,
        rope_scale: float | None = None, rope_theta: float | None = None, non_blocking: bool = True,
        q_data_type: str | torch.dtype = "float16", kv_data_type: str | torch.dtype | None = None,
    ) -> None: ...
    begin_forward = plan
    @overload
    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None, return_lse: Literal[False] = False,
        enable_pdl: bool | None = None,
    ) -> torch.Tensor: ...
    @overload
    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None, *, return_lse: Literal[True],
        enable_pdl: bool | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
    @overload
    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None, *, return_lse: bool, enable_pdl: bool | None = None,
    ) -> Result: ...
    @overload
    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None,
        lse: torch.Tensor | None, return_lse: Literal[True], enable_pdl: bool | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
    @overload
    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None,
        lse: torch.Tensor | None, return_lse: bool, enable_pdl: bool | None = None,
    ) -> Result: ...
    def run_return_lse(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None, *, enable_pdl: bool | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False, logits_soft_cap: float | None = None,
        sm_scale: float | None = None, rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> torch.Tensor: ...
    def __init__(self, float_workspace_buffer: torch.Tensor, backend: str = "auto") -> None: ...
    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor,
    ) -> None: ...
    def end_forward(self) -> None: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def variant(self) -> str | None: ...
