"""Attributes of wrappers with an underscore that serving engines read.

They show what is planned. Writing raises where the kernels would not see it.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from .. import _core
from .._check import values as check
from .._check.lengths import Lengths
from .._plan.items import NO_ITEMS
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


class announced(told):  # noqa: N801, used like property
    """A told property that engines set, between replays of a graph, to what the plan that they are
    about to make will tell."""

    def __set__(self, instance: object, value: Any) -> None:
        if not instance.is_cuda_graph_enabled:
            super().__set__(instance, value)


class graph_buffer(told):  # noqa: N801, used like property
    """A told property that may be set after `_use_cuda_graph = True`, up to the first plan()."""

    def __set__(self, instance: object, value: Any) -> None:
        if not instance._awaits_buffers:
            super().__set__(instance, value)
        name = self.fget.__name__.removeprefix("_")
        instance._given_buffers = {**instance._given_buffers, name: value}


class forwarded:  # noqa: N801, used like property
    """An attribute of a part of the wrapper: to read, and to set as there."""

    def __init__(self, part: str, name: str | None = None) -> None:
        self._part = part
        self._name = name

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = self._name or name

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else getattr(getattr(instance, self._part), self._name)

    def __set__(self, instance: object, value: Any) -> None:
        setattr(getattr(instance, self._part), self._name, value)


def only(neutral: Any, why: str) -> property:
    """An attribute that may be set to one value: engines do, whether or not they use it."""

    def refuse_others(instance: object, value: Any) -> None:
        if value is not neutral and value != neutral:
            raise NotImplementedError(f"{type(instance).__name__}: {why}")

    return property(lambda instance: neutral, refuse_others)


def of_items(name: str) -> property:
    """An array of multi-item scoring, as plan() was given it. It may be set to what it is."""

    def planned(instance: object) -> Any:
        planned = instance._state.planned
        return getattr(NO_ITEMS if planned is None else planned.asked.items, name)

    def refuse_others(instance: object, value: Any) -> None:
        now = planned(instance)
        if value is not now and (isinstance(value, torch.Tensor) or now is None or value != now):
            raise NotImplementedError(
                f"{type(instance).__name__}: multi-item scoring is planned by "
                "plan(prefix_len_ptr=...); leave this as it is"
            )

    return property(planned, refuse_others)


class PlannedValues(torch.Tensor):
    """A copy of an array that was given to plan(). The kernels have another one, so a write here
    would be lost; it raises, through views too."""

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


def planned_array(values: list[int], device: torch.device) -> torch.Tensor:
    """What plan() was given, on the device where engines expect it."""
    host = torch.tensor(values, dtype=torch.int32, device="cpu")
    return host.to(device).as_subclass(PlannedValues)


def planned_pages(lengths: Lengths, device: torch.device) -> torch.Tensor:
    """The page indices of a batch. Those that plan() got on the GPU are the kernels' own."""
    batch, pages = lengths
    if pages.on_device is not None:
        return pages.on_device
    return planned_array(batch.page_indices, device)


class EngineAttributes:
    """Of both wrappers; `_state`, `_graph`, `_given_buffers`, `_requested_backend` and `device` are
    theirs."""

    def _array(self, values: list[int]) -> torch.Tensor:
        return planned_array(values, self.device)

    @property
    def _awaits_buffers(self) -> bool:
        """Whether the first plan() will take the graph buffers from `_given_buffers`."""
        return self._graph is None and self.is_cuda_graph_enabled

    def _buffer(self, name: str) -> torch.Tensor | None:
        """A buffer that the first plan() will keep its arrays in."""
        return self._given_buffers.get(name) if self._awaits_buffers else None

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
        """flashinfer's BatchDecodeWithSharedPrefixPagedKVCacheWrapper gives this and
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

    _jit_module = only(None, "nothing is compiled at run time; _jit_module stays None")

    @property
    def _use_cuda_graph(self) -> bool:
        """NOTE: RTP-LLM sets it, the buffers and _fixed_batch_size after the constructor."""
        return self.is_cuda_graph_enabled

    @_use_cuda_graph.setter
    def _use_cuda_graph(self, value: bool) -> None:
        value = check.flag("_use_cuda_graph", value)
        if value == self._use_cuda_graph:
            return
        if self._graph is not None or self._state.planned is not None:
            raise AttributeError(
                f"{type(self).__name__}._use_cuda_graph = {value} after plan(): set it and the "
                "buffers before the first plan(), or construct another wrapper"
            )
        self._set_graph_mode(value)

    @graph_buffer
    def _fixed_batch_size(self) -> int:
        """0: batches of any size, as always without CUDA graphs."""
        if self._graph is None:
            return self._buffer("fixed_batch_size") or 0
        return self._graph.buffers.batch_size

    @announced
    def _qo_indptr_last(self) -> int | None:
        batch = self._batch
        return None if batch is None else batch.qo_end

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

    _prefix_len_ptr = of_items("prefix_len_ptr")
    _token_pos_in_items_ptr = of_items("token_pos_in_items_ptr")
    _token_pos_in_items_len = of_items("token_pos_in_items_len")
    _max_item_len_ptr = of_items("max_item_len_ptr")
    _block_tables = only(None, "block tables are plan()'s to check, and not used")

    def _planned_dtype(self, name: str) -> torch.dtype | None:
        planned = self._state.planned
        if planned is None:
            return None
        return check.TORCH_DTYPES[getattr(planned.asked.request.options, name)]

    @repeated
    def _cached_q_data_type(self) -> torch.dtype | None:
        planned = self._state.planned
        given = None if planned is None else planned.asked.request.q_given
        return self._planned_dtype("q_dtype") if given is None else given

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

    @graph_buffer
    def _qo_indptr_buf(self) -> torch.Tensor | None:
        if self._graph is not None:
            return self._graph.buffers.qo_indptr
        batch = self._batch
        return self._buffer("qo_indptr_buf") if batch is None else self._array(batch.qo_indptr)

    @graph_buffer
    def _custom_mask_buf(self) -> torch.Tensor | None:
        """The packed mask; without graphs a copy: plan() knows the full tiles of its own."""
        if self._graph is not None:
            return self._graph.buffers.mask
        planned = self._state.planned
        mask = None if planned is None else planned.asked.request.mask
        if mask is None:
            return self._buffer("custom_mask_buf")
        return mask[: self._batch.mask_bytes].clone().as_subclass(PlannedValues)

    @graph_buffer
    def _mask_indptr_buf(self) -> torch.Tensor | None:
        """First byte of every request in the packed mask."""
        if self._graph is not None:
            return self._graph.buffers.mask_indptr
        if self._custom_mask_buf is None or self._awaits_buffers:
            return self._buffer("mask_indptr_buf")
        return self._array(self._batch.mask_indptr)


class PagedEngineAttributes(EngineAttributes):
    @told
    def _kv_lens_buffer(self) -> torch.Tensor | None:
        """The keys of every request."""
        batch = self._batch
        if batch is None:
            return None
        return self._array([batch.kv_len(i) for i in range(batch.num_requests)])

    @graph_buffer
    def _paged_kv_indptr_buf(self) -> torch.Tensor | None:
        if self._graph is not None:
            return self._graph.buffers.kv_indptr
        batch = self._batch
        if batch is None:
            return self._buffer("paged_kv_indptr_buf")
        return self._array(batch.kv_indptr)

    @graph_buffer
    def _paged_kv_indices_buf(self) -> torch.Tensor | None:
        if self._graph is not None:
            return self._graph.buffers.indices
        planned = self._state.planned
        if planned is None:
            return self._buffer("paged_kv_indices_buf")
        return planned_pages(planned.asked.request.lengths, self.device)

    @graph_buffer
    def _paged_kv_last_page_len_buf(self) -> torch.Tensor | None:
        if self._graph is not None:
            return self._graph.buffers.last_page_len
        batch = self._batch
        if batch is None:
            return self._buffer("paged_kv_last_page_len_buf")
        return self._array(batch.last_page_len)


class RaggedEngineAttributes(EngineAttributes):
    @graph_buffer
    def _kv_indptr_buf(self) -> torch.Tensor | None:
        if self._graph is not None:
            return self._graph.buffers.kv_indptr
        batch = self._batch
        return self._buffer("kv_indptr_buf") if batch is None else self._array(batch.kv_indptr)
