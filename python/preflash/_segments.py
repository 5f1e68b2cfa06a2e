"""Two batches in one launch, each a segment with its own tensors, page table, mask and options.

The way is that of _pipeline, for a list of requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from . import _backends, _core, _tensors
from . import _validate as check
from ._arguments import KvCache, PerHead, Result
from ._buffers import Buffer
from ._device_stream import DeviceStream
from ._outputs import DEFAULT_OUTPUTS, Outputs
from ._pipeline import Request, expected_of
from ._planned import Memory
from ._scales import Scales
from ._workspace import Workspace


class SegmentRun(NamedTuple):
    """What one run brings for a segment."""

    q: torch.Tensor
    kv: KvCache  # (k, v), or one paged cache that holds both
    scales: Scales
    outputs: Outputs = DEFAULT_OUTPUTS
    per_head: PerHead = PerHead()


class _Filled(NamedTuple):
    """A segment's results, and what _core takes for it."""

    result: Result
    strides: tuple[tuple[int, ...], ...]
    arguments: tuple


class PlannedSegments:
    """Placed and uploaded; run any number of times, for any layer."""

    def __init__(
        self,
        plan: _core.Plan,
        device_plan: _core.DevicePlan,
        requests: Sequence[Request],
        device_stream: DeviceStream,
        kept: list[Buffer],
        partials: torch.Tensor | None,
    ) -> None:
        """kept: the work list and all else that launches use."""
        self.plan = plan
        self._device_plan = device_plan
        self._masks = [request.mask for request in requests]
        self._expected = [expected_of(request, device_stream.device) for request in requests]
        self._device_stream = device_stream
        self._kept = kept
        self._partials = partials
        self._stream = device_stream.stream()

    @check.eager
    def attend_to(self, runs: Sequence[SegmentRun]) -> tuple[Result, ...]:
        """One result for each segment, in the order of the plan."""
        if len(runs) != len(self._expected):
            raise ValueError(
                f"the plan has {len(self._expected)} segments; got tensors for {len(runs)}"
            )
        filled = [
            _fill(run, expected, mask)
            for run, expected, mask in zip(runs, self._expected, self._masks, strict=True)
        ]
        launch = _core.Launch.of_segments(self._device_plan, [one.strides for one in filled])
        stream = self._device_stream.stream()
        if stream != self._stream:
            self._device_plan.arrive_before(stream)
            for buffer in self._kept:
                buffer.used_on_current_stream(self._device_stream)
            self._stream = stream
        launch.run_segments(
            [one.arguments for one in filled],
            0 if self._partials is None else self._partials.data_ptr(),
            stream,
            self._device_stream.num_threads(),
        )
        return tuple(one.result for one in filled)


def plan_segments(
    workspace: Workspace, backend_name: str, requests: Sequence[Request]
) -> PlannedSegments:
    """Plans, places and uploads. Raises everything that a public plan() raises once its arguments
    are checked."""
    device_stream = workspace.device_stream
    device = device_stream.device
    backend = _backends.choose(backend_name, device, *(request.options for request in requests))
    segments = [(request.options, request.lengths.batch) for request in requests]
    plan = backend.plan_segments(device, segments, workspace.float_bytes)
    room = workspace.int_room
    if room is not None and plan.int_bytes > room:
        raise ValueError(
            f"int_workspace_buffer has {room} bytes; this plan needs {plan.int_bytes} "
            "(workspace_size tells the sizes beforehand)"
        )
    work_list = workspace.int_buffer(plan.int_bytes)
    kept = [work_list]
    if workspace.float_buffer is not None:
        kept.append(workspace.float_buffer)
    for request in requests:
        kept += [Buffer(t) for t in (request.page_indices, request.mask) if t is not None]
    for buffer in kept:
        buffer.used_on_current_stream(device_stream)
    device_plan = _core.DevicePlan(
        workspace.uploader(), work_list.tensor.data_ptr(), work_list.num_bytes
    )
    pages = [request.page_indices for request in requests]
    addresses = [0 if indices is None else indices.data_ptr() for indices in pages]
    _core.write_plans([(device_plan, plan)], addresses, device_stream.stream(), None, None)
    partials = None
    if plan.float_bytes > 0 and workspace.float_buffer is not None:
        partials = workspace.float_buffer.tensor
    return PlannedSegments(plan, device_plan, requests, device_stream, kept, partials)


def _fill(run: SegmentRun, expected: _tensors.Expected, mask: torch.Tensor | None) -> _Filled:
    """Checks a segment's tensors, and allocates what it returns."""
    q, kv, outputs = run.q, run.kv, run.outputs
    k, v = kv if isinstance(kv, (tuple, list)) else (kv, kv)
    check.forward_only(q, k, v)
    bound = _tensors.bind(q, kv, outputs, expected)
    _tensors.check_per_head(run.per_head, expected)
    options, tokens = expected.options, q.shape[0]
    out, lse = outputs.out, outputs.lse
    if out is None:
        shape = (tokens, options.num_qo_heads, options.head_dim_vo)
        out = q.new_empty(shape, dtype=check.TORCH_DTYPES[options.o_dtype])
    if lse is None and outputs.return_lse:
        shape = _tensors.lse_shape(outputs.lse_layout, tokens, expected)
        lse = q.new_empty(shape, dtype=torch.float32)
    sm_scale, out_scale = run.scales
    arguments = (
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr() + bound.v_offset,
        out.data_ptr(),
        0 if lse is None else lse.data_ptr(),
        sm_scale,
        out_scale,
        check.LSE_SCALES[outputs.lse_base],
        Memory(mask=mask, per_head=run.per_head).extras(),
    )
    return _Filled((out, lse) if outputs.return_lse else out, bound.strides, arguments)
