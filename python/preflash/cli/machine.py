"""Backends that this machine can run, and their devices."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from .. import _core
from .._check import validate
from .._device import backends
from .._plan import prepass
from . import CommandError

_BACKENDS = ("cpu", "fa2", "fa3")
_NO_GPU_KERNELS = (
    "this installation has the CPU backend alone, without GPU kernels; pip install with nvcc on "
    "PATH compiles them"
)


@dataclass(frozen=True)
class Place:
    """A backend on a device that can run it."""

    backend: str
    device: torch.device
    device_name: str

    @property
    def label(self) -> str:
        return f"{self.backend} on {self.device}"

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        on_cpu = (torch.float32,) if self.backend == "cpu" else ()
        return (torch.bfloat16, torch.float16, *on_cpu)

    def synchronize(self) -> None:
        """Waits for the device; the CPU has nothing to wait for."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def long_name(dtype: str) -> str:
    """Returns torch's name of a dtype given by either name: "bfloat16" for "bf16"; an unknown name
    as it is."""
    try:
        return str(validate.dtype("dtype", dtype)).removeprefix("torch.")
    except ValueError:
        return dtype


def has_gpu_kernels() -> bool:
    """True if this installation was built with GPU kernels; they may still fail to load."""
    return (Path(__file__).parents[1] / "lib" / "libpreflash_kernels_common.so").exists()


def gpu_kernels_absent() -> str:
    """Reason why no GPU kernels are loaded; empty if they are."""
    return _core.cuda_error() if has_gpu_kernels() else _NO_GPU_KERNELS


def gpu_absent() -> str:
    """Reason why no GPU can be used; empty if one can."""
    if error := gpu_kernels_absent():
        return error
    if not _core.cuda_device_count():
        return "no NVIDIA GPU or driver on this machine"
    if not torch.cuda.is_available():
        return "this torch cannot use the GPU (a CPU build, or a driver that is too old for it)"
    return ""


def cpu_refusal() -> str:
    """Reason why the CPU backend cannot be used; empty if it can."""
    device = torch.device("cpu")
    return backends.candidates("auto", device)[0].refusal(device) or ""


def places() -> list[Place]:
    """Every backend that can run here, the fastest first. Of several GPUs the current one."""
    devices = {torch.device("cpu"): "CPU"}
    if not gpu_absent():
        gpu = torch.device("cuda", torch.cuda.current_device())
        devices = {gpu: torch.cuda.get_device_name(gpu), **devices}
    compiled = {kernel["backend"] for kernel in _core.kernels()}
    return [
        Place(backend.name, device, name)
        for device, name in devices.items()
        for backend in backends.candidates("auto", device)
        if backend.name in compiled and backend.refusal(device) is None
    ]


def choose_places(backend: str | None) -> list[Place]:
    """All places, or those of one backend. Raises CommandError where it cannot run."""
    try:
        prepass.check_environment()
        override = backends.requested("auto").name
    except ValueError as error:
        raise CommandError(str(error)) from None
    asked = f"--backend {backend}"
    if override != "auto":  # it replaces every other one
        by_environment = f"{backends.OVERRIDE}={override} in the environment"
        if backend not in (None, override):
            raise CommandError(f"{asked}: {by_environment} replaces it; unset one of them")
        backend, asked = override, by_environment
    found = places()
    if backend is None and cpu_refusal():
        raise CommandError(cpu_refusal())
    if backend not in (None, *_BACKENDS):
        raise CommandError(f"{asked}: must be one of {', '.join(_BACKENDS)}")
    chosen = [place for place in found if backend in (None, place.backend)]
    if not chosen:
        here = ", ".join(place.backend for place in found) or "none"
        absent = cpu_refusal() if backend == "cpu" else gpu_absent()
        reason = f" ({absent})" if absent else ""
        raise CommandError(f"{asked} cannot run here{reason}; there is: {here}")
    return chosen
