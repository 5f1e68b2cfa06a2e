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
    counts = (kv_lens + (page_size - 1)) // page_size
    indptr = torch.zeros(kv_lens.numel() + 1, dtype=torch.int32, device="cpu")
    indptr[1:] = counts.cumsum(0)
    last = torch.where(counts > 0, kv_lens - (counts - 1) * page_size, 1).to(torch.int32)
    columns = torch.arange(table.shape[1], dtype=torch.int32, device="cpu")
    used = (columns[None, :] < counts[:, None]).reshape(-1).nonzero().squeeze(1)
    indices = table.reshape(-1).index_select(0, sent(used, table.device))
    return ListedPages(indptr, indices, last.contiguous())
