"""The one way from arguments to a launch, for every public function:

check   arguments -> Request             _check: options, lengths, scales, outputs; masks here
plan    Request -> ExecutionPlan         here, by a backend of _device.backends; values of options
                                         and lengths are checked in cpp/planner/validate.cpp
place   its work list gets memory        _core.ExecutionPlan.allocate_in(), from _core.Workspace
bind    shapes and strides -> launch     _core.ExecutionPlan asks _run.variant, _check.tensors
run     addresses -> result              _core.ExecutionPlan

A plan() that differs from the wrapper's last one in index arrays alone, as the steps of an engine
do, takes one call for all but the last two: _core.plan_again (cpp/bindings/repeated_plan.h). If
anything else differs or an array is wrong, plan_again returns False and changes nothing; the call
then takes the steps above, which raise the error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch

from .. import _core
from .._check.request import Request
from .._device import backends
from .._device.backends import Backend
from .._device.stream import DeviceStream
from .._run.variant import new_workspace
from . import prepass

# A buffer, the int32 array that goes into its beginning, and the most elements that do.
ArrayCopy = tuple[torch.Tensor, torch.Tensor, int]


def refuse_capture(device_stream: DeviceStream) -> None:
    """Raises RuntimeError under a CUDA-graph capture, for calls that plan by themselves."""
    if device_stream.is_capturing():
        raise RuntimeError(
            "this call needs a plan, which cannot be made while its stream is being captured into "
            "a CUDA graph: call it once before, with the same shapes and options on the stream "
            "of the capture (torch.cuda.graph(graph, stream=...))"
        )


def plan(
    workspace: _core.Workspace, backend: str | Backend, *requests: Request
) -> _core.ExecutionPlan:
    """Chooses a kernel and plans one batch, or two in one launch, for the workspace, to which
    nothing is written yet."""
    first = requests[0]
    if isinstance(backend, str):
        options = (request.options for request in requests)
        backend = backends.choose(backend, first.device, *options)
    counted, room = backend.plan(workspace.float_bytes, *requests), workspace.int_room
    if room is not None and counted.int_bytes > room:
        if len(requests) == 1 and not first.options.fixed_split_size:
            # Without a split the work list is shorter.
            unsplit = first._replace(options=first.options.replace(one_pass=True))
            counted = backend.plan(workspace.float_bytes, unsplit)
        if counted.int_bytes > room:
            raise ValueError(
                f"int_workspace_buffer has {room} bytes; this plan needs {counted.int_bytes} "
                "(workspace_size tells the sizes beforehand)"
            )
    return _core.ExecutionPlan(backend, counted, requests)


def workspace_size(backend: str, request: Request) -> tuple[int, int]:
    """(float_bytes, int_bytes) that plan() takes of workspaces as large as it likes."""
    room = new_workspace(request.device)
    room.float_bytes = 1 << 40
    if request.graph_rows and request.options.fixed_split_size:
        # Sizes for these arguments alone; more workspace would serve longer keys of later
        # plans.
        alone = _with_and_without_prepass(room, backend, request._replace(graph_rows=0))
        room.float_bytes = max(one.float_bytes for one in alone)
    counted = _with_and_without_prepass(room, backend, request)
    return max(one.float_bytes for one in counted), max(one.int_bytes for one in counted)


def _with_and_without_prepass(
    room: _core.Workspace, backend: str, request: Request
) -> list[_core.Plan]:
    """The plan and, if it has a pre-pass, the plan without it: for a smaller float workspace, some
    CUDA graphs, and runs with factors of heads."""
    counted = plan(room, backend, request).plan
    if counted.has_prepass:
        direct = request._replace(options=prepass.without(request.options))
        with contextlib.suppress(NotImplementedError):  # no kernel fits this device without them
            return [counted, plan(room, backend, direct).plan]
    return [counted]


def made(
    workspace: _core.Workspace, backend: str | Backend, *requests: Request
) -> _core.ExecutionPlan:
    """Plans, places and uploads."""
    variant = plan(workspace, backend, *requests)
    variant.allocate_in(workspace)
    upload(workspace, (variant,))
    return variant


def upload(
    workspace: _core.Workspace,
    variants: Sequence[_core.ExecutionPlan],
    *,
    then: Callable[[], None] | None = None,
    copies: Sequence[ArrayCopy] = (),
) -> None:
    """Starts the copies of work lists to the device, of plans of one batch that have their places.
    Nobody waits for them: the staging memory is the uploader's own, and a run on another stream is
    ordered behind it.

    then: called right after the last copy has started, before a signal handler can raise. So an
    interrupted plan() leaves the old state with its work list or the new state with its own. NOTE:
    it must run no bytecode, because handlers run between bytecodes; a partial of setattr() runs
    none. copies: of the plan's arrays, which go the same way.
    """
    _core.upload(variants, workspace.device_stream.stream(), copies, then)
