"""Parts of paged plans that the backends of serving engines share."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from ..prefill import BatchPrefillWithPagedKVCacheWrapper

_WORKSPACE_BYTES = 128 << 20
_HEADROOM = 32  # keys


class PageArrays:
    """paged_kv_indptr and paged_kv_last_page_len of batches of one size, reused in every step."""

    def __init__(self, num_reqs: int, page_size: int) -> None:
        self._page_size, self._last_are_full = page_size, True
        self.indptr = torch.zeros(num_reqs + 1, dtype=torch.int32, device="cpu")
        self.last_page_len = torch.full((num_reqs,), page_size, dtype=torch.int32, device="cpu")
        self._ends, self._last = self.indptr.numpy()[1:], self.last_page_len.numpy()
        self._pages = np.zeros(num_reqs, np.int32)

    def fill(
        self, lengths: np.ndarray, headroom: int, max_pages: int, *, exact: bool
    ) -> np.ndarray:
        """Writes the arrays of requests of these lengths, int32 [num_reqs].

        Args:
            headroom: keys more that each request may have.
            max_pages: columns of the block table. A bound over all requests may be more.
            exact: also the number of keys in the last page; False: the last page counts as full,
                which is an upper bound and takes half the time.

        Returns:
            The most keys that the pages hold, int32 [num_reqs].
        """
        pages, page_size = self._pages, self._page_size
        np.add(lengths, page_size - 1 + headroom, out=pages)
        np.floor_divide(pages, page_size, out=pages)
        np.minimum(pages, max_pages, out=pages)
        np.cumsum(pages, dtype=np.int32, out=self._ends)
        if exact:
            np.minimum(lengths - (pages - 1) * page_size, page_size, out=self._last)
        elif not self._last_are_full:
            self._last.fill(page_size)
        self._last_are_full = not exact
        return pages * page_size


class StepWrapper(BatchPrefillWithPagedKVCacheWrapper):
    """Wrapper for the steps of an engine, which keeps a plan for as many steps as it serves.

    A plan for upper bounds of the lengths serves every step with the same query rows, the same
    arrays on the device and no more keys. A step with the rows of the step before it, as in
    decoding, is planned for _HEADROOM keys more than each request has; the next steps then need no
    plan until a request has outgrown it.

    Args:
        workspace: scratch memory.
        options: of plan(), by name; the same for all steps, so that C++ repeats the plan.
        graph_table: int32 [num_reqs, max_pages]; a CUDA graph will record the runs, for steps with
            a block table at this address. A contiguous one is the wrapper's buffer; plan() copies
            another one into a buffer.
        graph_mask: uint8, memory of a graph for the packed bits of any custom mask.
    """

    def __init__(
        self,
        workspace: torch.Tensor,
        options: dict[str, Any],
        graph_table: torch.Tensor | None = None,
        graph_mask: torch.Tensor | None = None,
    ) -> None:
        # The plan has the entries of such a table at that time, so it serves no other step.
        self._copies_table = graph_table is not None and not graph_table.is_contiguous()
        if graph_table is None:
            super().__init__(workspace)
        else:
            super().__init__(workspace, **_graph_buffers(graph_table, graph_mask))
        self._options, self._page_size = options, options["page_size"]
        self._arrays: dict[int, PageArrays] = {}  # by the number of requests
        self._step: tuple | None = None  # what a step must share with the planned one
        self._limits: np.ndarray | None = None  # the most keys that the plan serves, [num_reqs]

    def plan_step(
        self,
        qo_indptr_cpu: torch.Tensor,
        bounds_cpu: np.ndarray,
        table: torch.Tensor,
        lengths: torch.Tensor | None,
        **arguments: Any,
    ) -> None:
        """Plans a step, unless the last plan serves it. Does not wait for the device.

        Args:
            qo_indptr_cpu: int32 [num_reqs + 1].
            bounds_cpu: int32 [num_reqs], upper bounds of the numbers of keys.
            table: int32 [num_reqs, max_pages], the block table.
            lengths: int32 [num_reqs], the numbers of keys on the device, which kernels read; None:
                bounds_cpu has them.
            arguments: others of plan(), of steps without lengths.
        """
        headroom, step = 0, None
        if lengths is not None and not self._copies_table:
            places = lengths.data_ptr(), table.data_ptr(), *table.shape, table.stride(0)
            step = (qo_indptr_cpu.numpy().tobytes(), *places)
            if step == self._step:
                if self._serves(bounds_cpu):
                    return
                headroom = _HEADROOM
        self._step = None  # until there is a plan
        arrays = self._arrays.get(len(bounds_cpu))
        if arrays is None:
            arrays = self._arrays[len(bounds_cpu)] = PageArrays(len(bounds_cpu), self._page_size)
        self._limits = arrays.fill(bounds_cpu, headroom, table.shape[1], exact=lengths is None)
        self.plan(
            qo_indptr_cpu,
            arrays.indptr,
            table,
            arrays.last_page_len,
            seq_lens=lengths,
            lengths_are_upper_bounds=lengths is not None,
            **arguments,
            **self._options,
        )
        self._step = step

    def _serves(self, bounds: np.ndarray) -> bool:
        """Returns True if the plan is for as many keys, and not for many more: work for keys that
        a request does not have is badly balanced."""
        spare = self._limits - bounds
        return spare.min(initial=0) >= 0 and spare.max(initial=0) < _HEADROOM + self._page_size


def _graph_buffers(table: torch.Tensor, mask: torch.Tensor | None) -> dict[str, Any]:
    num_reqs, num_pages = table.shape
    new = functools.partial(torch.empty, dtype=torch.int32, device=table.device)
    # In the order in which plan() writes them: neighbours are one transfer.
    kv_indptr, qo_indptr, last_page_len = new(3 * num_reqs + 2).split(
        [num_reqs + 1, num_reqs + 1, num_reqs]
    )
    return {
        "use_cuda_graph": True,
        "qo_indptr_buf": qo_indptr,
        "paged_kv_indptr_buf": kv_indptr,
        "paged_kv_indices_buf": table if table.is_contiguous() else new(num_reqs, num_pages),
        "paged_kv_last_page_len_buf": last_page_len,
        "custom_mask_buf": mask,
        "mask_indptr_buf": None if mask is None else new(num_reqs + 1),
    }


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
