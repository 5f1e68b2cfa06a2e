"""Bind and run: a planned variant is a kernel, its work list, and the launches bound to tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from .. import _core
from .._check import tensors as _tensors
from .._check import values as check
from .._check.arguments import KvCache, PerHead, Qkv, Result
from .._check.outputs import DEFAULT_OUTPUTS, Outputs
from .._check.request import Request
from .._check.scales import Scales
from .._device.backends import Backend
from .._device.buffers import Buffer
from .._device.stream import DeviceStream
from .place import Captured, Memory, Place, held_memory

_LAUNCHES_KEPT = 64
_LSE_SCALES = check.LSE_SCALES

# Names of their own for what every run() asks: looking them up would take a tenth of it.
_Tensor = torch.Tensor
_empty_like = torch.empty_like
_new_empty = torch.Tensor.new_empty
_jit_tracing = check.jit_is_tracing
_grad_enabled = check.is_grad_enabled
_forward_ad = check.forward_ad


class _Bound(NamedTuple):
    """What is known of a run() once its shapes, strides, dtypes and devices have been checked."""

    start: Callable[..., bool]
    v_offset: int  # bytes, where K and V are halves of one tensor
    make_out: Callable[[torch.Tensor], torch.Tensor]  # out of q
    lse_shape: tuple[int, int]
    again: Callable[..., torch.Tensor | None] | None


def refuse_gradients(
    q: torch.Tensor, kv: KvCache, out: torch.Tensor | None, lse: torch.Tensor | None
) -> None:
    """check.forward_only of what one run reads and writes, by name."""
    keys = {"paged_kv_cache": kv} if isinstance(kv, _Tensor) else {"k": kv[0], "v": kv[1]}
    check.forward_only(q=q, **keys, out=out, lse=lse)


def _require_grad(*outputs: torch.Tensor | None) -> bool:
    return any(value is not None and value.requires_grad for value in outputs)


class PlannedVariant:
    """Placed and uploaded by _plan.pipeline; run any number of times, for any layer."""

    def __init__(
        self,
        plan: _core.Plan,
        place: Place,
        backend: Backend,
        request: Request,
        expected: _tensors.Expected,
        device_stream: DeviceStream,
        kept: list[Buffer],
        memory: Memory | None = None,
    ) -> None:
        """kept: the work list and all else that launches use; the allocator knows that the current
        stream uses it."""
        self.plan = plan
        self.place = place
        self.device_plan = place.device_plan
        self.backend = backend
        self.expected = expected
        self._request = request
        self.device_stream = device_stream
        self._bound: dict[tuple, _Bound] = {}
        self._last: tuple[tuple | None, _Bound | None] = (None, None)
        # again(q, kv, out, scales, self) is a run like the last one, without lse and with this
        # plan's memory alone, in a tenth of the steps: out, or None where it is not like it.
        self.again: Callable[..., torch.Tensor | None] | None = None
        self._kept = kept
        self._memory = memory
        self._extras = None if memory is None else memory.extras()
        self._current_stream = device_stream.stream
        self._stream = device_stream.stream()

    @check.eager
    def attend_to(
        self,
        q: torch.Tensor,
        kv: KvCache,
        scales: Scales,
        outputs: Outputs = DEFAULT_OUTPUTS,
        memory: Memory | None = None,
    ) -> Result:
        """One run. kv is (k, v), or one paged cache that holds both. Nothing is checked twice.

        memory: of this call alone, instead of the plan's.
        """
        out, lse, return_lse, lse_base, lse_layout = outputs
        with_lse = return_lse or lse is not None
        try:
            if type(kv) is not tuple and isinstance(kv, _Tensor):
                k = v = kv
                key = (q.shape, q.stride(), q.dtype, q.device, q.is_neg(),
                       k.shape, k.stride(), k.dtype, k.device, k.is_neg())  # fmt: skip
            else:
                k, v = kv
                key = (q.shape, q.stride(), q.dtype, q.device, q.is_neg(),
                       k.shape, k.stride(), k.dtype, k.device, k.is_neg(),
                       v.shape, v.stride(), v.dtype, v.device, v.is_neg())  # fmt: skip
            if out is not None or with_lse:
                key = (key, _tensors.signature(out),
                       with_lse and (lse_layout, _tensors.signature(lse)))  # fmt: skip
            last_key, bound = self._last
            if key != last_key:  # comparing takes half of what hashing does
                bound = self._bound.get(key)
                if bound is not None:
                    self._last = (key, bound)
                    self.again = bound.again
        except (AttributeError, TypeError, ValueError, RuntimeError):
            bound, key = None, None  # no ordinary tensors: the checks say which argument it is
        if bound is None:
            bound = self._bind(key, q, kv, outputs)
        # check.forward_only, spelled out: half a microsecond of a call that takes a few. Calls that
        # are recorded do not come here.
        if (
            _jit_tracing()
            or (_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad))
            or (outputs is not DEFAULT_OUTPUTS and _require_grad(out, lse))
            or _forward_ad._current_level >= 0
        ):
            refuse_gradients(q, kv, out, lse)
        start, v_offset, make_out, lse_shape, _ = bound
        lse_address = 0
        try:
            if out is None:
                out = make_out(q)
            q_address, k_address, v_address = q.data_ptr(), k.data_ptr(), v.data_ptr() + v_offset
            out_address = out.data_ptr()
            if with_lse:
                if lse is None:
                    lse = q.new_empty(lse_shape, dtype=torch.float32)
                lse_address = lse.data_ptr()
                if lse_address == 0:
                    check.tensor("lse", lse)  # refuses all but an empty one
        except (RuntimeError, TypeError):  # what looks like the tensors before, as in torch.vmap
            self.check_run(q, kv, outputs)
            raise
        if memory is None:
            memory, extras = self._memory, self._extras
        else:
            extras = memory.extras()
        partials = None if memory is None else memory.partials
        stream = self._current_stream()
        if stream != self._stream:
            self._announce_stream(stream)
        captured = start(
            q_address, k_address, v_address, out_address, lse_address, partials, stream,
            scales[0], scales[1], _LSE_SCALES.get(lse_base) or lse_base, extras,
        )  # fmt: skip
        if captured:
            self._note_capture(q, k, v, partials)
        if outputs is not DEFAULT_OUTPUTS:
            check.written(outputs.out, outputs.lse)
        return (out, lse) if return_lse else out

    @property
    def int_buffer(self) -> Buffer:
        """Where the work list is."""
        return self.place.buffer

    @property
    def float_workspace(self) -> torch.Tensor | None:
        """The wrapper's; None where a run brings its own."""
        return None if self._memory is None else self._memory.partials

    @property
    def buffers(self) -> Sequence[Buffer]:
        """All memory of ours, or of the plan's arguments, that its runs read."""
        return self._kept

    @property
    def shared(self) -> bool:
        """Whether anybody else may still run it."""
        return self.place.shared

    @shared.setter
    def shared(self, value: bool) -> None:
        self.place.shared = value

    def _note_capture(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        partials: torch.Tensor | None,
    ) -> None:
        page_size = self.expected.page_size
        tokens = 0 if page_size > 0 or self.expected.kv_layout == "NHD" else 1
        now = Captured(q.shape[0], min(k.shape[tokens], v.shape[tokens]), page_size)
        before = self.place.captured
        self.place.captured = now if before is None else Captured(*map(max, before, now))
        self.place.hold(partials, self.plan.float_bytes)

    def memory_with(self, per_head: PerHead) -> Memory:
        """The plan's own, and what one run brings."""
        _tensors.check_per_head(per_head, self.expected.options, self.expected.device)
        own = Memory() if self._memory is None else self._memory
        return own._replace(per_head=per_head)

    def memory_with_mask(self, mask: torch.Tensor) -> Memory:
        """The plan's own, and the mask of one run."""
        own = Memory() if self._memory is None else self._memory
        return own._replace(mask=mask, mask_classes=self.mask_classes())

    def mask_classes(self) -> torch.Tensor | None:
        """Memory for the classes of the tiles of one run's mask, where the kernel goes by them."""
        words = self.plan.mask_class_words
        if words == 0:
            return None
        return torch.empty(words, dtype=torch.int32, device=self.expected.device)

    def check_tensors(self, tensors: Qkv, outputs: Outputs) -> None:
        """The checks of run() alone."""
        self.check_run(tensors.q, (tensors.k, tensors.v), outputs)

    def check_run(self, q: torch.Tensor, kv: KvCache, outputs: Outputs) -> None:
        """The same where K and V may be halves of one cache."""
        self._bind(None, q, kv, outputs)

    def _announce_stream(self, stream: int) -> None:
        """The first run on another stream than the last one's."""
        # Everything that plan() put on the device is complete when its upload is.
        self.device_plan.arrive_before(stream)
        for buffer in self._kept:
            buffer.used_on_current_stream(self.device_stream)
        self._stream = stream

    def _bind(self, key: tuple | None, q: torch.Tensor, kv: KvCache, outputs: Outputs) -> _Bound:
        check.forward_only(q=q)  # before anything is remembered of a traced tensor
        expected = self.expected
        numbers = _tensors.bind(q, kv, outputs, expected)
        tokens = q.shape[0]
        out_shape = (tokens, expected.options.num_qo_heads, expected.options.head_dim_vo)
        out_dtype = check.TORCH_DTYPES[expected.options.o_dtype]
        make_out = _empty_like
        if not (q.is_contiguous() and tuple(q.shape) == out_shape and q.dtype == out_dtype):
            make_out = functools.partial(_new_empty, size=out_shape, dtype=out_dtype)
        launch = _core.Launch(self.device_plan, *numbers.strides)
        held = held_memory(self.place, (self._request,), self._extras)
        bound = _Bound(
            start=self.backend.runner(launch, held),
            v_offset=numbers.v_offset,
            make_out=make_out,
            lse_shape=_tensors.lse_shape(outputs.lse_layout, tokens, expected),
            again=self._repeater(launch, held, numbers.v_offset, make_out, q, kv, outputs),
        )
        if key is not None:
            if len(self._bound) >= _LAUNCHES_KEPT:
                self._bound.clear()
            self._bound[key] = bound
            self._last = (key, bound)
            self.again = bound.again
        return bound

    def _repeater(
        self,
        launch: _core.Launch,
        held: _core.HeldMemory,
        v_offset: int,
        make_out: Callable[[torch.Tensor], torch.Tensor],
        q: torch.Tensor,
        kv: KvCache,
        outputs: Outputs,
    ) -> Callable[..., torch.Tensor | None] | None:
        if outputs.return_lse or outputs.lse is not None:
            return None
        return _core.repeater(
            launch=launch,
            memory=held,
            torch=check.TORCH,
            num_threads=self.backend.num_threads,
            q=q,
            kv=kv,
            out=outputs.out,
            v_offset=v_offset,
            make_out=make_out,
            partials=self.float_workspace,
            extras=self._extras,
        )
