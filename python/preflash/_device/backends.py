"""Backends, each a family of kernels: which one serves a device and options, and its plans."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import NamedTuple

import torch

from .. import _core
from .._check import validate
from .._check.request import Request
from .stream import ordinal_of

NAMES = ("auto", *(_core.traits_of(family).backend for family in _core.families()))
CUDNN = "cudnn"  # cuDNN's forms of arguments, and otherwise "auto"
OVERRIDE = "PREFLASH_BACKEND"
# Names that engines write into their code, of kernels of other packages.
FOREIGN = ("cute-dsl", "cutlass", "trtllm-gen", "xqa")


@functools.cache  # plan() asks more than once, and the facts of a device come as a dict
def compute_capability(device: torch.device) -> int:
    """90 for sm_90; 0 is the CPU."""
    if device.type == "cpu":
        return 0
    return _core.device_facts(device.index)["compute_capability"]


class Backend:
    """The kernels of one family."""

    num_threads: Callable[[], int] | None = None  # asked for every launch; None: not on the CPU
    # For tests that record launches: called with the function that starts a launch, in its place.
    # Returns, as that function does, whether a CUDA graph captured the launch.
    launched_by: Callable[[Callable[[], bool]], bool] | None = None

    refusal: Callable[[torch.device], str | None]  # why it cannot compute on a device at all

    def __init__(self, family: _core.Family) -> None:
        self.family = family
        self._traits = _core.traits_of(family)
        self.name: str = self._traits.backend

    def why_unsupported(self, device: torch.device, options: _core.AttentionOptions) -> str | None:
        """Reason why the kernels cannot serve the options on this device; None if a kernel covers
        them. Values, such as a head_dim of 12, are checked by plan() alone."""
        return self.refusal(device) or _core.find_error(self.family, options)

    def why_not_together(self, prefill: Request, decode: Request) -> str | None:
        """Reason why the kernels cannot run both in one launch; None if they can."""
        refusal = self.refusal(decode.device)
        return refusal or _core.find_joint_error(self.family, prefill.options, decode.options)

    def prefer_two_launches(self, prefill: Request, decode: Request) -> bool:
        """True if one launch for both is expected to take more time than two."""
        sides = ((side.options, side.batch) for side in (prefill, decode))
        return _core.prefer_two_launches(self.family, *sides)

    def plan(self, float_bytes: int, *requests: Request) -> _core.Plan:
        """The plan of one launch, for one batch or for two. Checks lengths and options, and raises
        what the public plan() says of them."""
        device = requests[0].device
        refusal = self.refusal(device)
        if refusal is not None:
            # A GPU of another architecture than fa3's: if this build has no kernel for the options
            # either, find_error() is raised, because it also names what would work.
            if self._traits.one_architecture and device.type == "cuda":
                missing = _core.find_error(self.family, requests[0].options)
                if missing is not None:
                    raise NotImplementedError(f"backend={self.name!r}: {missing}")
            raise ValueError(refusal + from_environment(self.name))
        segments = [(r.options, r.batch, r.graph_rows, r.graph_mask_bytes) for r in requests]
        return _core.plan(self.family, ordinal_of(device), segments, float_bytes)

    def __repr__(self) -> str:
        return f"<preflash backend {self.name!r}>"


class CpuBackend(Backend):
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


class CudaBackend(Backend):
    @functools.cache  # noqa: B019
    def refusal(self, device: torch.device) -> str | None:
        if device.type != "cuda":
            return (
                f"backend={self.name!r} computes on CUDA tensors, and the tensors of this call are "
                f"on {device}: pass backend='auto' or 'cpu', or CUDA tensors"
            )
        capability = compute_capability(device)
        if not self._traits.runs_on(capability):
            return (
                f"backend={self.name!r} does not run on {device}, which has compute capability "
                f"{capability}: use backend='auto'"
            )
        return None


_OF_FAMILY: dict[_core.Family, Backend] = {
    family: (CpuBackend if _core.traits_of(family).on_cpu else CudaBackend)(family)
    for family in _core.families()
}
_EXPLICIT = {backend.name: backend for backend in _OF_FAMILY.values()}


class Requested(NamedTuple):
    """The backend to use, and what the caller asked for where the environment overrides it."""

    name: str
    overridden: str | None = None

    @property
    def by_caller(self) -> str | None:
        """Backend that the caller named, even if PREFLASH_BACKEND replaced it; None after "auto"
        and "cudnn", which leave the choice to plan()."""
        name = self.overridden or self.name
        return None if name in ("auto", CUDNN) else name

    @property
    def override(self) -> str:
        """Said in a repr behind the backend."""
        if self.overridden is None:
            return ""
        return f" ({OVERRIDE}={self.name} instead of {self.overridden!r})"

    def __repr__(self) -> str:
        return f"{self.name!r}{self.override}"


def from_environment(name: str) -> str:
    """Returns how to get rid of a backend that the environment names, for the end of an error."""
    if os.environ.get(OVERRIDE) != name:
        return ""
    return f" ({OVERRIDE}={name} is in the environment: unset it)"


def requested(name: object, *, with_cudnn: bool = False) -> Requested:
    """The `backend` argument, unless the environment overrides it: serving engines write backend
    names into their code, where their users cannot reach them.

    with_cudnn: "cudnn" is a choice, too, and the same as "auto".
    """
    names = (*NAMES, CUDNN) if with_cudnn else NAMES
    if override := os.environ.get(OVERRIDE):
        if not isinstance(name, str):
            validate.one_of("backend", name, names)
        if override not in NAMES:
            raise ValueError(
                f"{OVERRIDE}={override!r} in the environment: must be unset, or one of "
                f"{', '.join(NAMES)}"
            )
        return Requested(override, None if override == name else name)
    if name == CUDNN and not with_cudnn:
        raise NotImplementedError(
            "backend='cudnn' is taken by cudnn_batch_prefill_with_kv_cache and by the paged and "
            f"the ragged batch wrapper; use one of {', '.join(NAMES)}"
        )
    if isinstance(name, str) and name in FOREIGN:
        raise ValueError(
            f"backend={name!r} has the kernels of another package; must be one of "
            f"{', '.join(names)}: pass backend='auto', or, where an engine passes the name, set "
            f"{OVERRIDE}=auto in the environment"
        )
    name = validate.one_of("backend", name, names)
    return Requested("auto" if name == CUDNN else name)


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
    *others, last = _preferred(device)
    for backend in others:
        if all(backend.why_unsupported(device, one) is None for one in options):
            return backend
    return last
