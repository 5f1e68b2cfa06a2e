"""Makes the batch of plan() out of its index arrays: checks their device and form, and copies them
to the host. options.py checks the options."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from .. import _core
from . import validate
from .calls import BatchArguments, PagedPlanArguments, RaggedPlanArguments
from .request import PageList, Request


class IndexArrays(NamedTuple):
    """The index arrays of one plan(), not checked. Ragged: without pages."""

    qo_indptr: Any
    kv_indptr: Any
    indices: Any = None
    last_page_len: Any = None


def index_arrays(a: BatchArguments) -> IndexArrays:
    if isinstance(a, RaggedPlanArguments):
        return IndexArrays(a.qo_indptr, a.kv_indptr)
    return IndexArrays(a.qo_indptr, a.paged_kv_indptr, a.paged_kv_indices, a.paged_kv_last_page_len)


def batch_lengths(
    arrays: IndexArrays,
    a: BatchArguments,
    device: torch.device,
    indices_buf: torch.Tensor | None = None,
    uploader: _core.Uploader | None = None,
) -> tuple[_core.Batch, PageList | None]:
    """The lengths of the requests of plan(), and the pages that hold their keys; None if ragged.
    Checks the form of the arrays; their values are checked by validate() of cpp/planner.

    a: page_size, and whether the lengths are upper bounds. indices_buf: where plan() will put the
    page indices, for CUDA graphs. uploader: what will bring them to the device otherwise, if that
    is known.
    """
    qo_indptr, kv_indptr, indices, last_page_len = arrays
    if isinstance(a, RaggedPlanArguments):
        return _batch_on_host({"qo_indptr": qo_indptr, "kv_indptr": kv_indptr}, 0, device), None
    page_size = validate.size("page_size", a.page_size)
    is_table = isinstance(indices, torch.Tensor) and indices.dim() == 2
    if not is_table:
        indices = validate.conforms("paged_kv_indices", indices, "pages", device)
    named = {"qo_indptr": qo_indptr, "paged_kv_indptr": kv_indptr}
    named["paged_kv_last_page_len"] = last_page_len
    batch = _batch_on_host(named, page_size, device)
    if is_table:
        exact = a.lengths_are_upper_bounds is False
        return batch, _block_table(batch, indices, exact, device, indices_buf)
    return batch, _attach_page_indices(batch, indices, indices_buf, uploader)


def single_batch(qo_len: int, kv_len: int) -> _core.Batch:
    qo_len = validate.size("qo_len", qo_len)
    kv_len = validate.size("kv_len", kv_len)
    indptr = torch.tensor([0, qo_len, 0, kv_len], dtype=torch.int32, device="cpu")
    begin = validate.address(indptr)
    arrays = _core.BatchArrays(begin, begin + 2 * indptr.element_size(), 0, 1)
    return _core.Batch(arrays, page_size=0)


def _batch_on_host(named: dict[str, Any], page_size: int, device: torch.device) -> _core.Batch:
    """The batch of the index arrays of plan(), by name: of queries, of keys and, unless page_size
    is 0, of last pages. Checks their form, not their values."""
    (_, qo_indptr), (kv_name, kv_indptr), *last_page_len = named.items()
    elements = validate.conforms("qo_indptr", qo_indptr, "indptr", device).numel()
    if elements == 0:
        raise ValueError("qo_indptr is empty; must have batch_size + 1 elements")
    known = {"batch_size": elements - 1, "batch_size + 1": elements}
    arrays = [qo_indptr, validate.conforms(kv_name, kv_indptr, "indptr", device, known)]
    arrays += [validate.conforms(*one, "lengths", device, known) for one in last_page_len]
    remote = [not array.is_cpu for array in arrays]
    if remote == [False, False, True] and page_size == 1 and not _core.debugging():
        # A page of one token holds one: no wait to hear it from the GPU.
        arrays[2] = torch.ones(arrays[2].numel(), dtype=torch.int32, device="cpu")
    return batch_of(*on_host(arrays), page_size=page_size)


def on_host(arrays: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Returns the arrays contiguous on the CPU. Those on the GPU take one copy and one wait."""
    remote = [array for array in arrays if not array.is_cpu]
    if len(remote) > 1:
        pieces = iter(torch.cat(remote).cpu().split([x.numel() for x in remote]))
    else:
        pieces = iter([array.cpu() for array in remote])
    return [array.contiguous() if array.is_cpu else next(pieces) for array in arrays]


def batch_of(
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    last_page_len: torch.Tensor | None = None,
    *,
    page_size: int,
    lengths_are_upper_bounds: bool = False,
) -> _core.Batch:
    """Makes a Batch of contiguous int32 CPU arrays. Ragged: page_size 0 and no last_page_len."""
    last = 0 if last_page_len is None else last_page_len.data_ptr()
    arrays = _core.BatchArrays(
        qo_indptr.data_ptr(), kv_indptr.data_ptr(), last, qo_indptr.numel() - 1
    )
    return _core.Batch(arrays, page_size, lengths_are_upper_bounds)


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
    if indices_buf is not None and indices_buf.dim() == 2:
        raise ValueError(
            f"paged_kv_indices has shape {tuple(indices.shape)}; paged_kv_indices_buf is a block "
            "table, so pass [batch_size, pages]"
        )
    given, used = indices.numel(), batch.kv_end
    if used != given:
        if used > given:
            raise ValueError(
                f"paged_kv_indices has {given} elements; paged_kv_indptr[-1] = {used}: pass at "
                "least as many, those before paged_kv_indptr[0] too"
            )
        used = max(used, 0)
        indices = indices[:used]
    indices = indices.contiguous()
    if indices_buf is None and indices.is_cpu:
        return PageList(indices, None, batch.set_page_indices(indices.data_ptr(), used, uploader))
    if indices_buf is not None and used > indices_buf.numel():
        raise ValueError(
            f"paged_kv_indptr[-1] = {used} pages are in use; paged_kv_indices_buf has room "
            f"for {indices_buf.numel()}: construct the wrapper with a larger one"
        )
    on_device = indices if indices_buf is None else indices_buf
    return PageList(indices, on_device, _largest_page(batch, indices))


def _block_table(
    batch: _core.Batch,
    table: torch.Tensor,
    exact: bool,
    device: torch.device,
    buffer: torch.Tensor | None,
) -> PageList:
    """Takes the pages from a block table [batch_size, max_pages]. Kernels read it in place on their
    device; one on the CPU for a GPU is uploaded as a page list. Pages behind the number of keys
    that only a run knows may be anything."""
    known = {"batch_size": batch.num_requests, "pages": -(-batch.max_kv_len // batch.page_size)}
    table = validate.conforms("paged_kv_indices", table, "block_table", device, known)
    if table.device != device and buffer is None:
        before = table.new_zeros(batch.kv_begin)  # paged_kv_indptr may start above 0
        pages = torch.cat((before, _owned(table, batch)))
        if exact:
            return _attach_page_indices(batch, pages, None, None)
        pages = _attach_page_indices(batch, pages.clamp_(min=0), None, None)
        return pages._replace(largest=None)
    read = table if buffer is None else buffer
    if read.dim() != 2 or read.shape[0] != table.shape[0] or read.shape[1] < table.shape[1]:
        raise ValueError(
            f"paged_kv_indices has shape {tuple(table.shape)} and paged_kv_indices_buf "
            f"{tuple(read.shape)}: a block table needs a buffer of as many rows, and of as many "
            "columns at least"
        )
    rows, width = read.shape
    stride = read.stride(0) if rows > 1 else width
    batch.use_block_table(stride)
    largest = None
    if exact and (table.is_cpu or _core.debugging()):
        largest = _largest_of(_owned(table, batch))
    extent = (rows - 1) * stride + width if rows * width > 0 else 0
    return PageList(table, read.as_strided((extent,), (1,)), largest)


def _owned(table: torch.Tensor, batch: _core.Batch) -> torch.Tensor:
    """The entries of a block table that requests own, one request after the other."""
    counts = torch.tensor(batch.kv_indptr, device=table.device).diff()
    return table[torch.arange(table.shape[1], device=table.device) < counts[:, None]]


def _largest_of(pages: torch.Tensor) -> int | None:
    """The largest of pages, none of which is negative; None: there are none."""
    if pages.numel() == 0:
        return None
    smallest, largest = torch.stack(torch.aminmax(pages)).tolist()
    if smallest < 0:
        raise ValueError(f"paged_kv_indices holds {smallest}; page indices start at 0")
    return largest


def _largest_page(batch: _core.Batch, indices: torch.Tensor) -> int | None:
    """The largest of the pages in use, none of which is negative; None: not known."""
    if indices.is_cpu:
        return batch.largest_page_of(indices.data_ptr(), indices.numel())
    if not _core.debugging():
        return None
    return _largest_of(indices[batch.kv_begin :])  # pages before and after belong to no request


def upper_bounds(
    a: BatchArguments, batch: _core.Batch, device: torch.device, masked: bool
) -> torch.Tensor | None:
    """Turns the batch's lengths of keys into upper bounds, and returns seq_lens, from which every
    run takes them. None: lengths_are_upper_bounds is False."""
    if not validate.flag("lengths_are_upper_bounds", a.lengths_are_upper_bounds):
        return None
    if a.seq_lens is None:
        raise ValueError(
            "lengths_are_upper_bounds=True and seq_lens=None: pass int32 [batch_size] on "
            f"{device}, from which run() takes the number of keys of each request"
        )
    if masked or a.prefix_len_ptr is not None:
        raise NotImplementedError(
            "lengths_are_upper_bounds=True with a custom mask, whose rows are as long as the keys: "
            "plan with exact lengths"
        )
    known = {"batch_size": batch.num_requests}
    kv_lens = validate.conforms("seq_lens", a.seq_lens, "kv_lens", device, known)
    batch.use_kv_upper_bounds()
    if _core.debugging():
        for i, keys in enumerate(kv_lens.tolist()):
            if not 0 <= keys <= batch.kv_len(i):
                raise ValueError(
                    f"seq_lens[{i}] = {keys}: must be in [0, {batch.kv_len(i)}], the upper bound "
                    f"of request {i}"
                )
    return kv_lens


def check_hints(a: BatchArguments, request: Request) -> None:
    """Raises ValueError if arguments that repeat the lengths contradict them."""
    batch, device, options = request.batch, request.device, request.options
    if a.seq_lens_q is not None:
        _check_lengths("seq_lens_q", a.seq_lens_q, batch, device)
    if a.seq_lens is not None and not batch.kv_lengths_are_upper_bounds:
        _check_lengths("seq_lens", a.seq_lens, batch, device)
    if a.max_token_per_sequence is not None:
        _check_longest("max_token_per_sequence", a.max_token_per_sequence, batch.max_qo_len)
    if a.max_sequence_kv is not None:
        _check_longest("max_sequence_kv", a.max_sequence_kv, batch.max_kv_len)
    uniform = a.uniform_q_len
    if uniform is not None and validate.size("uniform_q_len", uniform) > 0:
        same = torch.full((batch.num_requests,), uniform, dtype=torch.int64, device="cpu")
        other = batch.first_qo_len_other_than(validate.address(same))
        if other >= 0:
            raise ValueError(
                f"uniform_q_len={uniform}: request {other} has {batch.qo_len(other)} query tokens"
            )
    if isinstance(a, PagedPlanArguments):
        if a.block_tables is not None:
            _check_block_tables(a.block_tables, request)
        return
    width = options.head_dim_vo
    if a.v_indptr is not None:
        per_token = options.num_kv_heads * width
        _check_indptr("v_indptr", a.v_indptr, "kv_indptr", batch.kv_indptr, per_token, device)
    if a.o_indptr is not None:
        per_token = options.num_qo_heads * width
        _check_indptr("o_indptr", a.o_indptr, "qo_indptr", batch.qo_indptr, per_token, device)


def _check_longest(name: str, value: Any, longest: int) -> None:
    if validate.size(name, value) < longest:
        raise ValueError(f"{name}={value}: the batch has a request of {longest} tokens")


def _check_lengths(name: str, value: Any, batch: _core.Batch, device: torch.device) -> None:
    """seq_lens or seq_lens_q; those on the wrapper's own GPU are not read to compare."""
    value = validate.conforms(name, value, "hints", device)
    if value.numel() != batch.num_requests:
        raise ValueError(
            f"{name} has {value.numel()} elements; must have batch_size = {batch.num_requests}"
        )
    if not value.is_cpu and not _core.debugging():
        return
    value = value.cpu().reshape(-1).to(torch.int64).contiguous()
    queries = name == "seq_lens_q"
    first_other = batch.first_qo_len_other_than if queries else batch.first_kv_len_other_than
    other = first_other(validate.address(value))
    if other >= 0:
        planned = batch.qo_len(other) if queries else batch.kv_len(other)
        raise ValueError(
            f"{name}[{other}] = {int(value[other])}: the planned length of request {other} is "
            f"{planned}"
        )


def _check_indptr(
    name: str, value: Any, of: str, planned: list[int], per_token: int, device: torch.device
) -> None:
    """Checks an indptr in tokens or in elements. Reads it from the GPU too: other offsets would be
    another layout, with another result."""
    given = validate.conforms(name, value, "indptr", device).cpu().to(torch.int64)
    wanted = torch.tensor(planned, dtype=torch.int64, device="cpu")
    if not given.equal(wanted) and not given.equal(wanted * per_token):
        raise ValueError(
            f"{name} must tell the requests that {of} tells, in tokens or in elements ({per_token} "
            "of a token): v follows k, and the output q"
        )


def _check_block_tables(block_tables: Any, request: Request) -> None:
    """Checks that block_tables [batch_size, max pages] repeats paged_kv_indices."""
    batch, pages, device = request.batch, request.pages, request.device
    if pages.given is block_tables:
        return
    known = {"batch_size": batch.num_requests, "pages": -(-batch.max_kv_len // batch.page_size)}
    table = validate.conforms("block_tables", block_tables, "page_table", device, known)
    if not (table.is_cpu and pages.given.is_cpu) and not _core.debugging():
        return
    if pages.given.dim() == 2:
        if not torch.equal(_owned(table, batch).cpu(), _owned(pages.given, batch).cpu()):
            raise ValueError("block_tables differs from the block table in paged_kv_indices")
        return
    table = table.cpu().contiguous()
    indices = pages.given.cpu()
    other = batch.first_pages_other_than(
        validate.address(indices), validate.address(table), table.shape[1]
    )
    if other >= 0:
        raise ValueError(f"block_tables[{other}] differs from the pages of paged_kv_indices")
