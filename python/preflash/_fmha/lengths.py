"""The lengths of trtllm_fmha_v2_prefill: checked where the host sees them, and left on the device
where it does not."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch

from .. import _core
from .._check import validate
from .._check.lengths import batch_of
from .._check.pages import may_be_read
from .._check.request import PageList
from .._device.stream import sent
from .._plan.pages import listed
from .arguments import FmhaCall, Operands

_INT32_MAX = 2**31 - 1


class FmhaLengths(NamedTuple):
    """int32 arrays, all on the host or all on the GPU."""

    qo_indptr: torch.Tensor  # [batch_size + 1]
    kv_indptr: torch.Tensor | None  # [batch_size + 1]; None: paged
    kv_lens: torch.Tensor  # [batch_size]
    pages: torch.Tensor | None  # [batch_size, at least the pages of max_kv_len]; None: ragged
    batch_size: int
    max_q_len: int
    max_kv_len: int
    page_size: int

    @property
    def on_host(self) -> bool:
        return self.kv_lens.is_cpu

    @property
    def pages_each(self) -> int:
        """Pages per request of max_kv_len."""
        return -(-self.max_kv_len // self.page_size)


def checked(call: FmhaCall) -> FmhaLengths:
    a, operands = call.given, call.operands
    device, paged = operands.q.device, operands.page_size > 0
    batch_size = validate.size("batch_size", a.batch_size)
    max_q_len = validate.size("max_q_len", a.max_q_len)
    max_kv_len = validate.size("max_kv_len", a.max_kv_len)
    known = {"batch_size": batch_size, "batch_size + 1": batch_size + 1}
    names = {"seq_lens": "lengths", "cum_seq_lens_q": "indptr", "cum_seq_lens_kv": "indptr"}
    if paged and a.cum_seq_lens_kv is None:
        del names["cum_seq_lens_kv"]
    kv_lens, qo_indptr, *kv_indptr = (
        validate.conforms(name, getattr(a, name), rule, device, known).contiguous()
        for name, rule in names.items()
    )
    arrays = (qo_indptr, kv_indptr[0] if kv_indptr else None, kv_lens)
    lengths = FmhaLengths(*arrays, None, batch_size, max_q_len, max_kv_len, operands.page_size)
    if paged:
        tables = _tables_of_k(a.block_tables, operands, kv_lens)
        if tables is None:
            raise ValueError("block_tables=None: must be given where k and v are in pages")
        table = validate.conforms("block_tables", tables, "page_table", device, known)
        lengths = lengths._replace(pages=table[:, : lengths.pages_each])
    elif a.block_tables is not None:
        raise ValueError(
            f"block_tables is given with input_layout={a.input_layout!r}, which has no pages"
        )
    seen = all(array is None or array.is_cpu for array in arrays)
    if seen or _core.debugging():
        _check_values(lengths, call)
    if paged:  # callers round max_kv_len up, or give the longest that their model has
        room = lengths.pages.shape[1] * lengths.page_size
        lengths = lengths._replace(kv_indptr=None, max_kv_len=min(max_kv_len, room))
    if not seen:  # moves arrays that are on the host to the device of the others
        for name, array in zip(lengths._fields, lengths[:3], strict=False):
            if array is not None and array.is_cpu:
                lengths = lengths._replace(**{name: sent(array, device)})
    return lengths


def _tables_of_k(block_tables: Any, operands: Operands, kv_lens: torch.Tensor) -> Any:
    """Tables [batch_size, 2, pages] of separate pools count the pages of v from the first of k; the
    launch has both pools and needs one table."""
    if not isinstance(block_tables, torch.Tensor) or block_tables.dim() != 3:
        return block_tables
    if not isinstance(operands.kv, (tuple, list)) or block_tables.shape[1] != 2:
        raise ValueError(
            f"block_tables has shape {tuple(block_tables.shape)}; must be [batch_size, pages], or "
            "[batch_size, 2, pages] where k and v are pools of their own"
        )
    k, v = operands.kv
    apart = v.data_ptr() - k.data_ptr()
    page_bytes = k.stride(0) * k.element_size()
    if k.stride(0) != v.stride(0) or page_bytes == 0 or apart % page_bytes:
        raise ValueError(
            f"block_tables has shape {tuple(block_tables.shape)}, and v begins {apart} bytes "
            f"behind k: must be a multiple of a page's {page_bytes}, so that one table counts "
            "both; or give block_tables as [batch_size, pages]"
        )
    if apart == 0:  # the pages of v are others than those of k, wherever the tables are
        raise NotImplementedError(
            f"block_tables has shape {tuple(block_tables.shape)}, and k and v are one pool: use "
            "trtllm_batch_context_with_kv_cache with uses_shared_paged_kv_idx=False"
        )
    block_tables = validate.tensor("block_tables", block_tables)
    of_k, of_v = block_tables.unbind(1)
    if (block_tables.is_cpu and kv_lens.is_cpu) or _core.debugging():
        first_keys = torch.arange(of_k.shape[1], device="cpu") * operands.page_size
        used = first_keys < kv_lens.cpu()[:, None]
        wrong = of_v.cpu() != of_k.cpu() + apart // page_bytes
        if of_k.shape[0] == kv_lens.numel() and bool((used & wrong).any()):
            raise ValueError(
                f"block_tables[:, 1] differs from block_tables[:, 0] + {apart // page_bytes}: v "
                "begins so many pages behind k, and its pages must be those of k"
            )
    return of_k


def _check_values(lengths: FmhaLengths, call: FmhaCall) -> None:
    operands = call.operands
    tokens = operands.q.shape[0]
    queries = _check_offsets("cum_seq_lens_q", lengths.qo_indptr, tokens, "q")
    _check_longest("max_q_len", lengths.max_q_len, queries, "queries")
    keys = lengths.kv_lens.tolist()
    for i, length in enumerate(keys):
        if length < 0:
            raise ValueError(f"seq_lens[{i}] = {length}: must not be negative")
    _check_longest("max_kv_len", lengths.max_kv_len, keys, "keys")
    if lengths.kv_indptr is not None:
        extent = operands.kv_extent if operands.page_size == 0 else _INT32_MAX
        of_offsets = _check_offsets("cum_seq_lens_kv", lengths.kv_indptr, extent, "k and v")
        for i, (length, between) in enumerate(zip(keys, of_offsets, strict=True)):
            if length != between:
                raise ValueError(
                    f"seq_lens[{i}] = {length}, and cum_seq_lens_kv gives request {i} {between} "
                    "keys; must agree"
                )
    if operands.packed and not lengths.kv_indptr.equal(lengths.qo_indptr):
        raise ValueError(
            "cum_seq_lens_kv differs from cum_seq_lens_q; must be equal with PACKED_QKV, where a "
            "request's keys are its own rows"
        )
    if lengths.pages is None:
        return
    longest = max(keys, default=0)
    if longest > lengths.pages.shape[1] * lengths.page_size:
        raise ValueError(
            f"block_tables has {lengths.pages.shape[1]} pages of {lengths.page_size} keys for each "
            f"request; request {keys.index(longest)} has {longest} keys"
        )
    if not may_be_read(lengths.pages):
        return
    for i, (row, length) in enumerate(zip(lengths.pages.tolist(), keys, strict=True)):
        for page in row[: -(-length // lengths.page_size)]:
            if not 0 <= page < operands.kv_extent:
                raise ValueError(
                    f"block_tables[{i}] holds {page}; must be in [0, {operands.kv_extent})"
                )


def _check_offsets(name: str, indptr: torch.Tensor, extent: int, of: str) -> list[int]:
    """The lengths between offsets into a tensor of `extent` tokens."""
    offsets = indptr.tolist()
    if offsets[0] < 0:
        raise ValueError(f"{name}[0] = {offsets[0]}: must not be negative")
    for i, (first, second) in enumerate(pairwise(offsets)):
        if second < first:
            raise ValueError(f"{name}[{i + 1}] = {second} after {first}: must not decrease")
    if offsets[-1] > extent:
        raise ValueError(f"{name}[-1] = {offsets[-1]}: {of} has {extent} tokens")
    return [second - first for first, second in pairwise(offsets)]


def _check_longest(name: str, limit: int, found: list[int], of: str) -> None:
    longest = max(found, default=0)
    if longest > limit:
        raise ValueError(f"{name}={limit}: request {found.index(longest)} has {longest} {of}")


def brought_to_host(lengths: FmhaLengths) -> FmhaLengths:
    """Waits for the lengths. The page table stays where it is."""
    qo_indptr, kv_indptr, kv_lens = (x if x is None else x.cpu() for x in lengths[:3])
    return lengths._replace(qo_indptr=qo_indptr, kv_indptr=kv_indptr, kv_lens=kv_lens)


def exact(lengths: FmhaLengths) -> tuple[_core.Batch, PageList | None]:
    """Lengths for a plan of lengths on the host; page indices stay on the page table's device."""
    if lengths.pages is None:
        return batch_of(lengths.qo_indptr, lengths.kv_indptr, page_size=0), None
    indptr, indices, last_page_len = listed(lengths.pages, lengths.kv_lens, lengths.page_size)
    batch = batch_of(lengths.qo_indptr, indptr, last_page_len, page_size=lengths.page_size)
    if not indices.is_cpu:
        return batch, PageList(indices, on_device=indices, largest=None)
    largest = batch.set_page_indices(indices.data_ptr(), indices.numel())
    return batch, PageList(indices, None, largest)


def bounds(lengths: FmhaLengths, operands: Operands) -> tuple[_core.Batch, PageList | None]:
    """Upper bounds for a plan of lengths on the GPU: every request has the maximum length. Each run
    copies the page indices into a table of the plan's."""
    paged = lengths.pages is not None
    each_qo = min(lengths.max_q_len, operands.q.shape[0])
    units = lengths.pages_each if paged else min(lengths.max_kv_len, operands.kv_extent)
    for name, each in (("max_q_len", each_qo), ("max_kv_len", units)):
        if each * lengths.batch_size > _INT32_MAX:
            raise ValueError(
                f"{name}={getattr(lengths, name)} of batch_size={lengths.batch_size} requests on "
                "the GPU: must be less than 2^31 together; pass lengths on the CPU"
            )
    steps = torch.arange(lengths.batch_size + 1, dtype=torch.int32, device="cpu")
    qo_indptr, kv_indptr = steps * each_qo, steps * units
    last = page_list = None
    if paged:
        pages = torch.empty(lengths.pages.shape, dtype=torch.int32, device=operands.q.device)
        page_list = PageList(pages, on_device=pages, largest=None)
        in_last = lengths.max_kv_len - (units - 1) * lengths.page_size if units > 0 else 1
        last = torch.full((lengths.batch_size,), in_last, dtype=torch.int32, device="cpu")
    batch = batch_of(
        qo_indptr, kv_indptr, last, page_size=lengths.page_size, lengths_are_upper_bounds=True
    )
    return batch, page_list
