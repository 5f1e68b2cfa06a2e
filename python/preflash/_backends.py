"""Backends: objects that say what they support, plan and run. Only they know a backend's name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Protocol

import torch

from . import _core
from . import _validate as check
from ._device_stream import ordinal_of
from ._options import Options, core_options


class Backend(Protocol):
    """One way to run a plan."""

    name: str

    def supports(self, device: torch.device, options: Options) -> str | None:
        """None, or the sentence that says why it cannot serve the options on this device."""

    def plan(
        self, device: torch.device, options: Options, batch: _core.Batch, float_bytes: int
    ) -> _core.Plan:
        """A plan that is counted and not uploaded.

        Raises ValueError for a device that is not the backend's and for a batch that is not well
        formed, NotImplementedError for options that no compiled kernel serves.
        """

    def runner(self, launch: _core.Launch) -> Callable[..., bool]:
        """The function that starts a prepared launch."""


class _KernelBackend:
    """The kernels of one family."""

    def __init__(self, name: str, family: _core.Family) -> None:
        self.name = name
        self._family = family

    def refusal(self, device: torch.device) -> str | None:
        """Why the backend cannot compute on this device at all, or None."""
        raise NotImplementedError

    def missing_kernel(self, options: Options) -> str | None:
        """Why no compiled kernel of the family serves the options, or None."""
        return _core.find_error(
            _core.Variant(
                family=self._family,
                q_dtype=check.CORE_DTYPES[options.q_dtype],
                kv_dtype=check.CORE_DTYPES[options.kv_dtype],
                head_dim_qk=options.head_dim_qk,
                head_dim_vo=options.head_dim_vo,
                logits=_core.Logits.softcap if options.logits_soft_cap else _core.Logits.plain,
                mask=_core.Mask.custom if options.custom_mask else _core.Mask.bounds,
            )
        )

    def supports(self, device: torch.device, options: Options) -> str | None:
        return self.refusal(device) or self.missing_kernel(options)

    def plan(
        self, device: torch.device, options: Options, batch: _core.Batch, float_bytes: int
    ) -> _core.Plan:
        refusal = self.refusal(device)
        if refusal is not None:
            raise ValueError(refusal)
        return _core.Plan(
            self._family,
            ordinal_of(device),
            core_options(options),
            batch,
            float_bytes,
        )

    def runner(self, launch: _core.Launch) -> Callable[..., bool]:
        return launch.run

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
    def refusal(self, device: torch.device) -> str | None:
        if device.type != "cpu":
            return f"backend='cpu' computes on CPU tensors; the workspace is on {device}"
        return _why_no_isa()

    def runner(self, launch: _core.Launch) -> Callable[..., bool]:
        run, threads = launch.run_on_threads, torch.get_num_threads

        def run_on_torch_threads(*arguments: float) -> bool:
            return run(threads(), *arguments)

        return run_on_torch_threads


class _CudaBackend(_KernelBackend):
    def __init__(self, name: str, family: _core.Family, capabilities: range) -> None:
        super().__init__(name, family)
        self._capabilities = capabilities

    def refusal(self, device: torch.device) -> str | None:
        if device.type != "cuda":
            return (
                f"backend={self.name!r} computes on CUDA tensors; the workspace is on {device}: "
                "use backend='auto' or 'cpu' there"
            )
        if compute_capability(device) not in self._capabilities:
            return (
                f"backend={self.name!r} does not run on {device}, which has compute capability "
                f"{compute_capability(device)}: use backend='auto'"
            )
        return None


class _Fa3Backend(_CudaBackend):
    def plan(
        self, device: torch.device, options: Options, batch: _core.Batch, float_bytes: int
    ) -> _core.Plan:
        # A build without sm90 kernels says so wherever it is asked, also on other devices.
        if self.refusal(device) is not None:
            missing = self.missing_kernel(options)
            if missing is not None:
                raise NotImplementedError(f"backend='fa3': {missing}")
        return super().plan(device, options, batch, float_bytes)


def compute_capability(device: torch.device) -> int:
    """Of a CUDA device: 90 for sm_90."""
    return _core.device_facts(device.index)["compute_capability"]


CPU = _CpuBackend("cpu", _core.Family.cpu)
FA2: Backend = _CudaBackend("fa2", _core.Family.sm80, range(80, 1000))
FA3: Backend = _Fa3Backend("fa3", _core.Family.sm90, range(90, 91))

_EXPLICIT = {backend.name: backend for backend in (FA2, FA3, CPU)}
NAMES = ("auto", *_EXPLICIT)


def check_name(name: object) -> str:
    """The `backend` argument of wrappers and functions."""
    if name == "cudnn":
        raise NotImplementedError(
            f"backend='cudnn' is not served by this build; use one of {', '.join(NAMES)}"
        )
    return check.one_of("backend", name, NAMES)


def candidates(name: str, device: torch.device) -> tuple[Backend, ...]:
    """The backends to try, best first. An explicit name is never replaced by another backend."""
    if name != "auto":
        return (_EXPLICIT[name],)
    if device.type == "cpu":
        return (CPU,)
    if device.type != "cuda":
        raise ValueError(f"no backend computes on {device}; use CPU or CUDA tensors")
    return (FA3, FA2) if compute_capability(device) == 90 else (FA2,)


def choose(name: str, device: torch.device, options: Options) -> Backend:
    """The first candidate that serves the options, or the last; its plan() then says why not."""
    *preferred, last = candidates(name, device)
    for backend in preferred:
        if backend.supports(device, options) is None:
            return backend
    return last
