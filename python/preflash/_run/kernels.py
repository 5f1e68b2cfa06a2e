"""The kernels of this package as backends: what each family supports, plans and runs."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from .. import _core
from .._check.request import Request
from .._device import backends
from .._device.stream import ordinal_of
from .._device.workspace import Workspace
from .variant import PlannedVariant

_Segment = tuple[_core.AttentionOptions, _core.Batch]
_Where = _core.Place | None


class KernelBackend:
    """The kernels of one family."""

    num_threads: Callable[[], int] | None = None  # asked for every launch; None: not on the CPU
    # For tests that record launches: called with the function that starts a launch, in its place.
    # Returns, as that function does, whether a CUDA graph captured the launch.
    launched_by: Callable[[Callable[[], bool]], bool] | None = None

    refusal: Callable[[torch.device], str | None]  # why it cannot compute on a device at all

    def __init__(self, family: _core.Family) -> None:
        self._family = family
        self._traits = _core.traits_of(family)
        self.name: str = self._traits.backend

    def supports(self, device: torch.device, options: _core.AttentionOptions) -> str | None:
        """Reason why the kernels cannot serve the options on this device; None if they can."""
        return self.refusal(device) or _core.find_error(self._family, options)

    def separates(self, device: torch.device, *both: _core.AttentionOptions) -> str | None:
        """Reason why the kernels cannot run both in one launch; None if they can."""
        return self.refusal(device) or _core.find_joint_error(self._family, *both)

    def faster_apart(self, prefill: _Segment, decode: _Segment) -> bool:
        """True if one launch for both is expected to take more time than two."""
        return _core.faster_apart(self._family, *prefill, *decode)

    def plan(
        self,
        device: torch.device,
        options: _core.AttentionOptions,
        batch: _core.Batch,
        float_bytes: int,
        graph_rows: int = 0,
        graph_mask_bytes: int = 0,
    ) -> _core.Plan:
        refusal = self.refusal(device)
        if refusal is not None:
            # A build without the kernels of one architecture says so on every GPU.
            asked = self._traits.one_architecture and device.type == "cuda"
            if asked and (missing := _core.find_error(self._family, options)) is not None:
                raise NotImplementedError(f"backend={self.name!r}: {missing}")
            raise ValueError(refusal + backends.from_environment(self.name))
        return _core.plan(
            self._family, ordinal_of(device), options, batch, float_bytes, graph_rows,
            graph_mask_bytes,
        )  # fmt: skip

    def place(
        self, workspace: Workspace, plan: _core.Plan, request: Request, where: _Where = None
    ) -> PlannedVariant:
        return PlannedVariant(plan, where, self, (request,), workspace)

    def plan_segments(
        self,
        device: torch.device,
        segments: list[tuple[_core.AttentionOptions, _core.Batch, int]],
        float_bytes: int,
    ) -> _core.Plan:
        """plan() for one launch of several segments."""
        refusal = self.refusal(device)
        if refusal is not None:
            raise ValueError(refusal + backends.from_environment(self.name))
        return _core.Plan.of_segments(self._family, ordinal_of(device), segments, float_bytes)

    def __repr__(self) -> str:
        return f"<preflash backend {self.name!r}>"


class CpuBackend(KernelBackend):
    num_threads = staticmethod(torch.get_num_threads)

    @functools.cache  # noqa: B019, backends live as long as the process
    def refusal(self, device: torch.device) -> str | None:
        if device.type != "cpu":
            return (
                f"backend='cpu' computes on CPU tensors, and the tensors of this call are on "
                f"{device}: pass backend='auto', or CPU tensors"
            )
        try:
            _core.cpu_isa()
        except ValueError as error:  # PREFLASH_CPU_ISA, which is read once
            return str(error)
        return None


class CudaBackend(KernelBackend):
    @functools.cache  # noqa: B019
    def refusal(self, device: torch.device) -> str | None:
        if device.type != "cuda":
            return (
                f"backend={self.name!r} computes on CUDA tensors, and the tensors of this call are "
                f"on {device}: pass backend='auto' or 'cpu', or CUDA tensors"
            )
        capability = backends.compute_capability(device)
        if not self._traits.runs_on(capability):
            return (
                f"backend={self.name!r} does not run on {device}, which has compute capability "
                f"{capability}: use backend='auto'"
            )
        return None
