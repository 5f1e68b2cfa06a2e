"""Checks whether this installation serves the GPUs of the machine, without making a CUDA context:
a process that has one cannot fork workers that use CUDA."""

from __future__ import annotations

import ctypes
import re
import warnings

import torch

from .. import _core

_SUCCESS = 0
# The first driver of each major CUDA version.
_DRIVERS = {12: "525", 13: "580"}


def warn_of_versions(version: str) -> None:
    """Warns where wheel, torch and driver do not go together, so that GPU kernels would fail.

    version: preflash.__version__.
    """
    sentence = version_mismatch(version, torch.version.cuda, _driver())
    if sentence is not None:
        warnings.warn(sentence, RuntimeWarning, stacklevel=3)


def version_mismatch(version: str, torch_cuda: str | None, driver: int | None) -> str | None:
    """Returns a sentence on CUDA versions that do not go together, or None.

    Args:
        version: "0.1.0+cu130" for a wheel; without "+cu" it was built on its machine.
        torch_cuda: torch.version.cuda.
        driver: the newest CUDA version that the driver serves, 13000 for 13.0; None: no driver.
    """
    found = re.search(r"\+cu(\d+)(\d)$", version)
    if torch_cuda is None or found is None:
        return None
    major, torch_major = int(found[1]), int(torch_cuda.split(".")[0])
    wheel = f"preflash {version} is built for CUDA {major}.{found[2]}"
    if driver is not None and driver // 1000 < major:
        serves = f"{driver // 1000}.{driver % 1000 // 10}"
        needed = f"driver {_DRIVERS[major]} or later" if major in _DRIVERS else "a newer driver"
        return (
            f"{wheel}; the NVIDIA driver serves CUDA {serves} at most, so no GPU can be used. "
            f"Install {needed}, or a wheel of preflash for CUDA {driver // 1000}"
        )
    if torch_major != major:
        return (
            f"{wheel}, torch {torch.__version__} for CUDA {torch_cuda}. "
            f"Install a wheel of preflash for CUDA {torch_major}, or a torch for CUDA {major}"
        )
    return None


def _driver() -> int | None:
    """The newest CUDA version that the driver serves, 13000 for 13.0; None: no driver."""
    version = ctypes.c_int()
    library = _library("libcuda.so.1")
    if library is None or library.cuDriverGetVersion(ctypes.byref(version)) != _SUCCESS:
        return None
    return version.value


def unserved() -> str | None:
    """Reason why no kernel of this build serves the GPUs that torch uses; None if one does, or if
    torch uses no GPU."""
    found = [] if torch.version.cuda is None else capabilities()
    if not found:
        return None
    gpus = ", ".join(f"sm {capability}" for capability in sorted(set(found)))
    compiled = [
        (traits, architectures)
        for family in _core.families()
        if not (traits := _core.traits_of(family)).on_cpu
        and (architectures := _core.architectures(family))
    ]
    if not compiled:
        why = _core.cuda_error() or "it has CPU kernels alone"
        return f"this build of preflash has no kernel for a GPU ({gpus}): {why}"
    for traits, architectures in compiled:
        if any(traits.runs_on(gpu) and _core.compiled_for(architectures, gpu) for gpu in found):
            return None
    built = "; ".join(f"{traits.backend} for sm {list_}" for traits, list_ in compiled)
    return f"no kernel of this build of preflash serves a GPU here ({gpus}): it has {built}"


def capabilities() -> list[int]:
    """The compute capability of each GPU: of the current one where this process uses CUDA, else of
    all that the driver's management library (NVML) lists."""
    if torch.cuda.is_initialized():
        major, minor = torch.cuda.get_device_capability()
        return [10 * major + minor]
    # device_count() knows CUDA_VISIBLE_DEVICES, and makes no context either.
    nvml = _library("libnvidia-ml.so.1") if torch.cuda.device_count() else None
    if nvml is None or nvml.nvmlInit_v2() != _SUCCESS:
        return []
    try:
        return _listed(nvml)
    finally:
        nvml.nvmlShutdown()


def _listed(nvml: ctypes.CDLL) -> list[int]:
    count, major, minor = ctypes.c_uint(), ctypes.c_int(), ctypes.c_int()
    if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != _SUCCESS:
        return []
    found = []
    for index in range(count.value):
        device = ctypes.c_void_p()
        if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) != _SUCCESS:
            continue
        numbers = (ctypes.byref(major), ctypes.byref(minor))
        if nvml.nvmlDeviceGetCudaComputeCapability(device, *numbers) == _SUCCESS:
            found.append(10 * major.value + minor.value)
    return found


def _library(name: str) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(name)
    except OSError:
        return None
