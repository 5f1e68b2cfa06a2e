"""Where a plan lies: the memory of its work list, and what its launches use beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .. import _core
from .._check import values as check
from .._check.arguments import PerHead
from .._check.request import Request
from .._device.buffers import Buffer


class Memory(NamedTuple):
    """What launches use beside the work list and the caller's tensors."""

    # The float workspace: for partials of split KV. Outputs keep out of it under every plan.
    partials: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    per_head: PerHead = PerHead()  # the caller's: of one run, like q
    mask_classes: torch.Tensor | None = None  # of a mask of one run, which that run fills

    def extras(self) -> _core.RunExtras | None:
        if self.mask is None and self.mask_classes is None and not self.per_head.given:
            return None
        tensors = {"mask_bits": self.mask, "mask_classes": self.mask_classes}
        tensors.update(self.per_head._asdict())
        addresses = {name: t.data_ptr() for name, t in tensors.items() if t is not None}
        return _core.RunExtras(**addresses) if addresses else None


class Captured(NamedTuple):
    """What CUDA graphs hold of the tensors of their runs, the largest of each: engines capture one
    run for every number of rows, and replay the one that a batch fits."""

    q_tokens: int
    kv_extent: int  # pages, or tokens where there are none
    page_size: int  # 0: ragged


class Place:
    """Memory for a work list. One plan at a time is there."""

    __slots__ = ("buffer", "captured", "device_plan", "held", "shared")

    def __init__(self, buffer: Buffer, uploader: _core.Uploader) -> None:
        self.buffer = buffer
        self.device_plan = _core.DevicePlan(uploader, buffer.tensor.data_ptr(), buffer.num_bytes)
        # Whether anybody else may still run what is here: a CUDA graph that captured it, a copied
        # wrapper.
        self.shared = False
        self.captured: Captured | None = None
        self.held: _core.HeldMemory | None = None  # what graphs hold the addresses of

    def hold(self, partials: torch.Tensor | None, float_bytes: int) -> None:
        """A CUDA graph has captured a run: from now on plans go where it looks for them."""
        self.shared = True
        self.held = _core.HeldMemory(
            check.TORCH,
            since="a CUDA graph has captured a run()",
            way_out="the graph holds its address: construct another wrapper",
        )
        work_list = self.buffer.tensor
        self.held.hold(
            "int_workspace_buffer", work_list, work_list.data_ptr(), self.buffer.num_bytes
        )
        if partials is not None:
            address = partials.data_ptr()
            self.held.hold("float_workspace_buffer", partials, address, float_bytes)


def held_memory(
    place: Place, requests: Sequence[Request], extras: _core.RunExtras | None = None
) -> _core.HeldMemory:
    """What a plan left in tensors that callers hold, too, and its runs look for there.

    extras: with the plan's own mask.
    """
    held = _core.HeldMemory.of_plan(check.TORCH, place.device_plan, place.buffer.tensor)
    for s, request in enumerate(requests):
        indices = request.page_indices
        if indices is not None:
            name = "paged_kv_indices_buf" if request.graph_rows else "paged_kv_indices"
            num_bytes = request.lengths.batch.kv_end * indices.itemsize
            held.hold(name, indices, place.device_plan.page_indices(s), num_bytes)
        if request.graph_rows and request.mask is not None:
            num_bytes = request.lengths.batch.mask_bytes
            held.hold("custom_mask_buf", request.mask, extras.mask_bits, num_bytes)
    return held
