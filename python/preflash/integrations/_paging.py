"""Parts of paged plans that the backends of serving engines share."""

from __future__ import annotations

import functools

import numpy as np
import torch

from ..prefill import BatchPrefillWithPagedKVCacheWrapper

_WORKSPACE_BYTES = 128 << 20


class PageArrays:
    """paged_kv_indptr and paged_kv_last_page_len of batches of one size, reused in every step."""

    def __init__(self, num_reqs: int, page_size: int) -> None:
        self._page_size, self._last_are_full = page_size, True
        self.indptr = torch.zeros(num_reqs + 1, dtype=torch.int32, device="cpu")
        self.last_page_len = torch.full((num_reqs,), page_size, dtype=torch.int32, device="cpu")
        self._ends, self._last = self.indptr.numpy()[1:], self.last_page_len.numpy()
        self._pages = np.zeros(num_reqs, np.int32)

    def fill(self, lengths: np.ndarray, max_pages: int, *, exact: bool) -> None:
        """Writes the arrays of requests of these lengths, int32 [num_reqs].

        Args:
            max_pages: columns of the block table. A bound over all requests may be more.
            exact: also the number of keys in the last page; False: the last page counts as full,
                which is an upper bound and takes half the time.
        """
        pages, page_size = self._pages, self._page_size
        np.add(lengths, page_size - 1, out=pages)
        np.floor_divide(pages, page_size, out=pages)
        np.minimum(pages, max_pages, out=pages)
        np.cumsum(pages, dtype=np.int32, out=self._ends)
        if exact:
            np.minimum(lengths - (pages - 1) * page_size, page_size, out=self._last)
        elif not self._last_are_full:
            self._last.fill(page_size)
        self._last_are_full = not exact


def graph_wrapper(
    workspace: torch.Tensor, table: torch.Tensor, mask: torch.Tensor | None = None
) -> BatchPrefillWithPagedKVCacheWrapper:
    """Wrapper whose runs a CUDA graph records, for steps with a block table at this address.

    Args:
        table: int32 [num_reqs, max_pages]. A contiguous one is the wrapper's buffer; plan() copies
            another one into a buffer in every step.
        mask: uint8, memory for the packed bits of any custom mask; None: no plan has a mask.
    """
    num_reqs, num_pages = table.shape
    buffer = functools.partial(torch.empty, dtype=torch.int32, device=table.device)
    return BatchPrefillWithPagedKVCacheWrapper(
        workspace,
        use_cuda_graph=True,
        qo_indptr_buf=buffer(num_reqs + 1),
        paged_kv_indptr_buf=buffer(num_reqs + 1),
        paged_kv_indices_buf=table if table.is_contiguous() else buffer(num_reqs, num_pages),
        paged_kv_last_page_len_buf=buffer(num_reqs),
        custom_mask_buf=mask,
        mask_indptr_buf=None if mask is None else buffer(num_reqs + 1),
    )


def new_workspace(device: torch.device) -> torch.Tensor:
    """Scratch memory for split-KV partial results; preflash needs no more for any batch."""
    num_bytes = _WORKSPACE_BYTES if device.type == "cuda" else 8 << 20
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


@functools.cache
def shared_workspace(device: torch.device) -> torch.Tensor:
    """The workspace of all wrappers whose launches follow each other on one stream."""
    return new_workspace(device)


def is_served_head_size(head_size: int) -> bool:
    return head_size % 8 == 0 and 0 < head_size <= 512


def head_size_refusal(head_size: int, fp8_cache: bool) -> str | None:
    """Returns a sentence that refuses the head size, or None."""
    if not is_served_head_size(head_size):
        return f"preflash serves head sizes that are multiples of 8 up to 512, not {head_size}"
    if fp8_cache and head_size % 16 != 0:
        return (
            "preflash reads rows of 8 bits on multiples of 16 bytes, so an fp8 cache needs "
            f"head sizes that are multiples of 16, not {head_size}"
        )
    return None
