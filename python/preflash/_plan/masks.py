"""Custom masks: checked, packed where dense, and kept in a buffer that kernels may overread. Masks
that calls describe in fewer numbers are written out before: [qo_len, kv_len] of every request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .. import _core
from .._check import validate
from .._check.arguments import Items
from .._device.stream import DeviceStream, sent

# Kernels read the bits of a row in words of 8 bytes; bytes after the last request are zero.
PADDING = 16
OVERREAD = 8
DENSE_DTYPES = (torch.bool, torch.uint8, torch.int32, torch.int64, torch.int16, torch.int8)

# Returns the mask of one request, [qo_len, kv_len], from the request's number, the positions of its
# queries among its keys, [qo_len, 1], and those of its keys, [1, kv_len].
Keeps = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]


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
        batch.write_mask_segments(validate.address(segments))
        segments = sent(segments, device_stream.device)
        pack_segments(values, buffer, segments, device_stream, little=True)


def check_mask(
    custom_mask: torch.Tensor | None,
    packed_custom_mask: torch.Tensor | None,
    batch: _core.Batch,
) -> torch.Tensor | None:
    """Returns the checked mask, flat and cut to what the batch needs; the packed one comes first.

    Callers pass buffers of any shape that are longer than one batch needs.
    """
    if packed_custom_mask is not None:
        name, given, count = "packed_custom_mask", packed_custom_mask, batch.mask_bytes
        dtypes, wanted = (torch.uint8,), "torch.uint8"
        meaning = "sum of ceil(qo_len * kv_len / 8), every request starts on a byte"
        meaning += " (segment_packbits)"
    elif custom_mask is not None:
        name, given, count = "custom_mask", custom_mask, batch.mask_elements
        dtypes, wanted = DENSE_DTYPES, "torch.bool, or an integer dtype, of which all but 0 keeps"
        meaning = "one element per query and key of every request, True keeps"
    else:
        return None
    validate.custom_mask(name, given)
    mask = validate.tensor(name, given)
    if name == "packed_custom_mask" and mask.dtype == torch.bool:
        raise TypeError("packed_custom_mask is torch.bool: pass a dense mask as custom_mask=")
    if mask.dtype not in dtypes:
        raise TypeError(f"{name} is {mask.dtype}; must be {wanted}")
    if mask.numel() < count:
        raise ValueError(
            f"{name} has shape {tuple(mask.shape)}, {mask.numel()} elements; must have at least "
            f"{count}: {meaning}"
        )
    if name == "packed_custom_mask" and mask.numel() == batch.mask_elements > count:
        raise ValueError(
            f"packed_custom_mask has {mask.numel()} elements, as many as a dense mask of these "
            f"requests, and {count} of them would be read as bits: pass a dense mask as "
            "custom_mask=, or pack it first, with bitorder='little': packbits(mask.flatten(), ...) "
            "of one request, segment_packbits(mask.flatten(), mask_indptr, ...)[0] of a batch"
        )
    return mask.reshape(-1)[:count].contiguous()


def check_rows(mask: torch.Tensor | None, rows: tuple[int, int]) -> None:
    """The mask of a single request may have any shape but that of another matrix, whose rows would
    be wrong when read flat."""
    if isinstance(mask, torch.Tensor) and validate.tensor("custom_mask", mask).dim() == 2:
        known = dict(zip(("qo_len", "kv_len"), rows, strict=True))
        validate.conforms("custom_mask", mask, "single_mask", known=known)


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
    """owned_mask() of one run, which a CUDA graph may capture. side: suffix of the argument."""
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
    params = _core.PackBitsParams(little)
    params.set_arrays(validate.address(x), validate.address(packed))
    params.set_segments(validate.address(segments), segments.numel() // 2 - 1)
    params.launch(device_stream.target())


# Multi-item scoring.


def items_of(a: Any) -> Items:
    return Items(*(getattr(a, name) for name in Items._fields))


def written_out(batch: _core.Batch, device: torch.device, keeps: Keeps) -> torch.Tensor:
    """The masks of all requests, flat bool, one request after the other."""
    sizes = [batch.qo_len(i) * batch.kv_len(i) for i in range(batch.num_requests)]
    mask = torch.empty(sum(sizes), dtype=torch.bool, device=device)
    begin = 0
    for request, size in enumerate(sizes):
        if size == 0:
            continue
        rows, columns = batch.qo_len(request), batch.kv_len(request)
        keys = torch.arange(columns, device=device)
        positions = torch.arange(columns - rows, columns, device=device)
        end = begin + size
        mask[begin:end].view(rows, columns).copy_(keeps(request, positions[:, None], keys[None]))
        begin = end
    return mask


def of_drafts(kept: torch.Tensor, batch: _core.Batch, device: torch.device) -> torch.Tensor:
    """The masks of a batch whose queries are drafts, flat bool. kept [num_requests, q_len, q_len]:
    which of its last q_len keys a request's queries keep; they keep all keys before."""
    kept = sent(kept, device) if device.type == "cuda" else kept
    q_len = kept.shape[-1]

    def keeps(request: int, positions: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        drafts = min(q_len, keys.numel())
        mask = torch.ones(positions.numel(), keys.numel(), dtype=torch.bool, device=device)
        mask[:, keys.numel() - drafts :] = kept[request, :, q_len - drafts :]
        return mask

    return written_out(batch, device, keeps)


_ALONE = Items._fields[1:]


def check_alone(a: Any) -> None:
    """Raises ValueError for arguments that need prefix_len_ptr, in a call without it."""
    for name in _ALONE:
        value = getattr(a, name)
        if name == "token_pos_in_items_len" and value is not None:
            value = validate.size(name, value) or None
        if value is not None:
            raise ValueError(f"{name} is given without prefix_len_ptr, which it goes with")


def _mask_of_items(a: Any, batch: _core.Batch, device: torch.device) -> torch.Tensor:
    """Builds the mask of multi-item scoring, for a plan() with prefix_len_ptr."""
    for name in ("custom_mask", "packed_custom_mask"):
        if getattr(a, name) is not None:
            raise ValueError(f"{name} is given with prefix_len_ptr, which is another mask")
    each = validate.size("token_pos_in_items_len", a.token_pos_in_items_len)
    requests = batch.num_requests
    prefix = _integers("prefix_len_ptr", a.prefix_len_ptr, requests, device)
    if a.max_item_len_ptr is not None:
        _integers("max_item_len_ptr", a.max_item_len_ptr, requests, device)
    if a.token_pos_in_items_ptr is None:
        raise ValueError("token_pos_in_items_ptr=None: must be given with prefix_len_ptr")
    in_items = _integers("token_pos_in_items_ptr", a.token_pos_in_items_ptr, 0, device)
    # Tokens without a position are delimiters, as is the last entry.
    in_items = torch.nn.functional.pad(in_items, (0, 1))

    def keeps(request: int, positions: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        first, begin = prefix[request], request * each
        entries = begin + positions - first
        end = min(begin + each, in_items.numel() - 1)
        last = in_items[torch.where((entries >= begin) & (entries < end), entries, -1)]
        in_prefix = (positions < first) | (keys < first)
        return (keys <= positions) & (in_prefix | (keys > positions - last))

    return written_out(batch, device, keeps)


def _integers(name: str, value: Any, count: int, device: torch.device) -> torch.Tensor:
    """Returns at least `count` integers, flat, as int64 on the device."""
    value = validate.conforms(name, value, "hints", device)
    if value.numel() < count:
        raise ValueError(f"{name} has shape {tuple(value.shape)}; must have {count} elements")
    return value.reshape(-1).to(device).to(torch.int64)


def source_of(a: Any, batch: _core.Batch, device: torch.device) -> MaskSource:
    """The mask of a plan() that has one."""
    if a.prefix_len_ptr is not None:
        mask = _mask_of_items(a, batch, device)
    else:
        check_alone(a)
        mask = check_mask(a.custom_mask, a.packed_custom_mask, batch)
    check_mask_device(mask, device)
    return MaskSource(mask, a.packed_custom_mask is not None)
