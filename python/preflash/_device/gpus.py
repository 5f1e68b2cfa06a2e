"""Whether this build serves the GPUs of the machine, asked without a CUDA context: a process that
has one cannot fork workers that use CUDA."""

from __future__ import annotations

import ctypes

import torch

from .. import _core

_SUCCESS = 0


def unserved() -> str | None:
    """Why no kernel of this build serves the GPUs that torch uses; None where one does, and where
    torch uses no GPU."""
    if torch.version.cuda is None:
        return None
    found = capabilities()
    if not found:
        return None
    gpus = ", ".join(f"sm {capability}" for capability in sorted(set(found)))
    compiled = {
        family: architectures
        for family in _core.families()
        if not _core.traits_of(family).on_cpu and (architectures := _core.architectures(family))
    }
    if not compiled:
        why = _core.cuda_error() or "it has CPU kernels alone"
        return f"this build of preflash has no kernel for a GPU ({gpus}): {why}"
    for family, architectures in compiled.items():
        for capability in found:
            if _core.traits_of(family).runs_on(capability) and _core.compiled_for(
                architectures, capability
            ):
                return None
    built = "; ".join(
        f"{_core.traits_of(family).backend} for sm {list_}" for family, list_ in compiled.items()
    )
    return f"no kernel of this build of preflash serves a GPU here ({gpus}): it has {built}"


def capabilities() -> list[int]:
    """The compute capability of each GPU: of the current one where this process uses CUDA, else of
    all that the driver's management library (NVML) lists."""
    if torch.cuda.is_initialized():
        major, minor = torch.cuda.get_device_capability()
        return [10 * major + minor]
    if not torch.cuda.device_count():  # knows CUDA_VISIBLE_DEVICES, makes no context either
        return []
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return []
    if nvml.nvmlInit_v2() != _SUCCESS:
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
        if (
            nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) == _SUCCESS
            and nvml.nvmlDeviceGetCudaComputeCapability(
                device, ctypes.byref(major), ctypes.byref(minor)
            )
            == _SUCCESS
        ):
            found.append(10 * major.value + minor.value)
    return found
