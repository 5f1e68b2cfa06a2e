"""Bind and run: a planned variant is a kernel, its work list, and the launches bound to tensors."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from .. import _core
from .._check import tensors as _tensors
from .._check import values as check
from .._check.arguments import KvCache, PerHead
from .._check.outputs import DEFAULT_OUTPUTS, Outputs
from .._check.request import Request
from .._check.scales import Scales
from .._device.backends import Backend
from .._device.buffers import Buffer
from .._device.stream import DeviceStream
from .._device.workspace import Workspace

_NO_HEADS = PerHead()


class SegmentRun(NamedTuple):
    """Inputs of one run for a segment: the arguments of attend_to(), in their order."""

    q: torch.Tensor
    kv: KvCache  # (k, v), or one paged cache that holds both
    scales: Scales
    outputs: Outputs = DEFAULT_OUTPUTS
    # Per-head tensors of this run alone, or memory that replaces the plan's.
    memory: PerHead | tuple | _core.RunMemory | None = None


class PlannedVariant:
    """One batch, or two in one launch, each a segment with its own tensors, page table, mask and
    options. Placed and uploaded by _plan.pipeline; run any number of times, for any layer."""

    __slots__ = (
        "__weakref__",
        "_bound",
        "_requests",
        # attend_to(q, kv, scales, outputs, memory), the fields of SegmentRun, for one segment after
        # the other. Returns the result, or one result per segment.
        "attend_to",
        "backend",
        "buffers",
        "device_stream",
        "float_workspace",
        # Address of the plan's own mask; 0 if a run may change it. No kernel of two segments asks
        # which tiles of a mask are full, partial or empty.
        "mask_bits",
        "page_indices",  # addresses of each segment's on the device; 0: the upload contains them
        "place",
        "plan",
    )
    launches = 1

    def __init__(
        self,
        plan: _core.Plan,
        place: _core.Place | None,
        backend: Backend,
        requests: Sequence[Request],
        workspace: Workspace,
        names: Sequence[str] = ("",),
    ) -> None:
        """place: of an earlier plan, which a CUDA graph runs. backend: of kernels. names: of the
        segments, in messages."""
        if place is None:
            work_list = workspace.int_buffer(plan.int_bytes)
            place = place_in(work_list, workspace)
        else:
            work_list = place.buffer
        self.plan = plan
        self.place = place
        self.backend = backend
        self.device_stream = device_stream = workspace.device_stream
        # The work list and all else that launches use; the allocator knows that the current stream
        # uses it.
        self.buffers = buffers = [work_list]
        self.float_workspace = None
        if workspace.float_buffer is not None:
            self.float_workspace = workspace.float_buffer.tensor
            buffers.append(workspace.float_buffer)
        self.mask_bits = 0
        self.page_indices = page_indices = []
        masks, lens, largest_pages, alike = [], [], [], []
        held = []  # tensors of the plan that callers hold, too
        for options, _, (
            batch,
            pages,
        ), kv_layout, mask, graph_rows, _, q_given, kv_lens in requests:
            masks.append(mask)
            lens.append(kv_lens)
            if kv_lens is not None:
                buffers.append(Buffer(kv_lens))
                held.append(("seq_lens", kv_lens, kv_lens.nbytes))
            alike.append((options, kv_layout, batch.page_size, q_given))
            address, largest_page = 0, None
            if pages is not None:
                _, indices, largest_page = pages
                if indices is not None:
                    address = indices.data_ptr()
                    buffers.append(Buffer(indices))
                    name = "paged_kv_indices_buf" if graph_rows else "paged_kv_indices"
                    held.append((name, indices, batch.page_entries * indices.itemsize))
            page_indices.append(address)
            largest_pages.append(-1 if largest_page is None else largest_page)
            if mask is not None:
                buffers.append(Buffer(mask))
                if graph_rows:  # the bits may change on the device after plan()
                    held.append(("custom_mask_buf", mask, batch.mask_bytes))
                elif len(requests) == 1:
                    self.mask_bits = mask.data_ptr()
        for buffer in buffers:
            buffer.used_on_current_stream(device_stream)
        self._requests = requests
        self._bound = self.attend_to = _core.bound_run(
            place, plan, self.float_workspace, masks, largest_pages, held,
            workspace.known_tensors(alike), _FUNCTIONS, (requests, names, buffers, device_stream),
            backend.num_threads, backend.launched_by, lens,
        )  # fmt: skip
        if requests[0].q_given is not None:
            self.attend_to = functools.partial(_attend_converted, self._bound, requests[0])

    def check_run(self, *arguments: Any) -> None:
        """The checks of attend_to() alone."""
        if self.request.q_given is not None:
            arguments = (converted_query(arguments[0], self.request), *arguments[1:])
        _core.check_run(self._bound, *arguments)

    @property
    def id(self) -> str:
        return self.plan.id

    @property
    def request(self) -> Request:
        """Request of the first segment."""
        return self._requests[0]

    @property
    def int_buffer(self) -> Buffer:
        """Buffer that holds the work list."""
        return self.buffers[0]

    @property
    def shared(self) -> bool:
        """True if another owner may still run it: a CUDA graph, or a copied wrapper."""
        return self.place.shared

    @shared.setter
    def shared(self, value: bool) -> None:
        self.place.shared = value

    def memory_with(self, per_head: PerHead, skip_factor: float) -> _core.RunMemory:
        """Run memory of the plan, with the per-head tensors and skip factor of one run."""
        request = self.request
        _tensors.check_per_head(per_head, request.options, request.device, request.q_given)
        return run_memory(
            self.float_workspace, request.mask, per_head, skip_factor=skip_factor,
            kv_lens=request.kv_lens,
        )  # fmt: skip

    def memory_with_mask(self, mask: torch.Tensor) -> _core.RunMemory:
        """Run memory of the plan, with the mask of one run."""
        return run_memory(self.float_workspace, mask, mask_tiles=self.mask_tiles())

    def mask_tiles(self) -> torch.Tensor | None:
        """Memory for the tile states of a run's mask; None if the kernel uses none."""
        words = self.plan.mask_tile_words
        if words == 0:
            return None
        return torch.empty(words, dtype=torch.int32, device=self.device_stream.device)


def converted_query(q: torch.Tensor, request: Request) -> torch.Tensor:
    """q in the dtype that kernels read. Exact: float8_e5m2 has fewer bits of either kind."""
    check.tensor("q", q)
    check.has_dtype("q", q, request.q_given, "q_data_type of plan")
    check.forward_only(q=q)
    return q.to(check.TORCH_DTYPES[request.options.q_dtype])


def _attend_converted(bound: Callable, request: Request, q: torch.Tensor, *more: Any) -> Any:
    return bound(converted_query(q, request), *more)


def place_in(buffer: Buffer, workspace: Workspace) -> _core.Place:
    """Makes the Place of a work list, in memory that nothing else uses."""
    uploader = workspace.uploader()
    return _core.place(uploader, check.TORCH, buffer, buffer.tensor, buffer.num_bytes)


def run_memory(
    partials: torch.Tensor | None,
    mask: torch.Tensor | None = None,
    per_head: PerHead = _NO_HEADS,
    mask_tiles: torch.Tensor | None = None,
    skip_factor: float = 0.0,
    kv_lens: torch.Tensor | None = None,
) -> _core.RunMemory:
    """Memory that a launch uses besides the work list and the tensors of a segment.

    partials: split-KV partial results; a wrapper's outputs keep out of it under every plan.
    mask: packed. mask_tiles: tile states of one run's mask, which that run fills. skip_factor:
    replaces that of a plan which skips tiles; 0: the plan's. kv_lens: Request.kv_lens.
    """
    return _core.RunMemory(
        check.TORCH, partials, skip_factor, mask_bits=mask, mask_tiles=mask_tiles, kv_lens=kv_lens,
        **per_head._asdict(),
    )  # fmt: skip


@contextlib.contextmanager
def of_side(name: str) -> Iterator[None]:
    """Prefixes errors with the name of the segment that they are about."""
    try:
        yield
    except (NotImplementedError, TypeError, ValueError) as error:
        if not name:
            raise
        raise type(error)(f"{name}: {error}") from error


# Functions that C++ calls during a run.


# Parts of a variant: its requests, segment names, buffers and stream. NOTE: not the variant itself,
# which its own run would keep alive.
_Context = tuple[Sequence[Request], Sequence[str], Sequence[Buffer], DeviceStream]


def _segments(names: Sequence[str], given: tuple) -> Iterator[tuple[str, SegmentRun]]:
    size = len(SegmentRun._fields)
    for s, name in enumerate(names):
        run = SegmentRun(*given[s * size : (s + 1) * size])
        yield name, run._replace(outputs=Outputs(*run.outputs))


@check.eager
def _bound_to(context: _Context, *given: Any) -> list[tuple]:
    """Checks a run's tensors. Returns, for each segment, what launches for like tensors are bound
    to: strides and extents, the offset of V, and functions that make out and lse from q."""
    requests, names, *_ = context
    found = []
    for request, (name, run) in zip(requests, _segments(names, given), strict=True):
        q, outputs, options = run.q, run.outputs, request.options
        with of_side(name):
            check.forward_only(q=q)  # before anything is remembered of a traced tensor
            if isinstance(run.memory, tuple):
                heads = PerHead(*run.memory)
                _tensors.check_per_head(heads, options, request.device, request.q_given)
            strides, v_offset = _tensors.bind(q, run.kv, outputs, request)
        out_shape = (q.shape[0], options.num_qo_heads, options.head_dim_vo)
        out_dtype = check.TORCH_DTYPES[options.o_dtype]
        make_out = torch.empty_like
        if not (q.is_contiguous() and tuple(q.shape) == out_shape and q.dtype == out_dtype):
            make_out = _maker(out_shape, out_dtype)
        lse_shape = _tensors.lse_shape(outputs.lse_layout, q.shape[0], request)
        make_lse = _maker(lse_shape, torch.float32)
        found.append((strides, v_offset, make_out, make_lse))
    return found


def _maker(shape: tuple[int, ...], dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return functools.partial(torch.Tensor.new_empty, size=shape, dtype=dtype)


@check.eager
def _refuse_gradients(context: _Context, *given: Any) -> None:
    """Refuses a run whose gradient or trace would miss it, before it is launched."""
    for name, (q, kv, _, outputs, memory) in _segments(context[1], given):
        heads = PerHead(*memory)._asdict() if isinstance(memory, tuple) else {}
        keys = {"k": kv[0], "v": kv[1]} if isinstance(kv, (tuple, list)) else {"paged_kv_cache": kv}
        with of_side(name):
            check.forward_only(q=q, **keys, out=outputs.out, lse=outputs.lse, **heads)


def _stream_changed(context: _Context) -> None:
    _, _, buffers, device_stream = context
    for buffer in buffers:
        buffer.used_on_current_stream(device_stream)


_FUNCTIONS = _core.RunFunctions(
    check=_bound_to,
    refuse=_refuse_gradients,
    stream=lambda context: context[3].stream(),
    stream_changed=_stream_changed,
)
