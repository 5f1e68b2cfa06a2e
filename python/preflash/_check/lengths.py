"""The second half of the check: from the index arrays of plan() to its batch. Where they are, how
they look, and the host copy that is planned."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import torch

from .. import _core
from . import values as check
from .arguments import BatchArguments, PagedPlanArguments, RaggedPlanArguments

# The batch of usual arrays on the CPU; None: look at them one by one.
_paged_batch = _core.paged_batches(check.TORCH, torch.Tensor, torch.int32)

# Names of their own for what every plan() asks.
_Tensor = torch.Tensor
_int32 = torch.int32

_INTEGERS = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)
if hasattr(torch, "uint32"):
    _INTEGERS += (torch.uint32,)


def debugging() -> bool:
    """PREFLASH_DEBUG=1: also check what lies on the GPU, at the cost of waiting for it."""
    return os.environ.get("PREFLASH_DEBUG", "0") not in ("", "0")


class PageList(NamedTuple):
    """The page indices that the batch uses.

    given: the caller's, which may be more, and may change once plan() has returned. on_device:
    where kernels read them; None: they travel with the plan.
    """

    given: torch.Tensor
    on_device: torch.Tensor | None
    largest: int | None  # None: not known without waiting for the GPU


class Lengths(NamedTuple):
    """What plan() says about lengths, and where the keys are."""

    batch: _core.Batch
    pages: PageList | None  # None: ragged


def batch_lengths(
    a: BatchArguments,
    device: torch.device,
    indices_buf: torch.Tensor | None = None,
    uploader: _core.Uploader | None = None,
) -> Lengths:
    """The lengths in the arguments of plan(). The planner checks the values of indptr.

    indices_buf: where plan() will put the page indices, for CUDA graphs. uploader: what will bring
    them to the device otherwise, if that is known.
    """
    if isinstance(a, PagedPlanArguments):
        return _paged(a, device, indices_buf, uploader)
    return _ragged(a, device)


def _ragged(a: RaggedPlanArguments, device: torch.device) -> Lengths:
    batch = _make_batch(
        _index_array("qo_indptr", a.qo_indptr, device),
        _index_array("kv_indptr", a.kv_indptr, device),
        None,
        0,
        kv_name="kv_indptr",
    )
    return Lengths(batch, None)


def _paged(
    a: PagedPlanArguments,
    device: torch.device,
    indices_buf: torch.Tensor | None,
    uploader: _core.Uploader | None,
) -> Lengths:
    page_size = check.integer("page_size", a.page_size, at_least=1)
    to_upload = a.paged_kv_indices if indices_buf is None else None
    found = _paged_batch(
        a.qo_indptr, a.paged_kv_indptr, a.paged_kv_last_page_len, to_upload, page_size, uploader
    )
    if found is not None:
        batch, largest = found
        if largest is not None:
            return Lengths(batch, PageList(to_upload, None, largest))
    indices = _index_array("paged_kv_indices", a.paged_kv_indices, device)
    if found is not None:
        return Lengths(batch, _attach_page_indices(batch, indices, indices_buf, uploader))
    qo_indptr = _index_array("qo_indptr", a.qo_indptr, device)
    kv_indptr = _index_array("paged_kv_indptr", a.paged_kv_indptr, device)
    last_page_len = _index_array("paged_kv_last_page_len", a.paged_kv_last_page_len, device)
    alone = not last_page_len.is_cpu and qo_indptr.is_cpu and kv_indptr.is_cpu
    if alone and page_size == 1 and not debugging():
        # A page of one token holds one: no wait to hear it from the GPU.
        last_page_len = torch.ones(last_page_len.numel(), dtype=torch.int32, device="cpu")
    batch = _make_batch(qo_indptr, kv_indptr, last_page_len, page_size, kv_name="paged_kv_indptr")
    pages = _attach_page_indices(batch, indices, indices_buf, uploader)
    return Lengths(batch, pages)


def single_lengths(qo_len: int, kv_len: int) -> Lengths:
    """A batch of one."""
    qo_len = check.integer("qo_len", qo_len, at_least=0)
    kv_len = check.integer("kv_len", kv_len, at_least=0)
    indptr = torch.tensor([0, qo_len, 0, kv_len], dtype=torch.int32, device="cpu")
    begin = check.address(indptr)
    return Lengths(_core.Batch(begin, begin + 2 * indptr.element_size(), 0, 1, 0), None)


def _index_array(name: str, value: Any, device: torch.device) -> torch.Tensor:
    """An indptr, a list of pages or of last page lengths: 1-D int32, on the CPU or on `device`.
    Those on the CPU come back contiguous."""
    try:
        # Four arrays of every plan(): first what all of them are, in the order of the usual array,
        # and else check by check for the one to name. NOTE: of one dimension none is nested.
        if (
            isinstance(value, _Tensor)
            and value.dtype is _int32
            and value.dim() == 1
            and value.is_cpu
            and value.is_contiguous()
            and not value.is_neg()
            and value.data_ptr()
            and 4 * (value.storage_offset() + value.numel()) <= len(value.untyped_storage())
        ):
            return value
    except (RuntimeError, ValueError):
        pass  # as in check.tensor()
    value = check.tensor(name, value)
    if value.dtype != torch.int32:
        raise TypeError(f"{name} is {value.dtype}; must be torch.int32")
    if value.dim() != 1:
        raise ValueError(f"{name} has shape {tuple(value.shape)}; must be one-dimensional")
    if value.is_cpu:
        return value.contiguous()
    if value.device != device:
        raise ValueError(f"{name} is on {value.device}; must be on the CPU or on {device}")
    return value


def _on_host(*arrays: torch.Tensor) -> list[torch.Tensor]:
    """Contiguous CPU copies. Those on the GPU come over together: one copy, one wait."""
    remote = [array for array in arrays if not array.is_cpu]
    pieces = iter(torch.cat(remote).cpu().split([array.numel() for array in remote]))
    return [array if array.is_cpu else next(pieces) for array in arrays]


def _make_batch(
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    last_page_len: torch.Tensor | None,
    page_size: int,
    *,
    kv_name: str,
) -> _core.Batch:
    """The batch of checked index arrays; page_size 0 is ragged. The planner checks values."""
    elements = qo_indptr.numel()
    if elements == 0:
        raise ValueError("qo_indptr is empty; must have batch_size + 1 elements")
    if kv_indptr.numel() != elements:
        raise ValueError(
            f"{kv_name} has {kv_indptr.numel()} elements and qo_indptr {elements}; "
            "both must have batch_size + 1"
        )
    num_requests = elements - 1
    if last_page_len is None:
        if not (qo_indptr.is_cpu and kv_indptr.is_cpu):
            qo_indptr, kv_indptr = _on_host(qo_indptr, kv_indptr)
        return _core.Batch(qo_indptr.data_ptr(), kv_indptr.data_ptr(), 0, num_requests, page_size)
    if last_page_len.numel() != num_requests:
        raise ValueError(
            f"paged_kv_last_page_len has {last_page_len.numel()} elements; must have "
            f"batch_size = {num_requests}"
        )
    if not (qo_indptr.is_cpu and kv_indptr.is_cpu and last_page_len.is_cpu):
        qo_indptr, kv_indptr, last_page_len = _on_host(qo_indptr, kv_indptr, last_page_len)
    return _core.Batch(
        qo_indptr.data_ptr(),
        kv_indptr.data_ptr(),
        last_page_len.data_ptr(),
        num_requests,
        page_size,
    )


def _attach_page_indices(
    batch: _core.Batch,
    indices: torch.Tensor,
    indices_buf: torch.Tensor | None,
    uploader: _core.Uploader | None,
) -> PageList:
    """Gives the batch its page indices.

    Those on the host are copied, so that the caller may change his, and travel with the plan's
    upload; those on the GPU stay where they are. With a buffer for them, all are read from there.
    """
    given, used = indices.numel(), batch.kv_end
    if used != given:
        if used > given:
            raise ValueError(
                f"paged_kv_indices has {given} elements; paged_kv_indptr[-1] = {used} pages are in "
                "use"
            )
        used = max(used, 0)
        indices = indices[:used]
    if indices_buf is not None:
        return _for_buffer(batch, indices.contiguous(), indices_buf)
    if indices.is_cpu:
        return PageList(indices, None, batch.set_page_indices(indices.data_ptr(), used, uploader))
    indices = indices.contiguous()
    return PageList(indices, on_device=indices, largest=_largest_page(batch, indices))


def _for_buffer(batch: _core.Batch, indices: torch.Tensor, indices_buf: torch.Tensor) -> PageList:
    if batch.kv_end > indices_buf.numel():
        raise ValueError(
            f"paged_kv_indptr[-1] = {batch.kv_end} pages are in use; paged_kv_indices_buf has room "
            f"for {indices_buf.numel()}: construct the wrapper with a larger one"
        )
    return PageList(indices, on_device=indices_buf, largest=_largest_page(batch, indices))


def _largest_page(batch: _core.Batch, indices: torch.Tensor) -> int | None:
    """The largest of the pages in use, none of which is negative; None: not known."""
    if indices.is_cpu:
        return batch.largest_page_of(indices.data_ptr(), indices.numel())
    if not debugging():
        return None
    used = indices[batch.kv_begin :]  # what lies before belongs to nobody, like what lies behind
    if used.numel() == 0:
        return None
    smallest, largest = torch.stack(torch.aminmax(used)).tolist()
    if smallest < 0:
        raise ValueError(f"paged_kv_indices holds {smallest}; page indices start at 0")
    return largest


def check_hints(a: BatchArguments, lengths: Lengths, device: torch.device) -> None:
    """Arguments that repeat what the lengths say: they must agree with them."""
    batch = lengths.batch
    for name, value in (("seq_lens_q", a.seq_lens_q), ("seq_lens", a.seq_lens)):
        if value is not None:
            _check_lengths(name, value, batch, device)
    if a.max_token_per_sequence is not None:
        _check_longest("max_token_per_sequence", a.max_token_per_sequence, batch.max_qo_len)
    if a.max_sequence_kv is not None:
        _check_longest("max_sequence_kv", a.max_sequence_kv, batch.max_kv_len)
    uniform = a.uniform_q_len
    if uniform is not None and check.integer("uniform_q_len", uniform, at_least=-1) > 0:
        same = torch.full((batch.num_requests,), uniform, dtype=torch.int64, device="cpu")
        other = batch.first_qo_len_other_than(check.address(same))
        if other >= 0:
            raise ValueError(
                f"uniform_q_len={uniform}: request {other} has {batch.qo_len(other)} query tokens"
            )
    if isinstance(a, PagedPlanArguments) and a.block_tables is not None:
        _check_block_tables(a.block_tables, lengths, device)


def _check_longest(name: str, value: Any, longest: int) -> None:
    if check.integer(name, value, at_least=0) < longest:
        raise ValueError(f"{name}={value}: the batch has a request of {longest} tokens")


def _check_lengths(name: str, value: Any, batch: _core.Batch, device: torch.device) -> None:
    """seq_lens or seq_lens_q; those on the wrapper's own GPU are not read to compare."""
    check.is_tensor(name, value)
    if not value.is_cpu and value.device != device:
        raise ValueError(f"{name} is on {value.device}; must be on the CPU or on {device}")
    value = check.tensor(name, value)
    if value.dtype not in _INTEGERS:
        raise TypeError(f"{name} is {value.dtype}; must be an integer dtype")
    if value.numel() != batch.num_requests:
        raise ValueError(
            f"{name} has {value.numel()} elements; must have batch_size = {batch.num_requests}"
        )
    if not value.is_cpu:
        if not debugging():
            return
        value = value.cpu()
    value = value.reshape(-1).to(torch.int64).contiguous()
    queries = name == "seq_lens_q"
    first_other = batch.first_qo_len_other_than if queries else batch.first_kv_len_other_than
    other = first_other(check.address(value))
    if other >= 0:
        planned = batch.qo_len(other) if queries else batch.kv_len(other)
        raise ValueError(
            f"{name}[{other}] = {int(value[other])}: the planned length of request {other} is "
            f"{planned}"
        )


def _check_block_tables(block_tables: Any, lengths: Lengths, device: torch.device) -> None:
    """block_tables [batch_size, max pages] repeats paged_kv_indices, which are what is used."""
    batch, pages = lengths
    table = check.tensor("block_tables", block_tables)
    if table.dtype != torch.int32:
        raise TypeError(f"block_tables is {table.dtype}; must be torch.int32")
    longest = -(-batch.max_kv_len // batch.page_size)
    if table.dim() != 2 or table.shape[0] != batch.num_requests or table.shape[1] < longest:
        raise ValueError(
            f"block_tables has shape {tuple(table.shape)}; must be [batch_size, max pages] = "
            f"[{batch.num_requests}, at least {longest}]"
        )
    if not table.is_cpu and table.device != device:
        raise ValueError(f"block_tables is on {table.device}; must be on the CPU or on {device}")
    on_host = table.is_cpu and pages.given.is_cpu
    if not on_host and not debugging():
        return
    table = table.cpu().contiguous()
    indices = pages.given.cpu()
    other = batch.first_pages_other_than(
        check.address(indices), check.address(table), table.shape[1]
    )
    if other >= 0:
        raise ValueError(f"block_tables[{other}] differs from the pages of paged_kv_indices")
