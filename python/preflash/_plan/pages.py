"""Page tables [batch_size, pages] as the lists of pages that plans are made of."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .._device.stream import sent


class ListedPages(NamedTuple):
    """int32; the first and the last on the CPU, where plan() reads them."""

    indptr: torch.Tensor  # [batch_size + 1]
    indices: torch.Tensor  # [indptr[-1]], one request after the other, where the table is
    last_page_len: torch.Tensor  # [batch_size]


def listed(table: torch.Tensor, kv_lens: torch.Tensor, page_size: int) -> ListedPages:
    """The pages of requests of these lengths, which are on the CPU. Rows of the table may be longer
    than their request."""
    starts = torch.arange(table.shape[0], device="cpu") * table.shape[1]
    return picked(table.reshape(-1), starts, kv_lens, page_size)


def picked(
    pages: torch.Tensor, starts: torch.Tensor, kv_lens: torch.Tensor, page_size: int
) -> ListedPages:
    """The same where the pages of each request begin at starts, on the CPU."""
    counts = (kv_lens + (page_size - 1)) // page_size
    indptr = torch.zeros(kv_lens.numel() + 1, dtype=torch.int32, device="cpu")
    indptr[1:] = counts.cumsum(0)
    last = torch.where(counts > 0, kv_lens - (counts - 1) * page_size, 1).to(torch.int32)
    used = sent(spans(starts, counts), pages.device)
    return ListedPages(indptr, pages.index_select(0, used), last.contiguous())


def spans(starts: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """starts[0], starts[0] + 1, ... (counts[0] of them), starts[1], ...; int64, on the CPU."""
    counts = counts.long()
    first = starts.long() - (counts.cumsum(0) - counts)
    every = torch.arange(int(counts.sum()), device="cpu")
    return torch.repeat_interleave(first, counts) + every
