"""What a plan is made for: the checked arguments of one call."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .. import _core
from .lengths import Lengths
from .tensors import Expected


class Request(NamedTuple):
    """What a plan is made for, checked as far as Python can see."""

    options: _core.AttentionOptions
    lengths: Lengths
    kv_layout: str
    mask: torch.Tensor | None  # owned and packed; None: absent, or brought by every run
    # CUDA graphs: the most query rows of any plan; 0: sizes are this batch's own.
    graph_rows: int = 0
    graph_mask_bytes: int = 0  # the most that the packed mask of any plan has

    @property
    def mask_bits(self) -> int:
        """The address of bits that no run changes; 0: there are none. Those in a graph's buffer
        may be changed on the device after plan()."""
        return 0 if self.mask is None or self.graph_rows else self.mask.data_ptr()

    @property
    def page_indices(self) -> torch.Tensor | None:
        """Those on the device; others travel with the work list."""
        pages = self.lengths.pages
        return None if pages is None else pages.on_device


def expected_of(request: Request, device: torch.device) -> Expected:
    """What run() may find."""
    batch, pages = request.lengths
    largest_page = None if pages is None else pages.largest
    return Expected(request.options, device, request.kv_layout, batch, largest_page)
