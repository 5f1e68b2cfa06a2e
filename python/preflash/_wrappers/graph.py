"""use_cuda_graph=True: what plan() keeps in the caller's buffers, what a captured run holds on to.

A graph holds addresses and sizes by value: of the work list, the page table and the mask, the
number of CTAs, the extents of q, k and v. So the arrays live in the caller's buffers, the work list
of a captured run is overwritten where it is, and a batch that would reach beyond what was captured
is refused.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .. import _core
from .._check import torch_modes, validate
from .._check.lengths import IndexArrays
from .._check.request import Request
from .._device.stream import DeviceStream
from .._device.workspace import check_apart
from .._plan import pipeline
from .._plan.masks import OVERREAD, MaskSource
from .._plan.pipeline import ArrayCopy
from .plan import CapturedBuffers, Plan

# Work lists that options first asked for during a capture may take; memory that is allocated then
# belongs to the graph, which reuses it.
_RESERVED = 2
# Streams to choose from, so that one is not in a capture; a capture has one, seldom two.
_STREAMS = 3

_ALL = 2**31  # elements of an array
_INDICES, _LAST_PAGE_LEN = "paged_kv_indices_buf", "paged_kv_last_page_len_buf"
_MASK, _MASK_INDPTR = "custom_mask_buf", "mask_indptr_buf"


class GraphBuffers(NamedTuple):
    """The caller's memory in which plan() keeps its arrays, checked."""

    qo_indptr: torch.Tensor  # [batch_size + 1]
    kv_indptr: torch.Tensor  # [batch_size + 1]
    indices: torch.Tensor | None  # for the largest batch; None: ragged
    last_page_len: torch.Tensor | None  # [batch_size]; None: ragged
    mask: torch.Tensor | None  # packed
    mask_indptr: torch.Tensor | None  # [batch_size + 1], of which engines leave out the last

    @property
    def batch_size(self) -> int:
        return self.qo_indptr.numel() - 1

    def held(self) -> _core.PinnedAddresses:
        """Graphs hold the addresses of this memory, so that it has to stay as it is now."""
        held = _core.PinnedAddresses(
            torch_modes.TORCH,
            since="the constructor",
            way_out="CUDA graphs hold its address: construct another wrapper",
        )
        kv_indptr = "kv_indptr_buf" if self.indices is None else "paged_kv_indptr_buf"
        names = ("qo_indptr_buf", kv_indptr, _INDICES, _LAST_PAGE_LEN, _MASK, _MASK_INDPTR)
        for name, tensor in zip(names, self, strict=True):
            if tensor is not None:
                held.hold(name, tensor, tensor.data_ptr(), tensor.nbytes)
        return held


def check_graph_buffers(given: dict[str, Any], workspace: torch.Tensor) -> GraphBuffers:
    """The buffers among the constructor's arguments, by name."""
    device = workspace.device
    qo_indptr = _buffer("qo_indptr_buf", given, device)
    if qo_indptr.numel() == 0:
        raise ValueError("qo_indptr_buf is empty; must have batch_size + 1 elements")
    batch_size = qo_indptr.numel() - 1
    indices = last_page_len = mask_indptr = mask = None
    if _INDICES in given:
        kv_indptr = _buffer("paged_kv_indptr_buf", given, device, numel=batch_size + 1)
        is_table = isinstance(given[_INDICES], torch.Tensor) and given[_INDICES].dim() == 2
        rule = "plan_table" if is_table else "plan_buffer"
        indices = _buffer(_INDICES, given, device, rule)
        last_page_len = _buffer(_LAST_PAGE_LEN, given, device, numel=batch_size)
    else:
        kv_indptr = _buffer("kv_indptr_buf", given, device, numel=batch_size + 1)
    name, alias = given[_MASK_INDPTR], given["qk_indptr_buf"]
    if name is not None and alias is not None and name is not alias:
        raise TypeError(
            "mask_indptr_buf and qk_indptr_buf are two spellings of one argument; give one of them"
        )
    if name is not None or alias is not None:
        both_names = {_MASK_INDPTR: alias if name is None else name}
        mask_indptr = _buffer(_MASK_INDPTR, both_names, device)
        if mask_indptr.numel() < batch_size:
            raise ValueError(
                f"mask_indptr_buf has {mask_indptr.numel()} elements; must have batch_size + 1 = "
                f"{batch_size + 1}, as qo_indptr_buf has"
            )
    if given[_MASK] is not None:
        mask = _buffer(_MASK, given, device, "mask_buffer")
    # Buffers that kernels read at run time must share no memory with others.
    memory = {**given, "float_workspace_buffer": workspace}
    for read in (_INDICES, _MASK):
        for other, value in memory.items():
            if other != read and value is not None and given.get(read) is not None:
                check_apart(**{other: value, read: given[read]})
    return GraphBuffers(qo_indptr, kv_indptr, indices, last_page_len, mask, mask_indptr)


def required_buffer(name: str, given: dict[str, Any]) -> Any:
    """Returns a buffer that the constructor must have got, by name, not checked otherwise."""
    if given[name] is None:
        raise ValueError(
            f"{name}=None with use_cuda_graph=True: plan() keeps its arrays in buffers of the "
            "caller, where a captured run finds them; pass one"
        )
    return given[name]


def _buffer(
    name: str,
    given: dict[str, Any],
    device: torch.device,
    rule: str = "plan_buffer",
    numel: int | None = None,
) -> torch.Tensor:
    value = validate.conforms(name, required_buffer(name, given), rule, device)
    if numel is not None and value.numel() != numel:
        raise ValueError(
            f"{name} has {value.numel()} elements; must have {numel}, for the batch size of the "
            "other buffers"
        )
    return value


class GraphMode:
    """CUDA-graph mode of one wrapper: buffers that plan() writes; plans are the wrapper's state."""

    def __init__(self, buffers: GraphBuffers, device_stream: DeviceStream) -> None:
        self.buffers = buffers
        self.held = buffers.held()
        self._device_stream = device_stream
        self.kv_lens: torch.Tensor | None = None  # Request.kv_lens of the last plan
        # A constant with which the wrapper has filled the buffer of qo_indptr; None: it has not.
        self.filled_with: torch.Tensor | None = None
        self.reserved: list[_core.Buffer] = []
        # Made now: nothing is created during a capture. torch has 32 streams and hands them out in
        # turns, so that any of these may be one that is captured.
        device = device_stream.device
        count = _STREAMS if device.type == "cuda" else 0
        self._beside_captures = [torch.cuda.Stream(device) for _ in range(count)]

    @property
    def mask_bytes(self) -> int:
        """Maximum packed-mask bytes of any plan."""
        return 0 if self.buffers.mask is None else self.buffers.mask.numel()

    def filled_by_plan(self) -> dict[str, torch.Tensor]:
        """The buffers of both indptr, by the names of plan()'s arguments."""
        return {"qo_indptr": self.buffers.qo_indptr, "kv_indptr": self.buffers.kv_indptr}

    # Checks of plan(), before anything changes.

    def check_may_plan(self) -> None:
        self.held.check()  # plan() must not write to freed or replaced memory
        if self._device_stream.is_capturing():
            raise RuntimeError(
                "plan() cannot run while its stream is being captured into a CUDA graph: call it "
                "before the capture, capture run() alone, and call plan() again before replays"
            )

    def check_batch(self, batch: _core.Batch) -> None:
        if batch.num_requests != self.buffers.batch_size:
            raise ValueError(
                f"the batch has {batch.num_requests} requests; with use_cuda_graph=True the batch "
                f"size is fixed at {self.buffers.batch_size}, by the constructor's buffers: pad "
                "the batch with empty requests, or use another wrapper"
            )

    def check_captured(self, captured: CapturedBuffers, request: Request) -> None:
        """Raises ValueError if a captured run could not go on with the request's batch."""
        self.check_kv_lens(request.kv_lens)
        for options, place in captured:
            place.check_captured(0, request.batch, request.largest_page)
            check_captured_mask(options.mask == _core.Mask.custom, request.mask is not None)

    def check_kv_lens(self, kv_lens: torch.Tensor | None) -> None:
        """Raises ValueError unless a captured run reads the lengths of keys where plan() has
        them."""
        before = self.kv_lens
        if kv_lens is before or (
            kv_lens is not None and before is not None and kv_lens.data_ptr() == before.data_ptr()
        ):
            return
        has = "no seq_lens" if before is None else "another seq_lens"
        raise ValueError(
            f"lengths_are_upper_bounds={kv_lens is not None}: a CUDA graph has captured a run() "
            f"with {has}; pass the tensor of the capture in every plan(), or use another wrapper"
        )

    def check_mask(self, batch: _core.Batch) -> None:
        """Raises ValueError if the buffers have no room for the batch's custom mask."""
        for name, buffer in ((_MASK, self.buffers.mask), (_MASK_INDPTR, self.buffers.mask_indptr)):
            if buffer is None:
                raise ValueError(
                    f"a custom mask needs {name} with use_cuda_graph=True, which the constructor "
                    "did not get"
                )
        room = self.mask_bytes
        if batch.mask_bytes + OVERREAD > room:
            raise ValueError(
                f"custom_mask_buf has {room} bytes; this batch's mask has {batch.mask_bytes}, and "
                f"kernels, which read words, need {OVERREAD} bytes behind it: construct the "
                "wrapper with a larger one"
            )

    def check_buffers(self, batch: _core.Batch) -> None:
        """Raises ValueError where a length buffer holds other values than plan() read. Waits for
        the GPU, so checks nothing under a capture."""
        if self._device_stream.is_capturing():
            return
        buffers, paged = self.buffers, batch.page_size > 0
        arrays = {
            "qo_indptr_buf": (buffers.qo_indptr, batch.qo_indptr),
            "paged_kv_indptr_buf" if paged else "kv_indptr_buf": (
                buffers.kv_indptr,
                batch.kv_indptr,
            ),
        }
        if paged:
            # The last page of a request without pages does not count.
            owned = [i for i in range(batch.num_requests) if batch.kv_len(i) > 0]
            last, planned = buffers.last_page_len.tolist(), batch.last_page_len
            for i in owned:
                _check_planned(_LAST_PAGE_LEN, i, last[i], planned[i])
        for name, (buffer, planned) in arrays.items():
            for i, (now, then) in enumerate(zip(buffer.tolist(), planned, strict=True)):
                _check_planned(name, i, now, then)

    # Actions of plan() after all checks.

    def order_behind_runs(self, plan: Plan) -> None:
        """Orders the current stream after runs on other streams that read what plan() is about to
        overwrite. Replays are unknown here."""
        # Page indices and mask bits are read where the caller's buffers are: each variant knows the
        # streams of its own runs.
        captured = [place for _, place in plan.captured]
        _core.order_behind_users(list(plan.variants()), captured, plan.workspace)

    def copy_in(
        self, arrays: IndexArrays, batch: _core.Batch, mask: MaskSource | None
    ) -> list[ArrayCopy]:
        """The arrays of plan() and the buffers that the upload copies them to. Writes the mask."""
        buffers = self.buffers
        copies = [(buffers.kv_indptr, arrays.kv_indptr, _ALL)]
        if arrays.qo_indptr is not self.filled_with:
            copies.append((buffers.qo_indptr, arrays.qo_indptr, _ALL))
            self.filled_with = None
        if buffers.indices is not None:
            copies += (
                (buffers.indices, arrays.indices, batch.kv_end),  # a list may be longer
                (buffers.last_page_len, arrays.last_page_len, _ALL),
            )
        if mask is not None:
            begins = torch.tensor(batch.mask_indptr, dtype=torch.int32, device="cpu")
            begins = begins[: buffers.mask_indptr.numel()]
            copies.append((buffers.mask_indptr, begins, _ALL))
            if not (mask.packed and mask.values.data_ptr() == buffers.mask.data_ptr()):
                mask = mask._replace(values=_apart_from(buffers.mask, mask.values))
                mask.write(buffers.mask, batch, self._device_stream)
        return copies

    def reserve(self, workspace: _core.Workspace, num_bytes: int) -> None:
        """Reserves memory for work lists of about this size. NOTE: call it before the plan's own
        upload, so that the memory is free once that upload is over."""
        if not self._beside_captures:
            return
        self.reserved = [buffer for buffer in self.reserved if buffer.num_bytes >= num_bytes]
        while len(self.reserved) < _RESERVED:
            room = max(num_bytes + num_bytes // 4, 64 * 1024)
            self.reserved.append(workspace.allocate(room))

    # Planning during a capture, for a run with options that no run had before.

    def place_beside_capture(
        self, workspace: _core.Workspace, variant: _core.ExecutionPlan
    ) -> None:
        """Places a plan and uploads it outside of the capture, while the host waits."""
        where = workspace.plan_buffer(self._take_reserved(variant.plan.int_bytes))
        variant.allocate_in(workspace, where)
        stream = self._device_stream.stream()
        where.arrive_before(stream)  # waits: the reserve is unused from then on
        with torch.cuda.stream(self._stream_beside_captures()):
            pipeline.upload(workspace, (variant,))
        where.arrive_before(stream)

    def _stream_beside_captures(self) -> torch.cuda.Stream:
        for stream in self._beside_captures:
            with torch.cuda.stream(stream):
                if not torch.cuda.is_current_stream_capturing():
                    return stream
        raise RuntimeError(
            "the stream is being captured into a CUDA graph together with others, and these "
            "options need a plan of their own, for whose upload there is no stream left: call it "
            "once before the capture"
        )

    def _take_reserved(self, num_bytes: int) -> _core.Buffer:
        for i, buffer in enumerate(self.reserved):
            if buffer.num_bytes >= num_bytes:
                return self.reserved.pop(i)
        raise RuntimeError(
            "the stream is being captured into a CUDA graph, and these options need a plan of "
            f"their own, for which {len(self.reserved)} of {_RESERVED} reserved work lists are "
            "left: call it once before the capture"
        )


def _check_planned(name: str, i: int, now: int, planned: int) -> None:
    if now != planned:
        raise ValueError(
            f"{name}[{i}] = {now}, and plan() read {planned}: run() and replays use the lengths of "
            "plan(), not those that the buffer holds; call plan() after every change of lengths"
        )


def check_captured_mask(captured_mask: bool, has_mask: bool) -> None:
    """Raises ValueError unless both the graph and the plan have a mask, or neither."""
    if captured_mask and not has_mask:
        raise ValueError(
            "custom_mask=None: a CUDA graph has captured a run() with a custom mask, whose bits "
            "would be those of an earlier batch; give a mask (of ones, if all is kept) or use "
            "another wrapper"
        )
    if has_mask and not captured_mask:
        raise ValueError(
            "custom_mask: a CUDA graph has captured a run() without one and would leave it out; "
            "use another wrapper"
        )


def _apart_from(buffer: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Returns the source, or a copy if it is in the buffer's storage."""
    same = source.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
    return source.clone() if same else source
