"""Backends: objects that say what they support, plan and run. Only they know a backend's name."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from .. import _core
from .._check import values as check
from .stream import ordinal_of


class PlanRoom(NamedTuple):
    """What a plan may take."""

    float_bytes: int
    graph_rows: int = 0  # query rows that later plans of a CUDA graph may have; 0: none will come
    graph_mask_bytes: int = 0  # the same of the packed mask


class Backend(Protocol):
    """One way to run a plan."""

    name: str

    def refusal(self, device: torch.device) -> str | None:
        """Why the backend cannot compute on this device at all, or None."""

    def supports(self, device: torch.device, options: _core.AttentionOptions) -> str | None:
        """None, or the sentence that says why it cannot serve the options on this device."""

    def separates(
        self,
        device: torch.device,
        first: _core.AttentionOptions,
        second: _core.AttentionOptions,
    ) -> str | None:
        """None, or the sentence that says why it cannot run both in one launch."""

    def faster_apart(
        self,
        prefill: tuple[_core.AttentionOptions, _core.Batch],
        decode: tuple[_core.AttentionOptions, _core.Batch],
    ) -> bool:
        """Whether one launch for both is expected to take more time than two."""

    def plan(
        self,
        device: torch.device,
        options: _core.AttentionOptions,
        batch: _core.Batch,
        room: PlanRoom,
    ) -> _core.Plan:
        """A plan that is counted and not uploaded.

        Raises ValueError for a device that is not the backend's and for a batch that is not well
        formed, NotImplementedError for options that no compiled kernel serves.
        """

    def plan_segments(
        self,
        device: torch.device,
        segments: list[tuple[_core.AttentionOptions, _core.Batch, int]],
        float_bytes: int,
    ) -> _core.Plan:
        """The same for one launch of several segments."""

    @property
    def num_threads(self) -> Callable[[], int] | None:
        """Asked for every launch; None: not on the CPU."""

    def runner(self, launch: _core.Launch, memory: _core.HeldMemory) -> Callable[..., bool]:
        """The function that starts a prepared launch."""

    def runner_of_segments(
        self, launch: _core.Launch, memory: _core.HeldMemory
    ) -> Callable[..., bool]:
        """The same of a launch of several segments."""


class _KernelBackend:
    """The kernels of one family."""

    num_threads: Callable[[], int] | None = None

    def __init__(self, family: _core.Family) -> None:
        self._family = family
        self._traits = _core.traits_of(family)
        self.name: str = self._traits.backend

    def refusal(self, device: torch.device) -> str | None:
        raise NotImplementedError

    def missing_kernel(self, options: _core.AttentionOptions) -> str | None:
        """Why no compiled kernel of the family serves the options, or None."""
        return _core.find_error(self._family, options)

    def supports(self, device: torch.device, options: _core.AttentionOptions) -> str | None:
        return self.refusal(device) or self.missing_kernel(options)

    def separates(
        self,
        device: torch.device,
        first: _core.AttentionOptions,
        second: _core.AttentionOptions,
    ) -> str | None:
        return self.refusal(device) or _core.find_joint_error(self._family, first, second)

    def faster_apart(
        self,
        prefill: tuple[_core.AttentionOptions, _core.Batch],
        decode: tuple[_core.AttentionOptions, _core.Batch],
    ) -> bool:
        return _core.faster_apart(self._family, *prefill, *decode)

    def plan(
        self,
        device: torch.device,
        options: _core.AttentionOptions,
        batch: _core.Batch,
        room: PlanRoom,
    ) -> _core.Plan:
        refusal = self.refusal(device)
        if refusal is not None:
            raise self._refused(refusal, options)
        return _core.Plan(self._family, ordinal_of(device), options, batch, *room)

    def plan_segments(
        self,
        device: torch.device,
        segments: list[tuple[_core.AttentionOptions, _core.Batch, int]],
        float_bytes: int,
    ) -> _core.Plan:
        refusal = self.refusal(device)
        if refusal is not None:
            raise ValueError(refusal)
        return _core.Plan.of_segments(self._family, ordinal_of(device), segments, float_bytes)

    def _refused(self, refusal: str, options: _core.AttentionOptions) -> Exception:
        """What plan() raises on a device that is not the backend's."""
        return ValueError(refusal)

    def runner(self, launch: _core.Launch, memory: _core.HeldMemory) -> Callable[..., bool]:
        return launch.starter(memory, self.num_threads)

    def runner_of_segments(
        self, launch: _core.Launch, memory: _core.HeldMemory
    ) -> Callable[..., bool]:
        return functools.partial(launch.run_segments, memory)

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


class _CpuBackend(_KernelBackend):
    num_threads = staticmethod(torch.get_num_threads)

    @functools.cache  # noqa: B019, backends live as long as the process
    def refusal(self, device: torch.device) -> str | None:
        if device.type != "cpu":
            return f"backend='cpu' computes on CPU tensors; the workspace is on {device}"
        return _why_no_isa()


class _CudaBackend(_KernelBackend):
    @functools.cache  # noqa: B019
    def refusal(self, device: torch.device) -> str | None:
        if device.type != "cuda":
            return (
                f"backend={self.name!r} computes on CUDA tensors; the workspace is on {device}: "
                "use backend='auto' or 'cpu' there"
            )
        if not self._traits.runs_on(compute_capability(device)):
            return (
                f"backend={self.name!r} does not run on {device}, which has compute capability "
                f"{compute_capability(device)}: use backend='auto'"
            )
        return None

    def _refused(self, refusal: str, options: _core.AttentionOptions) -> Exception:
        # A build without the kernels of one architecture says so wherever it is asked for them,
        # also on other devices.
        if self._traits.one_architecture:
            missing = self.missing_kernel(options)
            if missing is not None:
                return NotImplementedError(f"backend={self.name!r}: {missing}")
        return super()._refused(refusal, options)


@functools.cache  # plan() asks more than once, and the facts of a device come as a dict
def compute_capability(device: torch.device) -> int:
    """90 for sm_90; 0 is the CPU."""
    if device.type == "cpu":
        return 0
    return _core.device_facts(device.index)["compute_capability"]


def _backend(family: _core.Family) -> Backend:
    on_cpu = _core.traits_of(family).on_cpu
    return _CpuBackend(family) if on_cpu else _CudaBackend(family)


_OF_FAMILY = {family: _backend(family) for family in _core.families()}
_EXPLICIT = {backend.name: backend for backend in _OF_FAMILY.values()}
NAMES = ("auto", *_EXPLICIT)
CUDNN = "cudnn"  # no family of kernels of this package
OVERRIDE = "PREFLASH_BACKEND"


class Requested(NamedTuple):
    """The backend to use, and what the caller asked for where the environment overrides it."""

    name: str
    overridden: str | None = None

    @property
    def override(self) -> str:
        """Said in a repr behind the backend."""
        if self.overridden is None:
            return ""
        return f" ({OVERRIDE}={self.name} instead of {self.overridden!r})"

    def __repr__(self) -> str:
        return f"{self.name!r}{self.override}"


def requested(name: object, *, with_cudnn: bool = False) -> Requested:
    """The `backend` argument, unless the environment overrides it: serving engines write backend
    names into their code, where their users cannot reach them.

    with_cudnn: "cudnn" is a choice, too.
    """
    override = os.environ.get(OVERRIDE)
    if not override:
        return Requested(_checked_name(name, with_cudnn))
    if not isinstance(name, str):
        check.one_of("backend", name, _names(with_cudnn))
    if override not in NAMES:
        raise ValueError(
            f"{OVERRIDE}={override!r} in the environment: must be unset, or one of "
            f"{', '.join(NAMES)}"
        )
    return Requested(override, None if override == name else name)


def _names(with_cudnn: bool) -> tuple[str, ...]:
    return (*NAMES, CUDNN) if with_cudnn else NAMES


def _checked_name(name: object, with_cudnn: bool) -> str:
    if name == CUDNN and not with_cudnn:
        raise NotImplementedError(
            "backend='cudnn' is served by cudnn_batch_prefill_with_kv_cache and by the paged and "
            f"the ragged batch wrapper; use one of {', '.join(NAMES)}"
        )
    return check.one_of("backend", name, _names(with_cudnn))


def candidates(name: str, device: torch.device) -> tuple[Backend, ...]:
    """The backends to try, best first. An explicit name is never replaced by another backend."""
    return _preferred(device) if name == "auto" else (_EXPLICIT[name],)


@functools.cache
def _preferred(device: torch.device) -> tuple[Backend, ...]:
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"no backend computes on {device}; use CPU or CUDA tensors")
    families = _core.families_for(compute_capability(device))
    return tuple(_OF_FAMILY[family] for family in families)


def choose(name: str, device: torch.device, *options: _core.AttentionOptions) -> Backend:
    """The first candidate that serves the options, those of each segment, or the last; its plan()
    then says why not."""
    if name != "auto":
        return _EXPLICIT[name]
    preferred = _preferred(device)
    for backend in preferred:
        if all(backend.supports(device, one) is None for one in options):
            return backend
    return preferred[-1]
