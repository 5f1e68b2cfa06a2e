"""The input of the planner: the checked arguments of one call, its batch and its options.

A request *of the batch* is something else: one of its sequences.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .. import _core
from .arguments import NO_ITEMS, Items
from .scales import Scales


class PageList(NamedTuple):
    """The page indices that the batch uses.

    given: the caller's array, which may be longer, and may change after plan(). on_device: where
    kernels read the indices; None: the plan's upload contains them.
    """

    given: torch.Tensor
    on_device: torch.Tensor | None
    largest: int | None  # None: not known without waiting for the GPU


class Request(NamedTuple):
    """Arguments of one call to be planned, checked as far as Python can see."""

    options: _core.AttentionOptions
    device: torch.device
    batch: _core.Batch  # the lengths of its requests
    pages: PageList | None  # None: ragged
    kv_layout: str
    mask: torch.Tensor | None = None  # owned and packed; None: none, or every run() passes its own
    # CUDA graphs: the maximum query rows of any plan; 0: sizes are this batch's own.
    graph_rows: int = 0
    graph_mask_bytes: int = 0  # CUDA graphs: the maximum packed-mask bytes of any plan
    # Dtype of run()'s queries if every run converts them to that of the options; else None.
    q_given: torch.dtype | None = None
    # [num_requests] int32: the keys of each request when a run reads it, where the batch has upper
    # bounds; None: the batch has the lengths.
    kv_lens: torch.Tensor | None = None
    scales: Scales | None = None  # of a run() without scales; None: every run() has scales
    causal: bool = False  # as given; in the options it is off with a custom mask
    logits_soft_cap: float = 0.0  # as given; in the options it is float32
    items: Items = NO_ITEMS
    prefill: Request | None = None  # BatchPODWithPagedKVCacheWrapper: the prefill side's

    @property
    def qo_tokens(self) -> int:
        """Minimum rows of q; the q of a run may have more."""
        return 0 if self.batch.lengths_are_upper_bounds else self.batch.qo_end

    @property
    def kv_tokens(self) -> int:
        """Tokens of k and v in use, for ragged K and V."""
        return 0 if self.batch.lengths_are_upper_bounds else self.batch.kv_end

    @property
    def page_size(self) -> int:
        """Tokens per page; 0 if ragged."""
        return self.batch.page_size

    @property
    def largest_page(self) -> int:
        """Largest page index; -1 if unknown or ragged."""
        return -1 if self.pages is None or self.pages.largest is None else self.pages.largest
