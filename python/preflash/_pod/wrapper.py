"""What both wrappers of prefill beside decode have in common."""

from __future__ import annotations

from typing import Any

import torch

from .._check import values as check
from .._check.request import Request
from .._run.segments import of_side
from .._wrap.paged import BatchPrefillWithPagedKVCacheWrapper
from .joint import SIDES, Asked, Joints, mask_of_run


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

    def end_forward(self) -> None:
        """Does nothing; kept for callers of older releases."""

    @property
    def device(self) -> torch.device:
        """Where the workspace and every tensor of run() are."""
        return self._decode.device

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._decode.is_cuda_graph_enabled

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

    @property
    def _window_left(self) -> int:
        return self._decode._window_left

    @property
    def _logits_soft_cap(self) -> float:
        return self._decode._logits_soft_cap

    @property
    def _sm_scale(self) -> float | None:
        return self._decode._sm_scale

    @property
    def _kv_layout(self) -> str:
        return self._decode._kv_layout

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

    def _asked(self, of: object, planned: Any, prefill: Request) -> Asked:
        """planned: the decode side."""
        request = planned.asked.request
        return Asked(of, prefill, planned.primary, request, self._decode._state.workspace)

    def _mask(
        self, dense: torch.Tensor | None, packed: torch.Tensor | None, request: Request
    ) -> torch.Tensor:
        """The prefill side's mask of one run."""
        with of_side(SIDES[0]):
            return mask_of_run(dense, packed, request, self._decode._state.workspace.device_stream)

    def _check_not_recorded(self) -> None:
        if check.traced():
            raise NotImplementedError(
                f"{type(self).__name__}.run() cannot be recorded by torch.compile, torch.export or "
                "make_fx; call it outside, or use the prefill and the decode wrapper, which can"
            )
