"""What a plan is made for: the checked arguments of one call."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .. import _core
from .lengths import Lengths


class Request(NamedTuple):
    """What a plan is made for, checked as far as Python can see."""

    options: _core.AttentionOptions
    device: torch.device
    lengths: Lengths
    kv_layout: str
    mask: torch.Tensor | None  # owned and packed; None: absent, or brought by every run
    # CUDA graphs: the most query rows of any plan; 0: sizes are this batch's own.
    graph_rows: int = 0
    graph_mask_bytes: int = 0  # the most that the packed mask of any plan has
    # Of the queries of run(), which are converted to that of the options; None: they are not.
    q_given: torch.dtype | None = None
    # [num_requests] int32: the keys of each request when a run reads it, where the batch has upper
    # bounds; None: the batch has the lengths.
    kv_lens: torch.Tensor | None = None

    @property
    def qo_tokens(self) -> int:
        """At least; the q of a run may have more."""
        batch = self.lengths.batch
        return 0 if batch.are_bounds else batch.qo_end

    @property
    def kv_tokens(self) -> int:
        """Ragged: the tokens in use."""
        batch = self.lengths.batch
        return 0 if batch.are_bounds else batch.kv_end

    @property
    def page_size(self) -> int:
        """0: ragged."""
        return self.lengths.batch.page_size

    @property
    def largest_page(self) -> int | None:
        """None: not known, or ragged."""
        pages = self.lengths.pages
        return None if pages is None else pages.largest
