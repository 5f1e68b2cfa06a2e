"""Backends, each a family of kernels: which one serves a device and options."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from .. import _core
from .._check import values as check


class Backend(Protocol):
    """The kernels of one family, which plan batches, place plans and run: _run.kernels."""

    name: str
    num_threads: Callable[[], int] | None
    launched_by: Callable[[Callable[[], bool]], bool] | None
    supports: Callable[[torch.device, _core.AttentionOptions], str | None]
    plan: Callable[..., _core.Plan]
    place: Callable[..., Any]  # a _run.variant.PlannedVariant


@functools.cache  # plan() asks more than once, and the facts of a device come as a dict
def compute_capability(device: torch.device) -> int:
    """90 for sm_90; 0 is the CPU."""
    if device.type == "cpu":
        return 0
    return _core.device_facts(device.index)["compute_capability"]


_EXPLICIT: dict[str, Backend] = {}
NAMES = ("auto", *(_core.traits_of(family).backend for family in _core.families()))
CUDNN = "cudnn"  # cuDNN's forms of arguments, and otherwise "auto"
OVERRIDE = "PREFLASH_BACKEND"
# Names that engines write into their code, of kernels of other packages.
FOREIGN = ("cute-dsl", "cutlass", "trtllm-gen", "xqa")


def register(backend: Backend) -> None:
    """Makes a backend the one of its name, which the traits of a family of kernels tell."""
    _EXPLICIT[backend.name] = backend


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
            check.one_of("backend", name, names)
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
    name = check.one_of("backend", name, names)
    return Requested("auto" if name == CUDNN else name)


def candidates(name: str, device: torch.device) -> tuple[Backend, ...]:
    """The backends to try, best first. An explicit name is never replaced by another backend."""
    return _preferred(device) if name == "auto" else (_EXPLICIT[name],)


@functools.cache
def _preferred(device: torch.device) -> tuple[Backend, ...]:
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"no backend computes on {device}; use CPU or CUDA tensors")
    families = _core.families_for(compute_capability(device))
    return tuple(_EXPLICIT[_core.traits_of(family).backend] for family in families)


def choose(name: str, device: torch.device, *options: _core.AttentionOptions) -> Backend:
    """The first candidate that serves the options, those of each segment, or the last; its plan()
    then says why not."""
    if name != "auto":
        return _EXPLICIT[name]
    *others, last = _preferred(device)
    for backend in others:
        if all(backend.supports(device, one) is None for one in options):
            return backend
    return last
