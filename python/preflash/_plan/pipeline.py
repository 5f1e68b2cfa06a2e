"""The one way from arguments to a launch, for every public function:

check   arguments -> Request             _check: options, lengths, scales, outputs; masks here
plan    Request -> Draft                 here, by a backend of _run.kernels
place   Draft -> Run                     the same backend, with _device.workspace
bind    shapes and strides -> launch     _core.bound_run asks _run.variant, with _check.tensors
run     addresses -> result              _core.bound_run
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from .. import _core
from .._check.lengths import Lengths
from .._check.request import Request
from .._device import backends
from .._device.stream import DeviceStream
from .._device.workspace import Workspace
from .._run.kernels import CpuBackend, CudaBackend, KernelBackend
from .._run.variant import PlannedVariant
from . import prepass

# new_tuple(Request, (...)) takes half the time of Request(...): for what every plan() makes.
new_tuple = tuple.__new__

for _family in _core.families():
    _kind = CpuBackend if _core.traits_of(_family).on_cpu else CudaBackend
    backends.register(_kind(_family))


def make_request(
    options: _core.AttentionOptions,
    device: torch.device,
    lengths: Lengths,
    kv_layout: str,
    masked: bool,
    graph_rows: int = 0,
    graph_mask_bytes: int = 0,
    q_given: torch.dtype | None = None,
    kv_lens: torch.Tensor | None = None,
) -> Request:
    """masked: whether the options' mask is a custom one. The others are fields of Request."""
    if masked:
        lengths.batch.use_mask()
    options = prepass.applied_to(options)
    return new_tuple(
        Request,
        (options, device, lengths, kv_layout, None, graph_rows, graph_mask_bytes, q_given, kv_lens),
    )


def refuse_capture(device_stream: DeviceStream) -> None:
    """Raises RuntimeError under a CUDA-graph capture, for calls that plan by themselves."""
    if device_stream.is_capturing():
        raise RuntimeError(
            "this call needs a plan, which cannot be made while its stream is being captured into "
            "a CUDA graph: call it once before, with the same shapes and options on the stream "
            "of the capture (torch.cuda.graph(graph, stream=...))"
        )


class HostCopy(NamedTuple):
    """A contiguous array on the CPU, and the memory of the device whose beginning gets it."""

    to: torch.Tensor
    values: torch.Tensor


# A backend, and a plan of it that fits its workspace but has no place there yet.
Draft = tuple[KernelBackend, _core.Plan]


def plan(workspace: Workspace, backend_name: str, request: Request) -> Draft:
    """Raises everything that a public plan() raises once its arguments are checked."""
    device, options = workspace.device_stream.device, request.options
    batch, room = request.lengths.batch, workspace.int_room
    backend = backends.choose(backend_name, device, options)
    float_bytes, rows, mask_bytes = (
        workspace.float_bytes, request.graph_rows, request.graph_mask_bytes
    )  # fmt: skip
    counted = backend.plan(device, options, batch, float_bytes, rows, mask_bytes)
    if room is not None and counted.int_bytes > room:
        if not options.fixed_split_size:
            # Without a split the work list is shorter.
            unsplit = options.replace(disable_split=True)
            counted = backend.plan(device, unsplit, batch, float_bytes, rows, mask_bytes)
        _check_room(workspace, counted)
    return backend, counted


def _check_room(workspace: Workspace, plan: _core.Plan) -> None:
    room = workspace.int_room
    if room is not None and plan.int_bytes > room:
        raise ValueError(
            f"int_workspace_buffer has {room} bytes; this plan needs {plan.int_bytes} "
            "(workspace_size tells the sizes beforehand)"
        )


def workspace_size(device: torch.device, backend_name: str, request: Request) -> tuple[int, int]:
    """(float_bytes, int_bytes) that plan() takes of workspaces as large as it likes."""
    room = Workspace(device, None, float_bytes=1 << 40)
    if request.graph_rows and request.options.fixed_split_size:
        # Sizes for these arguments alone; more workspace would serve longer keys of later
        # plans.
        alone = _with_and_without_prepass(room, backend_name, request._replace(graph_rows=0))
        room.float_bytes = max(one.float_bytes for one in alone)
    counted = _with_and_without_prepass(room, backend_name, request)
    return max(one.float_bytes for one in counted), max(one.int_bytes for one in counted)


def _with_and_without_prepass(
    room: Workspace, backend_name: str, request: Request
) -> list[_core.Plan]:
    """The plan and, if it has a pre-pass, the plan without it: for a smaller float workspace, some
    CUDA graphs, and runs with factors of heads."""
    _, counted = plan(room, backend_name, request)
    if counted.has_prepass:
        direct = request._replace(options=prepass.without(request.options))
        with contextlib.suppress(NotImplementedError):  # no kernel fits this device without them
            return [counted, plan(room, backend_name, direct)[1]]
    return [counted]


def made(workspace: Workspace, backend_name: str, request: Request) -> PlannedVariant:
    """Planned, placed and uploaded."""
    backend, counted = plan(workspace, backend_name, request)
    run = backend.place(workspace, counted, request)
    upload(workspace, (run,))
    return run


def upload(
    workspace: Workspace,
    runs: Iterable[PlannedVariant],
    *,
    then: Callable[[], None] | None = None,
    copies: Sequence[HostCopy] = (),
) -> None:
    """Starts the copies of work lists to the device, of plans of one batch that have their places.
    Nobody waits for them: the staging memory is the uploader's own, and a run on another stream is
    ordered behind it.

    then: called right after the last copy has started, before a signal handler can raise. So an
    interrupted plan() leaves the old state with its work list or the new state with its own. NOTE:
    it must run no bytecode, because handlers run between bytecodes; a partial of setattr() runs
    none. copies: of the plan's arrays, which go the same way.
    """
    placements, host_copies, page_indices, mask_bits = [], [], [0], 0
    for run in runs:
        placements.append((run.place, run.plan))
        page_indices, mask_bits = run.page_indices, run.mask_bits
    for to, values in copies:
        host_copies.append((to.data_ptr(), values.data_ptr(), values.nbytes))
    stream = workspace.device_stream.stream()
    _core.write_plans(placements, page_indices, mask_bits, stream, then, host_copies)


# Two batches in one launch, each a segment.


def draft_segments(
    workspace: Workspace, backend: str | KernelBackend, requests: Sequence[Request]
) -> Draft:
    """Raises everything that a public plan() raises once its arguments are checked."""
    device = workspace.device_stream.device
    if isinstance(backend, str):
        backend = backends.choose(backend, device, *(request.options for request in requests))
    segments = [(one.options, one.lengths.batch, one.graph_rows) for one in requests]
    counted = backend.plan_segments(device, segments, workspace.float_bytes)
    _check_room(workspace, counted)
    return backend, counted


def plan_segments(
    workspace: Workspace,
    draft: Draft,
    requests: Sequence[Request],
    names: Sequence[str],
    where: _core.Place | None = None,
) -> PlannedVariant:
    """Places and uploads. names: of the segments, in messages. where: the place of an earlier plan,
    which a CUDA graph runs."""
    backend, counted = draft
    variant = PlannedVariant(counted, where, backend, requests, workspace, names)
    upload(workspace, (variant,))
    return variant
