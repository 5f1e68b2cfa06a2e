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
from .._device.stream import DeviceStream, sent
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
    options: the kernel, the work list and, once placed and uploaded (_plan.pipeline), the launches.
    Run any number of times, for any layer."""

    __slots__ = (
        "__weakref__",
        # attend_to(q, kv, scales, outputs, memory), the fields of SegmentRun, for one segment after
        # the other. Returns the result, or one result per segment.
        "attend_to",
        "backend",
        "bound",  # attend_to() for queries that need no conversion
        "buffers",  # the work list, and all else that launches use
        "device_stream",
        "float_workspace",
        "place",  # the memory of the work list
        "plan",
        "requests",
    )
    launches = 1

    def __init__(self, backend: Backend, plan: _core.Plan, requests: tuple[Request, ...]) -> None:
        self.backend = backend
        self.plan = plan
        self.requests = requests

    def place_in(
        self,
        workspace: Workspace,
        names: Sequence[str] = ("",),
        where: _core.Place | None = None,
    ) -> None:
        """Allocates the work list: in `where`, the place that a CUDA graph captured, or in the
        workspace. names: of the segments, in messages."""
        if where is None:
            where = new_place(workspace.int_buffer(self.plan.int_bytes), workspace)
        self.place, requests = where, self.requests
        self.device_stream = device_stream = workspace.device_stream
        self.buffers = buffers = [where.buffer]
        self.float_workspace = None
        if workspace.float_buffer is not None:
            self.float_workspace = workspace.float_buffer.tensor
            buffers.append(workspace.float_buffer)
        for request in requests:
            pages = request.pages
            for tensor in (request.kv_lens, request.mask, pages and pages.on_device):
                if tensor is not None:
                    kept = request.graph_rows > 0  # from plan to plan
                    buffers.append(workspace.buffer_of(tensor) if kept else Buffer(tensor))
        for buffer in buffers:
            buffer.used_on_current_stream(device_stream)
        settings = workspace.run_settings(self.backend, requests, _FUNCTIONS)
        context = (requests, names, buffers, device_stream)
        self.bound = self.attend_to = _core.bound_run(where, self.plan, settings, context)
        if requests[0].q_given is not None:
            self.attend_to = functools.partial(_attend_converted, self.bound, requests[0])

    def give_mask(self, mask: torch.Tensor) -> None:
        """Sets the mask of the request, which was planned without one; before place_in()."""
        self.requests = (self.request._replace(mask=mask),)

    def check_run(self, *arguments: Any) -> None:
        """The checks of attend_to() alone."""
        if self.request.q_given is not None:
            arguments = (converted_query(arguments[0], self.request), *arguments[1:])
        _core.check_run(self.bound, *arguments)

    @property
    def id(self) -> str:
        return self.plan.id

    @property
    def request(self) -> Request:
        """Request of the first segment."""
        return self.requests[0]

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


def new_place(buffer: Buffer, workspace: Workspace) -> _core.Place:
    """Makes the Place of a work list, in memory that nothing else uses."""
    uploader = workspace.uploader()
    return _core.place(uploader, check.TORCH, buffer)


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
def error_context(name: str) -> Iterator[None]:
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
        with error_context(name):
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
        with error_context(name):
            check.forward_only(q=q, **keys, out=outputs.out, lse=outputs.lse, **heads)


def _stream_changed(context: _Context) -> None:
    _, _, buffers, device_stream = context
    for buffer in buffers:
        buffer.used_on_current_stream(device_stream)


def _copy(buffer: torch.Tensor, array: torch.Tensor, most: int) -> None:
    """Copies an array of plan(), or a block table, to where CUDA graphs read it."""
    if _is_start_of(buffer, array):
        return
    if array.dim() == 1:
        array = array[:most]
    rows = sent(array.contiguous(), buffer.device) if array.is_cpu else array
    if rows.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr():
        rows = rows.clone()
    into = buffer[:, : rows.shape[1]] if rows.dim() == 2 else buffer[: rows.numel()]
    into.copy_(rows)


def _is_start_of(buffer: torch.Tensor, array: torch.Tensor) -> bool:
    """True if the caller passed the buffer itself, or its beginning."""
    return (
        array.data_ptr() == buffer.data_ptr()
        and array.device == buffer.device
        and array.dtype == buffer.dtype
        and (array.is_contiguous() if array.dim() == 1 else array.stride() == buffer.stride())
    )


_FUNCTIONS = _core.RunFunctions(
    check=_bound_to,
    refuse=_refuse_gradients,
    stream_changed=_stream_changed,
    copy=_copy,
)
