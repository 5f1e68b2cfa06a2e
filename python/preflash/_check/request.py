"""The input of the planner: the checked arguments of one call."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .. import _core
from .lengths import Lengths


class Request(NamedTuple):
    """Arguments of one call to be planned, checked as far as Python can see."""

    options: _core.AttentionOptions
    device: torch.device
    lengths: Lengths
    kv_layout: str
    mask: torch.Tensor | None  # owned and packed; None: no mask, or every run() passes its own
    # CUDA graphs: the maximum query rows of any plan; 0: sizes are this batch's own.
    graph_rows: int = 0
    graph_mask_bytes: int = 0  # CUDA graphs: the maximum packed-mask bytes of any plan
    # Dtype of run()'s queries if every run converts them to that of the options; else None.
    q_given: torch.dtype | None = None
    # [num_requests] int32: the keys of each request when a run reads it, where the batch has upper
    # bounds; None: the batch has the lengths.
    kv_lens: torch.Tensor | None = None

    @property
    def qo_tokens(self) -> int:
        """Minimum rows of q; the q of a run may have more."""
        batch = self.lengths.batch
        return 0 if batch.are_bounds else batch.qo_end

    @property
    def kv_tokens(self) -> int:
        """Tokens of k and v in use, for ragged K and V."""
        batch = self.lengths.batch
        return 0 if batch.are_bounds else batch.kv_end

    @property
    def page_size(self) -> int:
        """Tokens per page; 0 if ragged."""
        return self.lengths.batch.page_size

    @property
    def largest_page(self) -> int | None:
        """Largest page index; None if unknown or ragged."""
        pages = self.lengths.pages
        return None if pages is None else pages.largest
