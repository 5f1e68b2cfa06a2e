"""The one way from arguments to a launch, for every public function:

check   arguments -> Request             _check: options, lengths, scales, outputs; masks here
plan    Request -> Draft                 here, with _device.backends
place   Draft -> PlannedVariant          here, with _device.workspace and _run.place
bind    shapes and strides -> Launch     _run.variant, with _check.tensors
run     addresses -> result              _run.variant
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import NamedTuple

import torch

from .. import _core
from .._check.lengths import Lengths
from .._check.request import Request, expected_of
from .._cudnn import planned
from .._cudnn.planned import CudnnBackend, CudnnPlan, CudnnVariant
from .._device import backends
from .._device.buffers import Buffer
from .._device.workspace import Workspace
from .._run.place import Memory, Place
from .._run.variant import PlannedVariant
from . import staging


def make_request(
    options: _core.AttentionOptions,
    lengths: Lengths,
    kv_layout: str,
    *,
    masked: bool,
    graph_rows: int = 0,
    graph_mask_bytes: int = 0,
) -> Request:
    """masked: whether the options' mask is a custom one."""
    if masked:
        lengths.batch.use_mask()
    options = staging.applied_to(options)
    return Request(options, lengths, kv_layout, None, graph_rows, graph_mask_bytes)


class Draft(NamedTuple):
    """A plan that is counted and fits its workspace, where it has no place yet."""

    backend: backends.Backend | CudnnBackend
    plan: _core.Plan | CudnnPlan


def plan(workspace: Workspace, backend_name: str, request: Request) -> Draft:
    """Raises everything that a public plan() raises once its arguments are checked."""
    device, options = workspace.device_stream.device, request.options
    batch, room = request.lengths.batch, workspace.int_room
    if backend_name == backends.CUDNN:
        return Draft(CudnnBackend(), planned.plan(device, options, batch))
    backend = backends.choose(backend_name, device, options)
    limits = backends.PlanRoom(workspace.float_bytes, request.graph_rows, request.graph_mask_bytes)
    counted = backend.plan(device, options, batch, limits)
    if room is None or counted.int_bytes <= room:
        return Draft(backend, counted)
    if not options.fixed_split_size:
        # Without a split the work list is shorter.
        unsplit = options.replace(disable_split=True)
        counted = backend.plan(device, unsplit, batch, limits)
        if counted.int_bytes <= room:
            return Draft(backend, counted)
    raise ValueError(
        f"int_workspace_buffer has {room} bytes; this plan needs {counted.int_bytes} "
        "(workspace_size tells the sizes beforehand)"
    )


def workspace_size(device: torch.device, backend_name: str, request: Request) -> tuple[int, int]:
    """(float_bytes, int_bytes) that plan() takes of workspaces as large as it likes."""
    if backend_name == backends.CUDNN:
        raise NotImplementedError(
            "workspace_size() with backend='cudnn': cuDNN tells its needs when it has seen the "
            "tensors of run(); 128 MB of float_workspace_buffer is plenty"
        )
    room = Workspace(device, None, float_bytes=1 << 40)
    if request.graph_rows and request.options.fixed_split_size:
        # All that there is would be for the longer keys of later plans: what these need.
        alone = plan(room, backend_name, request._replace(graph_rows=0)).plan
        room.float_bytes = alone.float_bytes
    counted = plan(room, backend_name, request).plan
    int_bytes = counted.int_bytes
    if counted.staged:
        # With less of a float workspace the plan makes no copies, if a kernel fits this device.
        direct = request._replace(options=staging.without(request.options))
        with contextlib.suppress(NotImplementedError):
            int_bytes = max(int_bytes, plan(room, backend_name, direct).plan.int_bytes)
    return counted.float_bytes, int_bytes


def place(
    workspace: Workspace, draft: Draft, request: Request, where: Place | None = None
) -> PlannedVariant | CudnnVariant:
    """Gives a plan its memory. Nothing is written there before upload().

    where: the place of an earlier plan, which a CUDA graph runs.
    """
    plan, device_stream = draft.plan, workspace.device_stream
    if isinstance(plan, CudnnPlan):
        expected = expected_of(request, device_stream.device)
        buffer = workspace.float_buffer.tensor
        return CudnnVariant(plan, expected, request.lengths, device_stream, buffer)
    if where is None:
        where = Place(workspace.int_buffer(plan.int_bytes), workspace.uploader())
    kept = [where.buffer]
    if workspace.float_buffer is not None:
        kept.append(workspace.float_buffer)
    if request.page_indices is not None:
        kept.append(Buffer(request.page_indices))
    if request.mask is not None:
        kept.append(Buffer(request.mask))
    for buffer in kept:
        buffer.used_on_current_stream(device_stream)
    partials = workspace.float_buffer
    memory = None
    if partials is not None or request.mask is not None:
        memory = Memory(None if partials is None else partials.tensor, request.mask)
    expected = expected_of(request, device_stream.device)
    return PlannedVariant(
        plan, where, draft.backend, request, expected, device_stream, kept, memory
    )


def upload(
    workspace: Workspace,
    variants: Iterable[PlannedVariant | CudnnVariant],
    request: Request,
    owner: object = None,
    state: object = None,
) -> None:
    """Starts the copies of placed plans' work lists to the device. Nobody waits for them: the
    staging memory is the uploader's own, and a run on another stream is ordered behind it.

    owner, state: an object and its next `_state`, which is set in the same breath as a copy is
    started, before any signal handler can raise: what an interrupted plan() leaves is either the
    old state with its work list or the new one with its own.
    """
    page_indices = request.page_indices
    _core.write_plans(
        [(variant.device_plan, variant.plan) for variant in variants if variant.device_plan],
        0 if page_indices is None else page_indices.data_ptr(),
        request.mask_bits,
        workspace.device_stream.stream(),
        owner,
        state,
    )
