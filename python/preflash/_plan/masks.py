"""Custom masks: checked, packed where dense, and kept in a buffer that kernels may overread."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .. import _core
from .._check import values as check
from .._device.stream import DeviceStream, sent

# Kernels read the bits of a row in words of 8 bytes; what lies behind the last request is zero.
PADDING = 16
OVERREAD = 8
DENSE_DTYPES = (torch.bool, torch.uint8, torch.int32, torch.int64, torch.int16, torch.int8)


class MaskSource(NamedTuple):
    """The mask of a plan() that has checked it: the caller's values, flat."""

    values: torch.Tensor
    packed: bool

    def write(self, buffer: torch.Tensor, batch: _core.Batch, device_stream: DeviceStream) -> None:
        """Puts the packed form into a uint8 buffer on the stream's device."""
        values = self.values
        if values.dtype.itemsize > 1:  # packed as bytes
            values = values != 0
        values = sent(values, device_stream.device) if values.is_cpu else values
        if self.packed:
            buffer[: batch.mask_bytes].copy_(values)
            return
        segments = torch.empty(2 * (batch.num_requests + 1), dtype=torch.int64, device="cpu")
        batch.write_mask_segments(check.address(segments))
        segments = sent(segments, device_stream.device)
        pack_segments(values, buffer, segments, device_stream, little=True)


def check_mask(
    custom_mask: torch.Tensor | None,
    packed_custom_mask: torch.Tensor | None,
    batch: _core.Batch,
) -> torch.Tensor | None:
    """As much of the mask that counts as the batch needs, flat; the packed form takes precedence.

    Callers hand over buffers of any shape that are longer than one batch needs.
    """
    if packed_custom_mask is not None:
        mask = check.tensor("packed_custom_mask", packed_custom_mask)
        if mask.dtype != torch.uint8:
            raise TypeError(f"packed_custom_mask is {mask.dtype}; must be torch.uint8")
        return _leading(
            "packed_custom_mask",
            mask,
            batch.mask_bytes,
            "sum of ceil(qo_len * kv_len / 8), every request starts on a byte (segment_packbits)",
        )
    if custom_mask is None:
        return None
    mask = check.tensor("custom_mask", custom_mask)
    if mask.dtype not in DENSE_DTYPES:
        raise TypeError(
            f"custom_mask is {mask.dtype}; must be torch.bool, or an integer dtype, of which all "
            "but 0 keeps"
        )
    return _leading(
        "custom_mask",
        mask,
        batch.mask_elements,
        "one element per query and key of every request, True keeps",
    )


def _leading(name: str, mask: torch.Tensor, count: int, meaning: str) -> torch.Tensor:
    if mask.numel() < count:
        raise ValueError(
            f"{name} has shape {tuple(mask.shape)}, {mask.numel()} elements; must have at least "
            f"{count}: {meaning}"
        )
    return mask.reshape(-1)[:count].contiguous()


def check_rows(mask: torch.Tensor | None, rows: tuple[int, int]) -> None:
    """The mask of a single request may have any shape but that of another matrix, whose rows would
    be wrong when read flat."""
    if isinstance(mask, torch.Tensor) and check.tensor("custom_mask", mask).dim() == 2:
        check.has_shape(
            "custom_mask",
            mask,
            rows,
            "[qo_len, kv_len], True keeps (a longer buffer is taken flat: flatten())",
        )


def check_mask_device(mask: torch.Tensor, device: torch.device) -> None:
    if mask.device.type != "cpu" and mask.device != device:
        raise ValueError(f"the custom mask is on {mask.device}; must be on {device} or on the CPU")


def owned_mask(
    mask: torch.Tensor, packed: bool, batch: _core.Batch, device_stream: DeviceStream
) -> torch.Tensor:
    """A packed copy on the stream's device: later changes by the caller do not reach the plan."""
    buffer = torch.zeros(batch.mask_bytes + PADDING, dtype=torch.uint8, device=device_stream.device)
    MaskSource(mask, packed).write(buffer, batch, device_stream)
    return buffer


def mask_of_run(
    mask: torch.Tensor,
    packed: bool,
    batch: _core.Batch,
    device_stream: DeviceStream,
    side: str = "",
) -> torch.Tensor:
    """owned_mask() of one run, which a CUDA graph may capture. side: behind the argument's name."""
    if device_stream.is_capturing() and not (packed and mask.is_cuda):
        raise RuntimeError(
            "a dense mask, or one on the CPU, cannot be packed while the stream is being captured "
            f"into a CUDA graph: pass packed_custom_mask{side} (packbits) on the GPU"
        )
    return owned_mask(mask, packed, batch, device_stream)


def pack_segments(
    x: torch.Tensor,
    packed: torch.Tensor,
    segments: torch.Tensor,
    device_stream: DeviceStream,
    *,
    little: bool,
) -> None:
    """Packs x [n]. segments [2, num_segments + 1] int64: first elements, then first bytes."""
    _core.pack_bits(
        x=check.address(x),
        packed=check.address(packed),
        segments=check.address(segments),
        num_segments=segments.numel() // 2 - 1,
        little=little,
        device=device_stream.ordinal,
        stream=device_stream.stream(),
        num_threads=device_stream.num_threads(),
    )
