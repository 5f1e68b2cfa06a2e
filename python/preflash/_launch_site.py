"""Where a launch happens: the device as kernel libraries number it, and torch's current stream."""

from __future__ import annotations

import torch


class LaunchSite:
    """Ordinal -1 is the CPU, whose stream is 0."""

    __slots__ = ("device", "ordinal")

    def __init__(self, device: torch.device) -> None:
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"tensors are on {device}; must be on the CPU or on a CUDA device")
        self.device = device
        self.ordinal = device.index if device.type == "cuda" else -1

    def stream(self) -> int:
        """The address of the stream that is current now."""
        return torch._C._cuda_getCurrentRawStream(self.ordinal) if self.ordinal >= 0 else 0

    def is_capturing(self) -> bool:
        """Whether the current stream is being captured into a CUDA graph."""
        return self.ordinal >= 0 and torch.cuda.is_current_stream_capturing()
    def num_threads(self) -> int:
        """Threads of a launch on the CPU, the caller's included: those that torch would use now."""
        return torch.get_num_threads() if self.ordinal < 0 else 1

    def owner_stream(self) -> torch.cuda.Stream | None:
        """The current stream as an object, to tell torch's allocator who uses a tensor."""
        return torch.cuda.current_stream(self.device) if self.ordinal >= 0 else None
