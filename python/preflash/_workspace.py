"""The workspaces of a wrapper, and how a plan gets into them."""

from __future__ import annotations

from typing import Any

import torch

from . import _backends, _core, _tensors
from . import _validate as check
from ._launch_site import LaunchSite
from ._options import Options
from ._planned import PlannedVariant

_SMALLEST_INT_BUFFER = 64 * 1024


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


def size_in_bytes(buffer: torch.Tensor | None) -> int:
    return 0 if buffer is None else buffer.numel() * buffer.element_size()


class Workspace:
    """The caller's float buffer for split-KV partials, and int buffers for the work lists.

    Int buffer 0 is the plan's; others belong to variants that run() or forward() asked for later.
    They are ours and grow, except that the caller may bring the first one.
    """

    def __init__(
        self,
        device: torch.device,
        float_buffer: torch.Tensor | None,
        int_buffer: torch.Tensor | None = None,
        float_bytes: int | None = None,
    ) -> None:
        self.site = LaunchSite(device)
        self.float_buffer = float_buffer
        # Given apart from a buffer where the buffer is allocated after planning, or not at all.
        self.float_bytes = size_in_bytes(float_buffer) if float_bytes is None else float_bytes
        self._given = int_buffer
        self._buffers: list[torch.Tensor] = [] if int_buffer is None else [int_buffer]
        self._uploader: _core.Uploader | None = None

    def with_int_buffer(self, buffer: torch.Tensor) -> Workspace:
        """The same float bytes and pinned memory, and `buffer` for the work list."""
        other = Workspace(self.site.device, self.float_buffer, buffer, self.float_bytes)
        other._uploader = self.uploader()
        return other

    def room(self, slot: int) -> int | None:
        """The bytes of a buffer that cannot grow; None for one that can."""
        return size_in_bytes(self._given) if slot == 0 and self._given is not None else None

    def int_buffer(self, slot: int, num_bytes: int) -> torch.Tensor:
        """The buffer of one variant, grown to at least num_bytes where it is ours."""
        if slot < len(self._buffers) and size_in_bytes(self._buffers[slot]) >= num_bytes:
            return self._buffers[slot]
        grown = torch.empty(
            max(num_bytes + num_bytes // 4, _SMALLEST_INT_BUFFER),
            dtype=torch.uint8,
            device=self.site.device,
        )
        self._buffers[slot : slot + 1] = [grown]
        return grown

    def uploader(self) -> _core.Uploader:
        if self._uploader is None:
            self._uploader = _core.Uploader(self.site.ordinal)
        return self._uploader


def draft(
    workspace: Workspace, slot: int, backend_name: str, batch: _core.Batch, options: Options
) -> tuple[_backends.Backend, _core.Plan]:
    """A plan that fits the workspace, not uploaded. Raises everything that plan() raises."""
    device = workspace.site.device
    backend = _backends.choose(backend_name, device, options)
    plan = backend.plan(device, options, batch, workspace.float_bytes)
    room = workspace.room(slot)
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


def upload(
    workspace: Workspace,
    slot: int,
    drafted: tuple[_backends.Backend, _core.Plan],
    want: _tensors.Expected,
    page_indices: torch.Tensor | None,
    *,
    blocking: bool,
) -> tuple[PlannedVariant, torch.Tensor]:
    """Copies a drafted plan to the device; returns it with the int buffer that holds it."""
    backend, plan = drafted
    buffer = workspace.int_buffer(slot, plan.int_bytes)
    plan.upload(
        workspace.uploader(),
        buffer.data_ptr(),
        size_in_bytes(buffer),
        0 if page_indices is None else page_indices.data_ptr(),
        workspace.site.stream(),
        blocking,
    )
    return PlannedVariant(plan, backend, want), buffer
