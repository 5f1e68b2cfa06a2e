"""Whether the wheel, torch and the NVIDIA driver go together, asked at import."""

from __future__ import annotations

import ctypes
import re
import warnings

import torch

# The first driver of each major CUDA version.
_DRIVERS = {12: "525", 13: "580"}


def warn(version: str) -> None:
    """Warns where GPU kernels of this wheel would fail; version: preflash.__version__."""
    if torch.version.cuda is None:
        return
    if sentence := complaint(version, torch.version.cuda, _driver()):
        warnings.warn(sentence, RuntimeWarning, stacklevel=3)


def complaint(version: str, torch_cuda: str, driver: int | None) -> str:
    """What does not go together, and the way out; empty where all does.

    Args:
        version: of preflash, "0.1.0+cu130" for a wheel; without "+cu" it was built on its machine.
        torch_cuda: torch.version.cuda, such as "13.0".
        driver: the newest CUDA version that the driver serves, 13000 for 13.0; None: no driver.
    """
    found = re.search(r"\+cu(\d+)(\d)$", version)
    if found is None:
        return ""
    major = int(found[1])
    torch_major = int(torch_cuda.split(".")[0])
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
    return ""


def _driver() -> int | None:
    """The newest CUDA version that the driver serves; initialises nothing."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int()
    return version.value if library.cuDriverGetVersion(ctypes.byref(version)) == 0 else None
