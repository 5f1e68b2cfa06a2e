"""A device, as the kernel libraries number it, and torch's current stream on it."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from .. import _core


@functools.cache
def ordinal_of(device: torch.device) -> int:
    """The device as kernel libraries number it: -1 is the CPU."""
    return device.index if device.type == "cuda" else -1


def sent(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A CPU tensor on `device`, copied on its current stream. The host does not wait, and may
    change the tensor as soon as this returns."""
    if device.type == "cpu":
        return host
    # torch keeps the pinned copy until the stream has read it.
    pinned = torch.empty(host.shape, dtype=host.dtype, device="cpu", pin_memory=True)
    return pinned.copy_(host).to(device, non_blocking=True)


class DeviceStream:
    """Target of launches: a device and its current stream, which is 0 on the CPU."""

    # stream() returns the address of the stream that is current when it is called.
    __slots__ = ("_owner", "device", "ordinal", "stream")

    def __init__(self, device: torch.device) -> None:
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"tensors are on {device}; must be on the CPU or on a CUDA device")
        self.device = device
        self.ordinal = ordinal_of(device)
        self.stream: Callable[[], int] = int  # 0
        if self.ordinal >= 0:
            self.stream = functools.partial(torch._C._cuda_getCurrentRawStream, self.ordinal)
        self._owner: torch.cuda.Stream | None = None  # the last one of owner_stream()

    def is_capturing(self) -> bool:
        return self.ordinal >= 0 and torch.cuda.is_current_stream_capturing()

    def num_threads(self) -> int:
        """Threads of a launch on the CPU, the caller's included: those that torch would use now."""
        return torch.get_num_threads() if self.ordinal < 0 else 1

    def target(self) -> _core.LaunchTarget:
        """Target of a launch on the current stream."""
        return _core.LaunchTarget(self.ordinal, self.stream(), self.num_threads())

    def owner_stream(self) -> torch.cuda.Stream | None:
        """The current stream as an object, to tell torch's allocator who uses a tensor."""
        if self.ordinal < 0:
            return None
        owner = self._owner
        if owner is None or owner.cuda_stream != self.stream():
            self._owner = owner = torch.cuda.current_stream(self.device)
        return owner


# Cached DeviceStream of a device, for callers that need it in every call.
device_stream_of = functools.cache(DeviceStream)
