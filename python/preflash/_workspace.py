"""The workspaces of a wrapper, and how a plan gets into them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from . import _backends, _core, _tensors
from . import _validate as check
from ._buffers import Buffer
from ._device_stream import DeviceStream
from ._options import Options
from ._planned import Memory, PlannedVariant


def check_buffer(name: str, value: Any, device: torch.device | None = None) -> torch.Tensor:
    """A workspace: contiguous, 16-byte aligned, of any dtype."""
    buffer = check.tensor(name, value)
    if device is not None:
        check.on_device(name, buffer, device)
    if not buffer.is_contiguous():
        raise ValueError(f"{name} has strides {tuple(buffer.stride())}; must be contiguous")
    if buffer.data_ptr() % check.ALIGNMENT != 0:
        raise ValueError(
            f"{name} starts {buffer.data_ptr() % check.ALIGNMENT} bytes past a multiple of "
            f"{check.ALIGNMENT}; pass a buffer that was not sliced"
        )
    return buffer


_SMALLEST_INT_BUFFER = 64 * 1024


class Workspace:
    """Where plans of one wrapper go.

    A work list never overwrites the one before it, which stays whole until the new plan has
    succeeded, and as long as anything runs it: two buffers take turns. Unless the caller brought an
    int buffer, which is used in place.
    """

    def __init__(
        self,
        device: torch.device,
        float_buffer: torch.Tensor | None,
        int_buffer: torch.Tensor | None = None,
        float_bytes: int | None = None,
    ) -> None:
        self.device_stream = DeviceStream(device)
        self.float_buffer = None if float_buffer is None else Buffer(float_buffer)
        # Given apart from a buffer where the buffer is allocated after planning, or not at all.
        if float_bytes is None:
            float_bytes = 0 if self.float_buffer is None else self.float_buffer.num_bytes
        self.float_bytes = float_bytes
        self._given = None if int_buffer is None else Buffer(int_buffer)
        self._spare: Buffer | None = None
        self._uploader: _core.Uploader | None = None

    @property
    def int_room(self) -> int | None:
        """The bytes of the caller's int buffer, which cannot grow; None without one."""
        return None if self._given is None else self._given.num_bytes

    def beside(self) -> Workspace:
        """For other variants of a plan: the float buffer, but no int buffer of the caller's."""
        if self._given is None:
            return self
        other = Workspace(self.device_stream.device, None, float_bytes=self.float_bytes)
        other.float_buffer = self.float_buffer
        other._uploader = self.uploader()
        return other

    def int_buffer(self, num_bytes: int) -> Buffer:
        """Memory for a work list that nothing else uses."""
        if self._given is not None:
            return self._given
        spare, self._spare = self._spare, None
        if (
            spare is not None
            and spare.num_bytes >= num_bytes
            and spare.is_free_on(self.device_stream.stream())
        ):
            return spare
        return Buffer.allocate(
            max(num_bytes + num_bytes // 4, _SMALLEST_INT_BUFFER), self.device_stream
        )

    def give_back(self, variant: PlannedVariant) -> None:
        """Takes back the work list of a variant that will not be run again."""
        if self._given is None and not variant.shared:
            self._spare = variant.int_buffer

    def uploader(self) -> _core.Uploader:
        if self._uploader is None:
            self._uploader = _core.Uploader(self.device_stream.ordinal)
        return self._uploader


def draft(
    workspace: Workspace, backend_name: str, batch: _core.Batch, options: Options
) -> tuple[_backends.Backend, _core.Plan]:
    """A plan that fits the workspace, not uploaded. Raises everything that plan() raises."""
    device = workspace.device_stream.device
    backend = _backends.choose(backend_name, device, options)
    plan = backend.plan(device, options, batch, workspace.float_bytes)
    room = workspace.int_room
    if room is None or plan.int_bytes <= room:
        return backend, plan
    needed = plan.int_bytes
    if not options.fixed_split_size:
        # Without a split the work list is shorter.
        unsplit = options._replace(disable_split_kv=True)
        plan = backend.plan(device, unsplit, batch, workspace.float_bytes)
        if plan.int_bytes <= room:
            return backend, plan
        needed = plan.int_bytes
    raise ValueError(
        f"int_workspace_buffer has {room} bytes; this plan needs {needed} (workspace_size "
        "tells the sizes beforehand)"
    )


class Upload(NamedTuple):
    """What a plan's launches use beside the work list, and whether plan() waits for the copy."""

    expected: _tensors.Expected
    page_indices: torch.Tensor | None = None  # on the device
    mask: torch.Tensor | None = None  # owned and packed
    blocking: bool = False


def upload(
    workspace: Workspace,
    drafted: tuple[_backends.Backend, _core.Plan],
    what: Upload,
    commit: Callable[[PlannedVariant], tuple[object, object]] | None = None,
) -> PlannedVariant:
    """Copies a drafted plan to the device.

    commit: an object and its next `_state`, which is set in the same breath as the copy is
    started, before any signal handler can raise: what an interrupted plan() leaves is either the
    old state with its work list or the new one with its own.
    """
    backend, plan = drafted
    device_stream = workspace.device_stream
    int_buffer = workspace.int_buffer(plan.int_bytes)
    kept = [int_buffer]
    if workspace.float_buffer is not None:
        kept.append(workspace.float_buffer)
    if what.page_indices is not None:
        kept.append(Buffer(what.page_indices))
    if what.mask is not None:
        kept.append(Buffer(what.mask))
    for buffer in kept:
        buffer.used_on_current_stream(device_stream)
    partials = workspace.float_buffer if plan.float_bytes > 0 else None
    memory = None
    if partials is not None or what.mask is not None:
        memory = Memory(None if partials is None else partials.tensor, what.mask)
    place = _core.DevicePlan(
        workspace.uploader(), int_buffer.tensor.data_ptr(), int_buffer.num_bytes
    )
    variant = PlannedVariant(plan, place, backend, what.expected, device_stream, kept, memory)
    owner, state = (None, None) if commit is None else commit(variant)
    place.write(
        plan,
        0 if what.page_indices is None else what.page_indices.data_ptr(),
        device_stream.stream(),
        what.blocking,
        owner,
        state,
    )
    return variant
