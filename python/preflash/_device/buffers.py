"""Device memory that launches use besides the caller's tensors, and the streams that use it."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from .. import _core
from .stream import DeviceStream


class Buffer:
    """A tensor that torch's allocator must not hand out again while one of its streams uses it."""

    __slots__ = ("_streams", "num_bytes", "tensor")

    def __init__(self, tensor: torch.Tensor, owner: int | None = None) -> None:
        """owner: the stream that the tensor was allocated on; None: unknown."""
        self.tensor = tensor
        self.num_bytes = tensor.numel() * tensor.element_size()
        self._streams = {owner} if tensor.is_cuda else None

    @classmethod
    def allocate(cls, num_bytes: int, device_stream: DeviceStream) -> Buffer:
        """Fresh memory, which belongs to the current stream."""
        tensor = torch.empty(num_bytes, dtype=torch.uint8, device=device_stream.device)
        return cls(tensor, device_stream.stream())

    def is_free_on(self, stream: int) -> bool:
        """True if all earlier uses end before the next operation of this stream."""
        return self._streams is None or self._streams == {stream}

    def used_on_current_stream(self, device_stream: DeviceStream) -> None:
        """Records the current stream with the allocator, on that stream's first use."""
        if self._streams is None:  # on the CPU
            return
        stream = device_stream.stream()
        if stream not in self._streams:
            self.tensor.record_stream(device_stream.owner_stream())
            self._streams.add(stream)


def order_behind_users(buffers: Iterable[Buffer], device_stream: DeviceStream) -> None:
    """Orders the current stream after all earlier uses of their memory. NOTE: not after a stream
    that is being captured: the current one would become part of the capture."""
    streams: set[int | None] = set()
    for buffer in buffers:
        streams |= buffer._streams or set()
    # NOTE: streams that an earlier call has waited for, too: a graph replay on one of them since
    # then is not visible here.
    for stream in streams - {None, device_stream.stream()}:
        if not _core.is_capturing(device_stream.ordinal, stream):
            device_stream.wait_for(stream)
