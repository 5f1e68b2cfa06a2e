"""Two batches in one launch, each a segment with its own tensors, page table, mask and options.

The way is that of _plan.pipeline, for a list of requests.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from .. import _core
from .._check import tensors as _tensors
from .._check import values as check
from .._check.arguments import KvCache, PerHead, Result
from .._check.outputs import DEFAULT_OUTPUTS, Outputs
from .._check.request import Request, expected_of
from .._check.scales import Scales
from .._device import backends
from .._device.buffers import Buffer
from .._device.stream import DeviceStream
from .._device.workspace import Workspace
from .place import Captured, Memory, Place, held_memory
from .variant import refuse_gradients

_LAUNCHES_KEPT = 64

# Names of their own for what every run() asks.
_jit_tracing = check.jit_is_tracing
_grad_enabled = check.is_grad_enabled
_forward_ad = check.forward_ad
_signature = _tensors.signature


class SegmentRun(NamedTuple):
    """What one run brings for a segment."""

    q: torch.Tensor
    kv: KvCache  # (k, v), or one paged cache that holds both
    scales: Scales
    outputs: Outputs = DEFAULT_OUTPUTS
    per_head: PerHead = PerHead()
    mask: torch.Tensor | None = None  # packed, of this run alone; None: the request's


class _Checked(NamedTuple):
    """What is known of a segment's tensors once they have been checked."""

    v_offset: int
    out_shape: tuple[int, int, int]
    out_dtype: torch.dtype
    lse_shape: tuple[int, int]


class _Bound(NamedTuple):
    start: Callable[..., bool]
    segments: tuple[_Checked, ...]


class PlannedSegments:
    """Placed and uploaded; run any number of times, for any layer."""

    launches = 1

    def __init__(
        self,
        plan: _core.Plan,
        place: Place,
        backend: backends.Backend,
        requests: Sequence[Request],
        workspace: Workspace,
        names: Sequence[str] = (),
    ) -> None:
        """names: of the segments, in messages."""
        self.plan = plan
        self.place = place
        self.captured: tuple[Captured, ...] | None = None  # of each segment, by CUDA graphs
        self._backend = backend
        self._workspace = workspace
        self._names = names
        self._device_stream = workspace.device_stream
        self._stream = workspace.device_stream.stream()
        self._describe(plan, requests)

    @property
    def id(self) -> str:
        return self.plan.id

    @property
    def shared(self) -> bool:
        """Whether a CUDA graph may still run it."""
        return self.place.shared

    @property
    def backend(self) -> backends.Backend:
        return self._backend

    def draft(self, requests: Sequence[Request]) -> _core.Plan:
        """A plan for other lengths, for write(). Changes nothing."""
        return _counted(self._workspace, self._backend, requests)

    def write(self, plan: _core.Plan, requests: Sequence[Request]) -> None:
        """Another plan in the place of this one, where CUDA graphs look for it."""
        _upload(self._device_stream, self.place, plan, requests)
        self._describe(plan, requests)
        self._stream = self._device_stream.stream()

    def order_behind_runs(self) -> None:
        """What the current stream does from now on comes after the runs of other streams."""
        for buffer in self._kept:
            buffer.order_behind_users(self._device_stream)

    @check.eager
    def attend_to(self, runs: Sequence[SegmentRun]) -> tuple[Result, ...]:
        """One result for each segment, in the order of the plan."""
        if len(runs) != len(self._expected):
            raise ValueError(
                f"the plan has {len(self._expected)} segments; got tensors for {len(runs)}"
            )
        try:
            key = tuple([key_of_run(run) for run in runs])
            bound = self._bound.get(key)
        except (AttributeError, TypeError, ValueError, RuntimeError):
            bound, key = None, None  # no ordinary tensors: the checks say which argument it is
        if bound is None:
            bound = self._bind(key, runs)
        refuse_gradients_of(runs, self._names)
        results, arguments = [], []
        for run, checked, mask, expected in zip(
            runs, bound.segments, self._masks, self._expected, strict=True
        ):
            try:
                result, row = _filled(run, checked, mask, expected)
            except (RuntimeError, TypeError):  # what looks like the tensors before, as in vmap
                self._bind(None, runs)
                raise
            results.append(result)
            arguments.append(row)
        stream = self._device_stream.stream()
        if stream != self._stream:
            self.place.device_plan.arrive_before(stream)
            for buffer in self._kept:
                buffer.used_on_current_stream(self._device_stream)
            self._stream = stream
        captured = bound.start(
            arguments,
            self._partials,
            stream,
            self._device_stream.num_threads(),
        )
        if captured:
            self._note_capture(runs)
        for run in runs:
            check.written(run.outputs.out, run.outputs.lse)
        return tuple(results)

    def _describe(self, plan: _core.Plan, requests: Sequence[Request]) -> None:
        device = self._device_stream.device
        self.plan = plan
        self._bound: dict[tuple, _Bound] = {}  # what another plan found right may be wrong now
        self._masks = [request.mask for request in requests]
        self._expected = [expected_of(request, device) for request in requests]
        self._kept = _kept(self._workspace, self.place, requests)
        for buffer in self._kept:
            buffer.used_on_current_stream(self._device_stream)
        floats = self._workspace.float_buffer
        self._held = held_memory(self.place, requests)
        self._partials = None if floats is None else floats.tensor

    def _bind(self, key: tuple | None, runs: Sequence[SegmentRun]) -> _Bound:
        strides, segments = [], []
        for s, (run, expected) in enumerate(zip(runs, self._expected, strict=True)):
            with of_side(self._names[s] if self._names else ""):
                check.forward_only(q=run.q)  # before anything is remembered of a traced tensor
                numbers = _tensors.bind(run.q, run.kv, run.outputs, expected)
            options, tokens = expected.options, run.q.shape[0]
            strides.append(numbers.strides)
            segments.append(
                _Checked(
                    v_offset=numbers.v_offset,
                    out_shape=(tokens, options.num_qo_heads, options.head_dim_vo),
                    out_dtype=check.TORCH_DTYPES[options.o_dtype],
                    lse_shape=_tensors.lse_shape(run.outputs.lse_layout, tokens, expected),
                )
            )
        launch = _core.Launch.of_segments(self.place.device_plan, strides)
        bound = _Bound(self._backend.runner_of_segments(launch, self._held), tuple(segments))
        if key is not None:
            if len(self._bound) >= _LAUNCHES_KEPT:
                self._bound.clear()
            self._bound[key] = bound
        return bound

    def _note_capture(self, runs: Sequence[SegmentRun]) -> None:
        now = []
        for run, expected in zip(runs, self._expected, strict=True):
            k, v = run.kv if isinstance(run.kv, (tuple, list)) else (run.kv, run.kv)
            tokens = 0 if expected.page_size > 0 or expected.kv_layout == "NHD" else 1
            extent = min(k.shape[tokens], v.shape[tokens])
            now.append(Captured(run.q.shape[0], extent, expected.page_size))
        if self.captured is not None:
            before = self.captured
            now = [Captured(*map(max, *pair)) for pair in zip(before, now, strict=True)]
        self.captured = tuple(now)
        self.place.hold(self._partials, self.plan.float_bytes)


def plan_segments(
    workspace: Workspace,
    backend: str | backends.Backend,
    requests: Sequence[Request],
    names: Sequence[str] = (),
) -> PlannedSegments:
    """Plans, places and uploads. Raises everything that a public plan() raises once its arguments
    are checked."""
    if isinstance(backend, str):
        device = workspace.device_stream.device
        backend = backends.choose(backend, device, *(request.options for request in requests))
    plan = _counted(workspace, backend, requests)
    place = Place(workspace.int_buffer(plan.int_bytes), workspace.uploader())
    _upload(workspace.device_stream, place, plan, requests)
    return PlannedSegments(plan, place, backend, requests, workspace, names)


@contextlib.contextmanager
def of_side(name: str) -> Iterator[None]:
    """Says of which segment an error is about."""
    try:
        yield
    except (NotImplementedError, TypeError, ValueError) as error:
        if not name:
            raise
        raise type(error)(f"{name}: {error}") from error


def _counted(
    workspace: Workspace, backend: backends.Backend, requests: Sequence[Request]
) -> _core.Plan:
    device = workspace.device_stream.device
    segments = [(one.options, one.lengths.batch, one.graph_rows) for one in requests]
    plan = backend.plan_segments(device, segments, workspace.float_bytes)
    room = workspace.int_room
    if room is not None and plan.int_bytes > room:
        raise ValueError(
            f"int_workspace_buffer has {room} bytes; this plan needs {plan.int_bytes} "
            "(workspace_size tells the sizes beforehand)"
        )
    return plan


def _upload(
    device_stream: DeviceStream, place: Place, plan: _core.Plan, requests: Sequence[Request]
) -> None:
    pages = [request.page_indices for request in requests]
    addresses = [0 if indices is None else indices.data_ptr() for indices in pages]
    place.buffer.used_on_current_stream(device_stream)
    # NOTE: no kernel of two segments goes by the classes of a mask's tiles.
    _core.write_plans([(place.device_plan, plan)], addresses, 0, device_stream.stream(), None, None)


def _kept(workspace: Workspace, place: Place, requests: Sequence[Request]) -> list[Buffer]:
    """The work list and all else that launches use."""
    kept = [place.buffer]
    if workspace.float_buffer is not None:
        kept.append(workspace.float_buffer)
    for request in requests:
        kept += [Buffer(t) for t in (request.page_indices, request.mask) if t is not None]
    return kept


def refuse_gradients_of(runs: Sequence[SegmentRun], names: Sequence[str] = ()) -> None:
    """Refuses runs whose gradient would miss them, before any is launched. Asks little of ordinary
    ones, as .variant does.

    names: of the segments, in messages.
    """
    recorded = _jit_tracing() or _forward_ad._current_level >= 0
    if not (recorded or _grad_enabled()):
        return
    for s, (q, kv, _, outputs, *_) in enumerate(runs):
        pair = kv if isinstance(kv, (tuple, list)) else (kv,)
        if recorded or _differentiable(q, *pair, outputs.out, outputs.lse):
            with of_side(names[s] if names else ""):
                refuse_gradients(q, kv, outputs.out, outputs.lse)


def _differentiable(*tensors: torch.Tensor | None) -> bool:
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)


def key_of_run(run: SegmentRun) -> tuple:
    """Everything that the checks of a segment's tensors look at, except addresses."""
    kv, outputs = run.kv, run.outputs
    pair = kv if isinstance(kv, (tuple, list)) else (kv,)
    key = (_signature(run.q), *map(_signature, pair))
    if outputs is DEFAULT_OUTPUTS:
        return key
    of_out, of_lse = _signature(outputs.out), _signature(outputs.lse)
    return (*key, of_out, of_lse, outputs.return_lse, outputs.lse_layout)


def _filled(
    run: SegmentRun, checked: _Checked, mask: torch.Tensor | None, expected: _tensors.Expected
) -> tuple[Result, tuple]:
    """Allocates what a segment returns, and fills in what _core takes for it."""
    q, kv, outputs = run.q, run.kv, run.outputs
    k, v = kv if isinstance(kv, (tuple, list)) else (kv, kv)
    out, lse = outputs.out, outputs.lse
    if out is None:
        out = q.new_empty(checked.out_shape, dtype=checked.out_dtype)
    if lse is None and outputs.return_lse:
        lse = q.new_empty(checked.lse_shape, dtype=torch.float32)
    if run.mask is not None:
        mask = run.mask
    extras = None
    if mask is not None or run.per_head.given:
        _tensors.check_per_head(run.per_head, expected.options, expected.device)
        extras = Memory(mask=mask, per_head=run.per_head).extras()
    sm_scale, out_scale = run.scales
    arguments = (
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr() + checked.v_offset,
        out.data_ptr(),
        0 if lse is None else lse.data_ptr(),
        sm_scale,
        out_scale,
        check.LSE_SCALES[outputs.lse_base],
        extras,
    )
    return ((out, lse) if outputs.return_lse else out), arguments
