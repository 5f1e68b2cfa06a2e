"""The one way from arguments to a launch, for every public function:

check   arguments -> Request             _check: options, lengths, scales, outputs; masks here
plan    Request -> Draft                 here, by a backend: _run.kernels or _cudnn.backend
place   Draft -> Run                     the same backend, with _device.workspace
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
from .._check.request import Request
from .._cudnn.backend import CudnnBackend
from .._device import backends
from .._device.workspace import Workspace
from .._run.kernels import backend_of
from .._run.place import Place
from . import staging

for _family in _core.families():
    backends.register(backend_of(_family), _family)
backends.register(CudnnBackend())


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

    backend: backends.Backend
    plan: backends.Plan


def plan(workspace: Workspace, backend_name: str, request: Request) -> Draft:
    """Raises everything that a public plan() raises once its arguments are checked."""
    device, options = workspace.device_stream.device, request.options
    batch, room = request.lengths.batch, workspace.int_room
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
) -> backends.Run:
    """Gives a plan its memory. Nothing is written there before upload().

    where: the place of an earlier plan, which a CUDA graph runs.
    """
    return draft.backend.place(workspace, draft.plan, request, where)


def upload(
    workspace: Workspace,
    runs: Iterable[backends.Run],
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
        [(run.device_plan, run.plan) for run in runs if run.device_plan],
        0 if page_indices is None else page_indices.data_ptr(),
        request.mask_bits,
        workspace.device_stream.stream(),
        owner,
        state,
    )
