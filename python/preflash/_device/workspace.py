"""The memory that the plans of a wrapper go into."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .. import _core
from .._check import values as check
from .._check.tensors import reaches_into
from .buffers import Buffer
from .stream import DeviceStream

if TYPE_CHECKING:
    from .._check.request import Request
    from .backends import Backend


def check_buffer(name: str, value: Any, device: torch.device | None = None) -> torch.Tensor:
    """A workspace: contiguous, 16-byte aligned, of any dtype."""
    buffer = check.tensor(name, value)
    if device is not None:
        check.on_device(name, buffer, device)
    check.contiguous(name, buffer)
    if buffer.data_ptr() % check.ALIGNMENT != 0:
        raise ValueError(
            f"{name} must be {check.ALIGNMENT}-byte aligned; it starts "
            f"{buffer.data_ptr() % check.ALIGNMENT} bytes past a multiple of {check.ALIGNMENT}: "
            "pass a buffer that was not sliced"
        )
    return buffer


def check_apart(**buffers: torch.Tensor) -> None:
    """Raises ValueError if buffers that are in use at once share memory, or are one tensor; their
    names are those of the arguments."""
    for (name, value), (other_name, other) in itertools.combinations(buffers.items(), 2):
        if reaches_into(value, other):
            raise ValueError(
                f"{other_name} shares memory with {name}, which is in use with it; must be apart"
            )


def check_levels_apart(name: str, buffers: Sequence[torch.Tensor]) -> None:
    """check_apart() for one argument's buffers, one for each level of a cascade."""
    check_apart(**{f"{name}[{i}]": buffer for i, buffer in enumerate(buffers)})


_SMALLEST_INT_BUFFER = 64 * 1024
_BUFFERS_KEPT = 8


class Workspace:
    """Memory for the plans of one wrapper.

    A work list stays whole until the next plan has succeeded, and as long as anything runs it. So
    two buffers alternate, and a plan that is made while the plan before last still runs, in another
    thread or around a signal handler, gets a third buffer. A caller's int buffer is used in place.
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
        # Set without a buffer where the buffer is allocated after planning, or not at all.
        self._float_bytes = float_bytes
        self._given = None if int_buffer is None else Buffer(int_buffer)
        # Memory of a replaced plan, and a weak reference to the variant that may still run it.
        self._spare: deque[tuple[Buffer, Callable[[], object | None]]] = deque(maxlen=1)
        self._lent: dict[tuple[int, int], Buffer] = {}
        # None before the first plan: there may be no kernel library.
        self.known_uploader: _core.Uploader | None = None
        self._settings: tuple[Any, _core.RunSettings | None] = (None, None)

    def run_settings(
        self, backend: Backend, requests: Sequence[Request], functions: _core.RunFunctions
    ) -> _core.RunSettings:
        """Settings of the plan's runs: those of the last plan, with the tensors that have passed
        the checks, if the two plans differ in lengths alone."""
        alike = [backend]
        for request in requests:
            alike += (request.options, request.kv_layout, request.batch.page_size, request.q_given)
        before, settings = self._settings
        if before != alike:
            float_workspace = self.float_buffer and self.float_buffer.tensor
            settings = _core.RunSettings(
                functions, float_workspace, backend.num_threads, backend.launched_by
            )
            self._settings = (alike, settings)
        return settings

    def buffer_of(self, tensor: torch.Tensor) -> Buffer:
        """Returns the buffer of a tensor that successive plans use: the same for all of them, so
        that it knows the streams of all their runs."""
        key = (id(tensor), tensor.data_ptr())
        found = self._lent.get(key)
        if found is None:
            if len(self._lent) >= _BUFFERS_KEPT:
                self._lent.clear()
            found = self._lent[key] = Buffer(tensor)
        return found

    @property
    def float_bytes(self) -> int:
        """Float bytes that plans may use. NOTE: a caller may have given his buffer other memory."""
        if self._float_bytes is not None or self.float_buffer is None:
            return self._float_bytes or 0
        return _core.bytes_of(check.TORCH, "float_workspace_buffer", self.float_buffer.tensor)

    @float_bytes.setter
    def float_bytes(self, value: int) -> None:
        self._float_bytes = value

    @property
    def int_room(self) -> int | None:
        """The bytes of the caller's int buffer, which cannot grow; None without one."""
        if self._given is None:
            return None
        return _core.bytes_of(check.TORCH, "int_workspace_buffer", self._given.tensor)

    def beside(self) -> Workspace:
        """Workspace for other variants of a plan: the same float buffer, without the caller's int
        buffer."""
        if self._given is None:
            return self
        other = Workspace(self.device_stream.device, None, float_bytes=self._float_bytes)
        other.float_buffer = self.float_buffer
        other.known_uploader = self.uploader()
        return other

    def int_buffer(self, num_bytes: int) -> Buffer:
        """Memory for a work list that nothing else uses."""
        if self._given is not None:
            return self._given
        try:
            spare, find_user = self._spare.pop()
        except IndexError:  # none, or another thread was faster
            pass
        else:
            free = find_user() is None and spare.is_free_on(self.device_stream.stream())
            if free and spare.num_bytes >= num_bytes:
                return spare
        room = max(num_bytes + num_bytes // 4, _SMALLEST_INT_BUFFER)
        return Buffer.allocate(room, self.device_stream)

    def give_back(self, int_buffer: Buffer, variant: object) -> None:
        """Takes back the memory of a planned variant that no later run uses. NOTE: a run may be
        under way, for which the memory is kept."""
        if self._given is None:
            self._spare.append((int_buffer, weakref.ref(variant)))

    def uploader(self) -> _core.Uploader:
        if self.known_uploader is None:
            self.known_uploader = _core.Uploader(self.device_stream.ordinal)
        return self.known_uploader
