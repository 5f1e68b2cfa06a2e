"""Custom masks: checked, packed where dense, and kept in a buffer that kernels may overread."""

from __future__ import annotations

import torch

from . import _core
from . import _validate as check
from ._device_stream import DeviceStream

# Kernels read the bits of a row in words of 8 bytes; what lies behind the last request is zero.
PADDING = 16


def check_mask(
    custom_mask: torch.Tensor | None,
    packed_custom_mask: torch.Tensor | None,
    batch: _core.Batch,
    dense_shape: tuple[int, ...],
) -> torch.Tensor | None:
    """The mask that counts, of the size that the batch needs. The packed form takes precedence."""
    if packed_custom_mask is not None:
        mask = check.tensor("packed_custom_mask", packed_custom_mask)
        if mask.dtype != torch.uint8:
            raise TypeError(f"packed_custom_mask is {mask.dtype}; must be torch.uint8")
        check.has_shape(
            "packed_custom_mask",
            mask,
            (batch.mask_bytes,),
            "sum of ceil(qo_len * kv_len / 8), every request starts on a byte (segment_packbits)",
        )
        return mask
    if custom_mask is None:
        return None
    mask = check.tensor("custom_mask", custom_mask)
    if mask.dtype not in (torch.bool, torch.uint8):
        raise TypeError(f"custom_mask is {mask.dtype}; must be torch.bool or torch.uint8")
    check.has_shape("custom_mask", mask, dense_shape, "one element per query and key, True keeps")
    return mask


def check_mask_device(mask: torch.Tensor, device: torch.device) -> None:
    if mask.device.type != "cpu" and mask.device != device:
        raise ValueError(f"the custom mask is on {mask.device}; must be on {device} or on the CPU")


def owned_mask(
    mask: torch.Tensor, packed: bool, batch: _core.Batch, device_stream: DeviceStream
) -> torch.Tensor:
    """A packed copy on the stream's device: later changes by the caller do not reach the plan."""
    buffer = torch.zeros(batch.mask_bytes + PADDING, dtype=torch.uint8, device=device_stream.device)
    mask = mask.to(device_stream.device)
    if packed:
        buffer[: batch.mask_bytes].copy_(mask)
        return buffer
    mask = mask.contiguous()
    segments = torch.empty(2 * (batch.num_requests + 1), dtype=torch.int64, device="cpu")
    batch.write_mask_segments(check.address(segments))
    pack_segments(mask, buffer, segments.to(device_stream.device), device_stream, little=True)
    return buffer


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
