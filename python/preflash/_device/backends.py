"""Backends: objects that plan a batch and place the plan. Only they know a backend's name."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from .. import _core
from .._check import values as check
from .._check.arguments import KvCache, PerHead, Result
from .._check.outputs import Outputs
from .._check.request import Request
from .._check.scales import Scales
from .buffers import Buffer
from .workspace import Workspace


class Plan(Protocol):
    """What a backend has decided for a batch, before it has memory."""

    id: str
    int_bytes: int  # of the work list; 0: there is none
    float_bytes: int
    has_prepass: bool  # which copies K or V


class Run(Protocol):
    """A plan that has its memory: run any number of times, for any layer."""

    plan: Plan
    backend: Backend
    request: Request
    place: _core.Place | None  # what upload() fills; None: nothing
    shared: bool  # whether anybody else may still run it: a CUDA graph, a copied wrapper
    int_buffer: Buffer  # what give_back() hands to the next plan
    buffers: Sequence[Buffer]  # all memory of ours, or of the plan's arguments, that its runs read
    # One run: q, kv, scales, outputs, memory. kv is (k, v), or one paged cache that holds both;
    # memory is of this call alone, from memory_with(); None: the plan's.
    attend_to: Callable[[torch.Tensor, KvCache, Scales, Outputs, Any], Result]
    # The plan's own memory, and what one run brings: its tensors of heads, its skip_factor.
    memory_with: Callable[[PerHead, float], Any]


class Backend(Protocol):
    """One way to plan and to run. Families of kernels, which "auto" chooses from, say more of
    themselves: _run.kernels."""

    name: str

    def plan(
        self,
        device: torch.device,
        options: _core.AttentionOptions,
        batch: _core.Batch,
        float_bytes: int,
        graph_rows: int = 0,
        graph_mask_bytes: int = 0,
    ) -> Plan:
        """A plan that is counted and not uploaded, of a float workspace of so many bytes.
        graph_rows: the query rows that later plans of a CUDA graph may have, 0: none will come;
        graph_mask_bytes: the same of the packed mask.

        Raises ValueError for a device that is not the backend's and for a batch that is not well
        formed, NotImplementedError for options that it does not serve.
        """

    def place(self, workspace: Workspace, plan: Plan, request: Request, where: Any = None) -> Run:
        """Gives a plan its memory. Nothing is written there before the upload.

        where: the place of an earlier plan, which a CUDA graph runs.
        """


@functools.cache  # plan() asks more than once, and the facts of a device come as a dict
def compute_capability(device: torch.device) -> int:
    """90 for sm_90; 0 is the CPU."""
    if device.type == "cpu":
        return 0
    return _core.device_facts(device.index)["compute_capability"]


_EXPLICIT: dict[str, Backend] = {}
NAMES = ("auto", *(_core.traits_of(family).backend for family in _core.families()))
CUDNN = "cudnn"  # no family of kernels of this package
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


def requested(name: object, *, with_cudnn: bool = False) -> Requested:
    """The `backend` argument, unless the environment overrides it: serving engines write backend
    names into their code, where their users cannot reach them.

    with_cudnn: "cudnn" is a choice, too.
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
            "backend='cudnn' is served by cudnn_batch_prefill_with_kv_cache and by the paged and "
            f"the ragged batch wrapper; use one of {', '.join(NAMES)}"
        )
    if isinstance(name, str) and name in FOREIGN:
        raise ValueError(
            f"backend={name!r} has the kernels of another package; must be one of "
            f"{', '.join(names)}: pass backend='auto', or, where an engine passes the name, set "
            f"{OVERRIDE}=auto in the environment"
        )
    return Requested(check.one_of("backend", name, names))


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
