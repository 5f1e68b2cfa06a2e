"""What both wrappers of prefill beside decode have in common."""

from __future__ import annotations

from typing import Any

import torch

from .._check import values as check
from .._check.request import Request
from .._compat.engine_attributes import forwards
from .._plan import masks
from .._run.variant import of_side
from .._wrap.paged import BatchPrefillWithPagedKVCacheWrapper
from .joint import SIDES, Joints


@forwards(
    "_decode", "_kv_layout", "_window_left", "_logits_soft_cap", "_sm_scale", "_pos_encoding_mode",
    "_rope_scale", "_rope_theta", "_jit_module", "_use_cuda_graph", "_cached_q_data_type",
    "_cached_kv_data_type", "is_cuda_graph_enabled",
)  # fmt: skip
class PodWrapper:
    """What both wrappers tell of themselves. `_decode` is the decode side alone: it owns the float
    workspace, the buffers of graphs and the plan that every run() goes by."""

    _decode: BatchPrefillWithPagedKVCacheWrapper
    _joints: Joints

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"{type(self).__name__} holds device memory and cannot be pickled or copied; "
            "construct another wrapper and plan it"
        )

    end_forward = BatchPrefillWithPagedKVCacheWrapper.end_forward

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor
    ) -> None:
        """Replaces the float workspace, and the int workspace of the decode side alone, as in
        BatchPrefillWithPagedKVCacheWrapper.reset_workspace_buffer(). Work lists of both sides lie
        in memory of the wrapper's own."""
        if self.is_cuda_graph_enabled and any(True for _ in self._joints.joined()):
            raise ValueError(
                "reset_workspace_buffer(): a CUDA graph has captured a run(), which holds on to "
                "the workspaces; construct another wrapper"
            )
        self._settle()
        self._decode.reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)
        self._joints.forget()

    def _settle(self) -> None:
        """Called before the plan of the decode side alone is made again."""

    @property
    def device(self) -> torch.device:
        """Where the workspace and every tensor of run() are."""
        return self._decode.device

    @property
    def variant(self) -> str | None:
        """The id of the kernel of the last run(), or of both where they were two launches; before a
        run() that of the decode side alone, before plan() None."""
        last = self._joints.last
        return self._decode.variant if last is None else last.launch.id

    @property
    def launches(self) -> int | None:
        """How many the last run() was: 1, or 2 where no kernel takes both sides; None before."""
        last = self._joints.last
        return None if last is None else last.launch.launches

    @property
    def _backend(self) -> str:
        last = self._joints.last
        return self._decode._backend if last is None else last.launch.backend.name

    _indptr_type = torch.int32

    def __repr__(self) -> str:
        name, decode = type(self).__name__, self._decode
        where = f"kv_layout={decode._kv_layout!r}, device='{self.device}'"
        if decode._state.planned is None:
            return f"{name}(backend={decode._requested_backend!r}, {where}, not planned)"
        last = self._joints.last
        launches = "no run yet" if last is None else f"launches={last.launch.launches}"
        return (
            f"{name}(backend={self._backend!r}{decode._requested_backend.override}, "
            f"variant={self.variant!r}, {launches}, {where})"
        )

    def _mask(
        self, dense: torch.Tensor | None, packed: torch.Tensor | None, request: Request
    ) -> torch.Tensor:
        """The prefill side's mask of one run, checked and packed."""
        device_stream = self._decode._state.workspace.device_stream
        batch, given_packed = request.lengths.batch, packed is not None
        with of_side(SIDES[0]):
            mask = masks.check_mask(dense, packed, batch)
            masks.check_mask_device(mask, self.device)
            return masks.mask_of_run(mask, given_packed, batch, device_stream, side="_p")

    def _check_call(self, use_fp16_qk_reduction: Any, enable_pdl: Any) -> None:
        if check.traced():
            raise NotImplementedError(
                f"{type(self).__name__}.run() cannot be recorded by torch.compile, torch.export or "
                "make_fx; call it outside, or use the prefill and the decode wrapper, which can"
            )
        if use_fp16_qk_reduction is not False or enable_pdl is not None:
            check.permission("use_fp16_qk_reduction", use_fp16_qk_reduction)
            check.permission("enable_pdl", enable_pdl)
