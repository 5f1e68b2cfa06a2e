"""Device memory that launches use beside the caller's tensors, and the streams that use it."""

from __future__ import annotations

import torch

from .stream import DeviceStream


class Buffer:
    """A tensor that torch's allocator must not hand out again while one of its streams uses it."""

    __slots__ = ("_streams", "num_bytes", "tensor")

    def __init__(self, tensor: torch.Tensor, owner: int | None = None) -> None:
        """owner: the stream that the tensor was allocated on; None: nobody knows."""
        self.tensor = tensor
        self.num_bytes = tensor.numel() * tensor.element_size()
        self._streams = {owner} if tensor.is_cuda else None

    @classmethod
    def allocate(cls, num_bytes: int, device_stream: DeviceStream) -> Buffer:
        """Fresh memory, which belongs to the current stream."""
        tensor = torch.empty(num_bytes, dtype=torch.uint8, device=device_stream.device)
        return cls(tensor, device_stream.stream())

    def is_free_on(self, stream: int) -> bool:
        """Whether whatever used it is over before what this stream does next."""
        return self._streams is None or self._streams == {stream}

    def order_behind_users(self, device_stream: DeviceStream) -> None:
        """What the current stream does from now on comes after whatever used the memory."""
        if self._streams is None:
            return
        device, current = device_stream.device, device_stream.stream()
        for stream in self._streams - {None, current}:
            if stream == 0:
                # NOTE: ExternalStream(0) is another stream, out of torch's pool. No capture has it.
                user, busy = torch.cuda.default_stream(device), False
            else:
                user = torch.cuda.ExternalStream(stream, device)
                with torch.cuda.stream(user):
                    busy = torch.cuda.is_current_stream_capturing()
            if not busy:  # or this stream would become part of the capture
                torch.cuda.current_stream(device).wait_stream(user)

    def used_on_current_stream(self, device_stream: DeviceStream) -> None:
        """Tells the allocator, the first time that a stream comes by."""
        if self._streams is None:  # on the CPU
            return
        stream = device_stream.stream()
        if stream not in self._streams:
            self.tensor.record_stream(device_stream.owner_stream())
            self._streams.add(stream)
