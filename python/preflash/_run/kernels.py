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
from .variant import PlannedVariant, place_in


class KernelBackend:
    """The kernels of one family."""

    num_threads: Callable[[], int] | None = None  # asked for every launch; None: not on the CPU
    # For tests that record launches: called with the function that starts a launch, in its place.
    # Returns, as that function does, whether a CUDA graph captured the launch.
    launched_by: Callable[[Callable[[], bool]], bool] | None = None

    def __init__(self, family: _core.Family) -> None:
        self._family = family
        self._traits = _core.traits_of(family)
        self.name: str = self._traits.backend

    def refusal(self, device: torch.device) -> str | None:
        """Why the backend cannot compute on this device at all, or None."""
        raise NotImplementedError

    def missing_kernel(self, options: _core.AttentionOptions) -> str | None:
        """Why no compiled kernel of the family serves the options, or None."""
        return _core.find_error(self._family, options)

    def supports(self, device: torch.device, options: _core.AttentionOptions) -> str | None:
        """None, or the sentence that says why it cannot serve the options on this device."""
        return self.refusal(device) or self.missing_kernel(options)

    def separates(
        self,
        device: torch.device,
        first: _core.AttentionOptions,
        second: _core.AttentionOptions,
    ) -> str | None:
        """None, or the sentence that says why it cannot run both in one launch."""
        return self.refusal(device) or _core.find_joint_error(self._family, first, second)

    def faster_apart(
        self,
        prefill: tuple[_core.AttentionOptions, _core.Batch],
        decode: tuple[_core.AttentionOptions, _core.Batch],
    ) -> bool:
        """Whether one launch for both is expected to take more time than two."""
        return _core.faster_apart(self._family, *prefill, *decode)

    def plan(
        self,
        device: torch.device,
        options: _core.AttentionOptions,
        batch: _core.Batch,
        room: backends.PlanRoom,
    ) -> _core.Plan:
        refusal = self.refusal(device)
        if refusal is not None:
            raise self._refused(refusal, options)
        return _core.plan(self._family, ordinal_of(device), options, batch, *room)

    def place(
        self,
        workspace: Workspace,
        plan: _core.Plan,
        request: Request,
        where: _core.Place | None = None,
    ) -> PlannedVariant:
        if where is None:
            where = place_in(workspace.int_buffer(plan.int_bytes), workspace)
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
            raise ValueError(refusal)
        return _core.Plan.of_segments(self._family, ordinal_of(device), segments, float_bytes)

    def _refused(self, refusal: str, options: _core.AttentionOptions) -> Exception:
        """What plan() raises on a device that is not the backend's."""
        return ValueError(refusal)

    def __repr__(self) -> str:
        return f"<preflash backend {self.name!r}>"


@functools.cache
def _why_no_isa() -> str | None:
    """What is wrong with PREFLASH_CPU_ISA, which is read once."""
    try:
        _core.cpu_isa()
    except ValueError as error:
        return str(error)
    return None


class CpuBackend(KernelBackend):
    num_threads = staticmethod(torch.get_num_threads)

    @functools.cache  # noqa: B019, backends live as long as the process
    def refusal(self, device: torch.device) -> str | None:
        if device.type != "cpu":
            return f"backend='cpu' computes on CPU tensors; the workspace is on {device}"
        return _why_no_isa()


class CudaBackend(KernelBackend):
    @functools.cache  # noqa: B019
    def refusal(self, device: torch.device) -> str | None:
        if device.type != "cuda":
            return (
                f"backend={self.name!r} computes on CUDA tensors; the workspace is on {device}: "
                "use backend='auto' or 'cpu' there"
            )
        if not self._traits.runs_on(backends.compute_capability(device)):
            return (
                f"backend={self.name!r} does not run on {device}, which has compute capability "
                f"{backends.compute_capability(device)}: use backend='auto'"
            )
        return None

    def _refused(self, refusal: str, options: _core.AttentionOptions) -> Exception:
        # A build without an architecture's kernels says so on every device.
        if self._traits.one_architecture:
            missing = self.missing_kernel(options)
            if missing is not None:
                return NotImplementedError(f"backend={self.name!r}: {missing}")
        return super()._refused(refusal, options)


def backend_of(family: _core.Family) -> KernelBackend:
    on_cpu = _core.traits_of(family).on_cpu
    return CpuBackend(family) if on_cpu else CudaBackend(family)
