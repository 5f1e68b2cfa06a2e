"""Attributes of wrappers that begin with an underscore and that serving engines read all the same.

They tell what is planned. What the kernels do not read back cannot be written: it raises.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from .. import _core
from .._check import values as check
from .plan_module import MODE_OF, PlanModule

_REPLAN = "call plan() with what should change, or construct another wrapper"


class told(property):  # noqa: N801, used like property
    """A property whose assignment says why there is none."""

    def __set__(self, instance: object, value: Any) -> NoReturn:
        raise AttributeError(
            f"{type(instance).__name__}.{self.fget.__name__} tells what is planned and cannot be "
            f"set: {_REPLAN}"
        )


class repeated(told):  # noqa: N801, used like property
    """A told property that engines set to what it is, or to None, when they plan between replays of
    a graph."""

    def __set__(self, instance: object, value: Any) -> None:
        if not instance.is_cuda_graph_enabled:
            super().__set__(instance, value)
        now = self.__get__(instance)
        if value is not None and value is not now and value != now:
            raise AttributeError(
                f"{type(instance).__name__}.{self.fget.__name__} is {now!r} and cannot become "
                f"{value!r}: {_REPLAN}"
            )


def only(neutral: Any, why: str) -> property:
    """An attribute that may be set to one value: engines do, whether or not they use it."""

    def refuse_others(instance: object, value: Any) -> None:
        if value is not neutral and value != neutral:
            raise NotImplementedError(f"{type(instance).__name__}: {why}")

    return property(lambda instance: neutral, refuse_others)


_ITEMS = "multi-item scoring is not served; leave _prefix_len_ptr and what goes with it as it is"


class PlannedValues(torch.Tensor):
    """A copy of an array that was given to plan(). NOTE: the kernels have another one, so a write
    here would be lost; it raises, through views too."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if (_writes(func.__name__) and isinstance(args[0], cls)) or isinstance(
            kwargs.get("out"), cls
        ):
            raise NotImplementedError(
                f"{func.__name__}: these are values of a plan, which a write does not reach: "
                f"{_REPLAN}"
            )
        result = super().__torch_function__(func, types, args, kwargs)
        source = next((a for a in args if isinstance(a, cls)), None)
        if isinstance(result, cls) and source is not None and not _same_memory(result, source):
            return result.as_subclass(torch.Tensor)
        return result


def _writes(name: str) -> bool:
    if name.startswith("__"):
        augmented = name.startswith("__i") and name not in ("__index__", "__int__", "__invert__")
        return augmented or name in ("__setitem__", "__set__")
    return name.endswith("_")


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


class EngineAttributes:
    """Of both wrappers; `_state`, `_requested_backend` and `device` are theirs."""

    def _array(self, values: list[int]) -> torch.Tensor:
        """What plan() was given, on the device where engines expect it."""
        host = torch.tensor(values, dtype=torch.int32, device="cpu")
        return host.to(self.device).as_subclass(PlannedValues)

    @property
    def _batch(self) -> _core.Batch | None:
        planned = self._state.planned
        return None if planned is None else planned.asked.request.lengths.batch

    @told
    def _backend(self) -> str:
        planned = self._state.planned
        return self._requested_backend.name if planned is None else planned.primary.backend.name

    @told
    def _causal(self) -> bool:
        planned = self._state.planned
        return False if planned is None else planned.asked.causal

    @told
    def _window_left(self) -> int:
        planned = self._state.planned
        return -1 if planned is None else planned.asked.request.options.window_left

    @told
    def _logits_soft_cap(self) -> float:
        planned = self._state.planned
        return 0.0 if planned is None else planned.asked.logits_soft_cap

    @told
    def _sm_scale(self) -> float | None:
        planned = self._state.planned
        return None if planned is None else planned.scales.logits

    @repeated
    def _pos_encoding_mode(self) -> str | None:
        planned = self._state.planned
        return None if planned is None else MODE_OF[planned.asked.request.options.position]

    @repeated
    def _rope_scale(self) -> float | None:
        """NOTE: flashinfer's BatchDecodeWithSharedPrefixPagedKVCacheWrapper gives this and
        _rope_theta to the attention over its prefix."""
        planned = self._state.planned
        return None if planned is None else planned.asked.request.options.rope_scale

    @repeated
    def _rope_theta(self) -> float | None:
        planned = self._state.planned
        return None if planned is None else planned.asked.request.options.rope_theta

    @repeated
    def _num_qo_heads(self) -> int | None:
        planned = self._state.planned
        return None if planned is None else planned.asked.request.options.num_qo_heads

    @repeated
    def _num_kv_heads(self) -> int | None:
        planned = self._state.planned
        return None if planned is None else planned.asked.request.options.num_kv_heads

    @repeated
    def _batch_size(self) -> int | None:
        batch = self._batch
        return None if batch is None else batch.num_requests

    @told
    def _use_cuda_graph(self) -> bool:
        return self._graph is not None

    @told
    def _fixed_batch_size(self) -> int:
        """0: batches of any size, as always without CUDA graphs."""
        return 0 if self._graph is None else self._graph.buffers.batch_size

    @told
    def _max_total_num_rows(self) -> int | None:
        """None: as many rows as a batch has, as always without CUDA graphs; with them, those of the
        first plan."""
        return self._state.graph_rows or None

    @property
    def _sinks(self) -> None:
        """None. NOTE: engines put sinks here for run() to find; they must not be lost."""
        return None

    @_sinks.setter
    def _sinks(self, value: torch.Tensor | None) -> None:
        if value is not None:
            raise NotImplementedError(
                f"{type(self).__name__}._sinks: run() does not look there; give it sinks="
            )

    @repeated
    def _plan_info(self) -> _core.Plan | None:
        planned = self._state.planned
        return None if planned is None else planned.primary.plan

    @told
    def _cached_module(self) -> PlanModule:
        return PlanModule(self)

    _prefix_len_ptr = only(None, _ITEMS)
    _token_pos_in_items_ptr = only(None, _ITEMS)
    _token_pos_in_items_len = only(0, _ITEMS)
    _max_item_len_ptr = only(None, _ITEMS)
    _block_tables = only(None, "block tables are plan()'s to check, and not used")

    def _planned_dtype(self, name: str) -> torch.dtype | None:
        planned = self._state.planned
        if planned is None:
            return None
        return check.TORCH_DTYPES[getattr(planned.asked.request.options, name)]

    @repeated
    def _cached_q_data_type(self) -> torch.dtype | None:
        return self._planned_dtype("q_dtype")

    @repeated
    def _cached_kv_data_type(self) -> torch.dtype | None:
        return self._planned_dtype("kv_dtype")

    @repeated
    def _cached_o_data_type(self) -> torch.dtype | None:
        return self._planned_dtype("o_dtype")

    @told
    def _float_workspace_buffer(self) -> torch.Tensor:
        return self._state.workspace.float_buffer.tensor

    @told
    def _int_workspace_buffer(self) -> torch.Tensor | None:
        """The work list; None before plan(), which allocates it."""
        planned = self._state.planned
        return None if planned is None else planned.primary.int_buffer.tensor

    @told
    def _pin_memory_int_workspace_buffer(self) -> None:
        """None: the staging memory is not a tensor."""
        return None

    @told
    def _qo_indptr_buf(self) -> torch.Tensor | None:
        if self._graph is not None:
            return self._graph.buffers.qo_indptr
        batch = self._batch
        return None if batch is None else self._array(batch.qo_indptr)

    @told
    def _custom_mask_buf(self) -> torch.Tensor | None:
        """The packed mask. NOTE: without graphs a copy: plan() has classed the tiles of its own."""
        if self._graph is not None:
            return self._graph.buffers.mask
        planned = self._state.planned
        mask = None if planned is None else planned.asked.request.mask
        if mask is None:
            return None
        return mask[: self._batch.mask_bytes].clone().as_subclass(PlannedValues)

    @told
    def _mask_indptr_buf(self) -> torch.Tensor | None:
        """First byte of every request in the packed mask."""
        if self._graph is not None:
            return self._graph.buffers.mask_indptr
        if self._custom_mask_buf is None:
            return None
        return self._array(self._batch.mask_indptr)


class PagedEngineAttributes(EngineAttributes):
    @told
    def _paged_kv_indptr_buf(self) -> torch.Tensor | None:
        if self._graph is not None:
            return self._graph.buffers.kv_indptr
        batch = self._batch
        return None if batch is None else self._array(batch.kv_indptr)

    @told
    def _paged_kv_indices_buf(self) -> torch.Tensor | None:
        """Indices that plan() got on the GPU are the kernels' own."""
        if self._graph is not None:
            return self._graph.buffers.indices
        planned = self._state.planned
        if planned is None:
            return None
        pages = planned.asked.request.lengths.pages
        if pages.on_device is not None:
            return pages.on_device
        return self._array(self._batch.page_indices)

    @told
    def _paged_kv_last_page_len_buf(self) -> torch.Tensor | None:
        if self._graph is not None:
            return self._graph.buffers.last_page_len
        batch = self._batch
        return None if batch is None else self._array(batch.last_page_len)


class RaggedEngineAttributes(EngineAttributes):
    @told
    def _kv_indptr_buf(self) -> torch.Tensor | None:
        if self._graph is not None:
            return self._graph.buffers.kv_indptr
        batch = self._batch
        return None if batch is None else self._array(batch.kv_indptr)
