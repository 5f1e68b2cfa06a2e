"""The lengths of trtllm_fmha_v2_prefill: checked where the host sees them, and left on the device
where it does not."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch

from .. import _core
from .._check import values as check
from .._check.lengths import debugging
from .._device.stream import sent
from .arguments import FmhaArguments, FmhaCall

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
        """That a request of max_kv_len has."""
        return -(-self.max_kv_len // self.page_size)


def checked(a: FmhaArguments, call: FmhaCall) -> FmhaLengths:
    operands = call.operands
    device = operands.q.device
    batch_size = check.integer("batch_size", a.batch_size, at_least=0)
    max_q_len = check.integer("max_q_len", a.max_q_len, at_least=0, at_most=2**30)
    max_kv_len = check.integer("max_kv_len", a.max_kv_len, at_least=0, at_most=2**30)
    kv_lens = _array("seq_lens", a.seq_lens, batch_size, "batch_size", device)
    qo_indptr = _array("cum_seq_lens_q", a.cum_seq_lens_q, batch_size + 1, "batch_size + 1", device)
    kv_indptr = a.cum_seq_lens_kv
    paged = operands.page_size > 0
    if kv_indptr is not None or not paged:
        kv_indptr = _array("cum_seq_lens_kv", kv_indptr, batch_size + 1, "batch_size + 1", device)
    lengths = FmhaLengths(
        qo_indptr, kv_indptr, kv_lens, None, batch_size, max_q_len, max_kv_len, operands.page_size
    )
    if paged:
        lengths = lengths._replace(pages=_pages(a.block_tables, lengths, device))
    elif a.block_tables is not None:
        raise ValueError(
            f"block_tables is given with input_layout={a.input_layout!r}, which has no pages"
        )
    given = [array for array in (qo_indptr, kv_indptr, kv_lens) if array is not None]
    seen = all(array.is_cpu for array in given)
    if seen or debugging():
        _check_values(lengths, call)
    if paged:  # callers round max_kv_len up, or give the longest that their model has
        room = lengths.pages.shape[1] * lengths.page_size
        lengths = lengths._replace(max_kv_len=min(max_kv_len, room))
    if not seen:
        lengths = _on_device(lengths, device)
    return lengths if kv_indptr is None or not paged else lengths._replace(kv_indptr=None)


def _array(name: str, value: Any, numel: int, meaning: str, device: torch.device) -> torch.Tensor:
    value = check.tensor(name, value)
    if value.dtype != torch.int32:
        raise TypeError(f"{name} is {value.dtype}; must be torch.int32")
    if value.dim() != 1 or value.numel() != numel:
        raise ValueError(f"{name} has shape {tuple(value.shape)}; must be [{meaning}] = [{numel}]")
    if not value.is_cpu and value.device != device:
        raise ValueError(f"{name} is on {value.device}; must be on the CPU or on {device}")
    return value.contiguous()


def _pages(block_tables: Any, lengths: FmhaLengths, device: torch.device) -> torch.Tensor:
    if block_tables is None:
        raise ValueError("block_tables=None: must be given where k and v are in pages")
    table = check.tensor("block_tables", block_tables)
    if table.dtype != torch.int32:
        raise TypeError(f"block_tables is {table.dtype}; must be torch.int32")
    if table.dim() != 2 or table.shape[0] != lengths.batch_size:
        raise ValueError(
            f"block_tables has shape {tuple(table.shape)}; must be [batch_size, pages of the "
            f"longest request] = [{lengths.batch_size}, ...]"
        )
    if not table.is_cpu and table.device != device:
        raise ValueError(f"block_tables is on {table.device}; must be on the CPU or on {device}")
    return table[:, : lengths.pages_each]


def _on_device(lengths: FmhaLengths, device: torch.device) -> FmhaLengths:
    """What is on the host yet follows the rest."""

    def moved(array: torch.Tensor | None) -> torch.Tensor | None:
        return sent(array, device) if array is not None and array.is_cpu else array

    return lengths._replace(
        qo_indptr=moved(lengths.qo_indptr),
        kv_indptr=moved(lengths.kv_indptr),
        kv_lens=moved(lengths.kv_lens),
    )


# --- values --------------------------------------------------------------------


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
    if lengths.pages.is_cpu or debugging():
        _check_page_numbers(lengths, keys, operands.kv_extent)


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


def _check_page_numbers(lengths: FmhaLengths, keys: list[int], num_pages: int) -> None:
    for i, (row, length) in enumerate(zip(lengths.pages.tolist(), keys, strict=True)):
        for page in row[: -(-length // lengths.page_size)]:
            if not 0 <= page < num_pages:
                raise ValueError(f"block_tables[{i}] holds {page}; must be in [0, {num_pages})")


# --- batches -------------------------------------------------------------------


def exact_batch(lengths: FmhaLengths) -> tuple[_core.Batch, torch.Tensor | None]:
    """The batch of lengths on the host, and its pages, one request after the other, where the page
    table is."""
    kv_lens = lengths.kv_lens
    if lengths.pages is None:
        kv_indptr = lengths.kv_indptr
        batch = _core.Batch(
            lengths.qo_indptr.data_ptr(), kv_indptr.data_ptr(), 0, lengths.batch_size, 0
        )
        return batch, None
    size = lengths.page_size
    counts = (kv_lens + (size - 1)) // size
    kv_indptr = torch.zeros(lengths.batch_size + 1, dtype=torch.int32, device="cpu")
    kv_indptr[1:] = counts.cumsum(0)
    last = torch.where(counts > 0, kv_lens - (counts - 1) * size, 1).to(torch.int32).contiguous()
    batch = _core.Batch(
        lengths.qo_indptr.data_ptr(),
        kv_indptr.data_ptr(),
        last.data_ptr(),
        lengths.batch_size,
        size,
    )
    columns = torch.arange(lengths.pages.shape[1], dtype=torch.int32, device="cpu")
    used = (columns[None, :] < counts[:, None]).reshape(-1).nonzero().squeeze(1)
    table = lengths.pages
    return batch, table.reshape(-1).index_select(0, sent(used, table.device))


def bounds_batch(lengths: FmhaLengths, qo_tokens: int, kv_tokens: int | None) -> _core.Batch:
    """A batch in which every request is as long as one may be. kv_tokens: None where paged."""
    each_qo = min(lengths.max_q_len, qo_tokens)
    each_kv = lengths.max_kv_len if kv_tokens is None else min(lengths.max_kv_len, kv_tokens)
    units = each_kv if kv_tokens is not None else lengths.pages_each
    for name, each in (("max_q_len", each_qo), ("max_kv_len", units)):
        if each * lengths.batch_size > _INT32_MAX:
            raise ValueError(
                f"{name}={getattr(lengths, name)} of batch_size={lengths.batch_size} requests on "
                "the GPU: must be less than 2^31 together; pass lengths on the CPU"
            )
    steps = torch.arange(lengths.batch_size + 1, dtype=torch.int32, device="cpu")
    qo_indptr, kv_indptr = steps * each_qo, steps * units
    last = torch.full((lengths.batch_size,), 1, dtype=torch.int32, device="cpu")
    if kv_tokens is None and units > 0:
        last.fill_(each_kv - (units - 1) * lengths.page_size)
    return _core.Batch(
        qo_indptr.data_ptr(),
        kv_indptr.data_ptr(),
        last.data_ptr() if kv_tokens is None else 0,
        lengths.batch_size,
        lengths.page_size,
        are_bounds=True,
    )
