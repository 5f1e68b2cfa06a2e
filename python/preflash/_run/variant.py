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
from .._check.request import Request, expected_of
from .._check.scales import Scales
from .._device.backends import Backend
from .._device.buffers import Buffer
from .._device.stream import DeviceStream

_NO_HEADS = PerHead()


class SegmentRun(NamedTuple):
    """What one run brings for a segment: the arguments of attend_to(), in their order."""

    q: torch.Tensor
    kv: KvCache  # (k, v), or one paged cache that holds both
    scales: Scales
    outputs: Outputs = DEFAULT_OUTPUTS
    memory: _core.RunMemory | None = None  # of this run alone, instead of the plan's


class PlannedVariant:
    """One batch, or two in one launch, each a segment with its own tensors, page table, mask and
    options. Placed and uploaded by _plan.pipeline; run any number of times, for any layer."""

    launches = 1

    # attend_to(q, kv, scales, outputs, memory), those of SegmentRun, for one segment after the
    # other: the result, or that of each segment. check_run() has its arguments, and its checks of
    # tensors.
    attend_to: Callable[..., Any]
    check_run: Callable[..., None]

    def __init__(
        self,
        plan: _core.Plan,
        place: _core.Place,
        backend: Backend,
        requests: Sequence[Request],
        device_stream: DeviceStream,
        buffers: Sequence[Buffer],
        names: Sequence[str] = ("",),
    ) -> None:
        """buffers: the work list, the float workspace or None, and all else that launches use; the
        allocator knows that the current stream uses them. names: of the segments, in messages."""
        self.plan = plan
        self.place = place
        self.backend = backend
        self.device_stream = device_stream
        self.buffers = [buffer for buffer in buffers if buffer is not None]
        self.float_workspace = None if buffers[1] is None else buffers[1].tensor
        self._requests = requests
        expected = [expected_of(request, device_stream.device) for request in requests]
        self.expected = expected[0]  # of the one segment
        bound = _core.BoundRun(
            place,
            plan,
            partials=self.float_workspace,
            masks=[request.mask for request in requests],
            check=functools.partial(_bound_to, expected, names),
            refuse=functools.partial(_refuse_gradients, names),
            stream=device_stream.stream,
            stream_changed=functools.partial(_use, self.buffers, device_stream),
            num_threads=backend.num_threads,
            launched_by=backend.launched_by,
        )
        for request in requests:
            _hold(bound, request)
        self.attend_to = bound.run
        self.check_run = bound.check

    @property
    def id(self) -> str:
        return self.plan.id

    @property
    def device_plan(self) -> _core.Place:
        return self.place

    @property
    def int_buffer(self) -> Buffer:
        """Where the work list is."""
        return self.place.buffer

    @property
    def shared(self) -> bool:
        """Whether anybody else may still run it."""
        return self.place.shared

    @shared.setter
    def shared(self, value: bool) -> None:
        self.place.shared = value

    def memory_with(self, per_head: PerHead) -> _core.RunMemory:
        """The plan's own, and what one run brings."""
        _tensors.check_per_head(per_head, self.expected.options, self.expected.device)
        return run_memory(self.float_workspace, self._requests[0].mask, per_head)

    def memory_with_mask(self, mask: torch.Tensor) -> _core.RunMemory:
        """The plan's own, and the mask of one run."""
        return run_memory(self.float_workspace, mask, classes=self.mask_classes())

    def mask_classes(self) -> torch.Tensor | None:
        """Memory for the classes of the tiles of one run's mask, where the kernel goes by them."""
        words = self.plan.mask_class_words
        if words == 0:
            return None
        return torch.empty(words, dtype=torch.int32, device=self.expected.device)


def run_memory(
    partials: torch.Tensor | None,
    mask: torch.Tensor | None = None,
    per_head: PerHead = _NO_HEADS,
    classes: torch.Tensor | None = None,
) -> _core.RunMemory:
    """What a launch uses beside the work list and the tensors of a segment.

    partials: memory for those of split KV; a wrapper's outputs keep out of it under every plan.
    mask: packed. classes: of a mask of one run, which that run fills.
    """
    return _core.RunMemory(
        check.TORCH, partials, mask_bits=mask, mask_classes=classes, **per_head._asdict()
    )


@contextlib.contextmanager
def of_side(name: str) -> Iterator[None]:
    """Says of which segment an error is about."""
    try:
        yield
    except (NotImplementedError, TypeError, ValueError) as error:
        if not name:
            raise
        raise type(error)(f"{name}: {error}") from error


# What a run asks of Python: module-level functions, so that no launch holds its variant.


def _segments(names: Sequence[str], given: tuple) -> Iterator[tuple[str, SegmentRun]]:
    size = len(SegmentRun._fields)
    for s, name in enumerate(names):
        run = SegmentRun(*given[s * size : (s + 1) * size])
        yield name, run._replace(outputs=Outputs(*run.outputs))


@check.eager
def _bound_to(
    expected: Sequence[_tensors.Expected], names: Sequence[str], *given: Any
) -> list[tuple]:
    """Every check of a run's tensors, and what launches for others like them are bound to: strides
    and extents, where V begins, and what makes out and lse of q, for each segment."""
    found = []
    for one, (name, run) in zip(expected, _segments(names, given), strict=True):
        q, outputs = run.q, run.outputs
        with of_side(name):
            check.forward_only(q=q)  # before anything is remembered of a traced tensor
            numbers = _tensors.bind(q, run.kv, outputs, one)
        out_shape = (q.shape[0], one.options.num_qo_heads, one.options.head_dim_vo)
        out_dtype = check.TORCH_DTYPES[one.options.o_dtype]
        make_out = torch.empty_like
        if not (q.is_contiguous() and tuple(q.shape) == out_shape and q.dtype == out_dtype):
            make_out = _maker(out_shape, out_dtype)
        lse_shape = _tensors.lse_shape(outputs.lse_layout, q.shape[0], one)
        make_lse = _maker(lse_shape, torch.float32)
        found.append((numbers.strides, numbers.v_offset, make_out, make_lse))
    return found


def _maker(shape: tuple[int, ...], dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return functools.partial(torch.Tensor.new_empty, size=shape, dtype=dtype)


@check.eager
def _refuse_gradients(names: Sequence[str], *given: Any) -> None:
    """Refuses a run whose gradient or trace would miss it, before it is launched."""
    for name, (q, kv, _, outputs, _) in _segments(names, given):
        keys = {"k": kv[0], "v": kv[1]} if isinstance(kv, (tuple, list)) else {"paged_kv_cache": kv}
        with of_side(name):
            check.forward_only(q=q, **keys, out=outputs.out, lse=outputs.lse)


def _use(buffers: Sequence[Buffer], device_stream: DeviceStream) -> None:
    for buffer in buffers:
        buffer.used_on_current_stream(device_stream)


def _hold(bound: _core.BoundRun, request: Request) -> None:
    """What a plan leaves in tensors that callers hold, too, and its runs look for there."""
    batch, indices, mask = request.lengths.batch, request.page_indices, request.mask
    if indices is not None:
        name = "paged_kv_indices_buf" if request.graph_rows else "paged_kv_indices"
        bound.hold(name, indices, indices.data_ptr(), batch.kv_end * indices.itemsize)
    if request.graph_rows and mask is not None:
        bound.hold("custom_mask_buf", mask, mask.data_ptr(), batch.mask_bytes)
