"""Packing of masks into bits."""

from __future__ import annotations

import torch

from ._check import torch_modes, validate
from ._device.stream import DeviceStream, sent
from ._plan import masks

__all__ = ["packbits", "segment_packbits"]

_BIT_ORDERS = ("big", "little")


def packbits(x: torch.Tensor, bitorder: str = "big") -> torch.Tensor:
    """Packs n elements into ceil(n / 8) bytes, like numpy.packbits; pad bits are 0.

    Args:
        x: [n] of any dtype, on the CPU or a GPU; what is not zero is a 1.
        bitorder: "big": element 0 is the highest bit of byte 0; "little": the lowest, which is what
            packed_custom_mask takes.

    Returns:
        [ceil(n / 8)] uint8 on x's device.

    Raises:
        TypeError, ValueError: an argument is wrong.
        NotImplementedError: torch.jit.trace is recording.
    """
    if torch_modes.traced():
        return torch.ops.preflash.packbits(x, bitorder)
    little = validate.one_of("bitorder", bitorder, _BIT_ORDERS) == "little"
    x = _elements(x)
    segments = torch.tensor([0, x.numel(), 0, -(-x.numel() // 8)], dtype=torch.int64, device="cpu")
    return _pack(x, segments, little)


def segment_packbits(
    x: torch.Tensor, indptr: torch.Tensor, bitorder: str = "big"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Packs every segment x[indptr[i] : indptr[i + 1]] into bytes of its own.

    Args:
        x: [n] of any dtype, on the CPU or a GPU; what is not zero is a 1.
        indptr: [num_segments + 1] int32 or int64, rising from 0 or more to at most n, on the CPU
            or on x's device. One on the GPU costs a wait for it, because the result's size depends
            on it.
        bitorder: "big" or "little", as in packbits.

    Returns:
        packed: [sum of ceil(length / 8)] uint8 on x's device.
        new_indptr: [num_segments + 1] int32 on indptr's device, first byte of each segment.

    Raises as packbits().
    """
    if torch_modes.traced():
        return torch.ops.preflash.segment_packbits(x, indptr, bitorder)
    little = validate.one_of("bitorder", bitorder, _BIT_ORDERS) == "little"
    x = _elements(x)
    validate.conforms("indptr", indptr, "segment_indptr", x.device, {"num_segments + 1": 1})
    begin = indptr.cpu().to(torch.int64)
    lengths = begin.diff()
    if bool((lengths < 0).any()) or int(begin[0]) < 0 or int(begin[-1]) > x.numel():
        raise ValueError(
            f"indptr goes from {int(begin[0])} to {int(begin[-1])} with a smallest step of "
            f"{int(lengths.min()) if lengths.numel() else 0}; must rise from 0 or more to at most "
            f"{x.numel()}, the elements of x"
        )
    packed_begin = torch.nn.functional.pad(((lengths + 7) // 8).cumsum(0), (1, 0))
    packed = _pack(x, torch.cat([begin, packed_begin]), little)
    return packed, packed_begin.to(torch.int32).to(indptr.device)


def _elements(x: torch.Tensor) -> torch.Tensor:
    torch_modes.not_traced()
    validate.tensor("x", x)
    if x.dim() != 1:
        raise ValueError(f"x has shape {tuple(x.shape)}; must be one-dimensional")
    if x.is_quantized:
        raise TypeError(f"x is {x.dtype}; must not be quantized: pass dequantize() or int_repr()")
    if x.dtype not in (torch.bool, torch.uint8):
        x = x != 0
    return x.contiguous()


def _pack(x: torch.Tensor, segments: torch.Tensor, little: bool) -> torch.Tensor:
    device_stream = DeviceStream(x.device)
    packed = torch.empty(int(segments[-1]), dtype=torch.uint8, device=x.device)
    if packed.numel() > 0:
        segments = sent(segments, x.device)
        masks.pack_segments(x, packed, segments, device_stream, little=little)
    return packed
