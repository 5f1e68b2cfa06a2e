"""Attributes of wrappers with an underscore that serving engines read, and what they call there.

They show what is planned. Writing raises where the kernels would not see it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from .._check import dtypes, validate
from .._check.arguments import NO_ITEMS
from .._check.request import Request
from .plan_module import PlanModule

_REPLAN = "call plan() with what should change, or construct another wrapper"


class readonly_property(property):  # noqa: N801, used like property
    """A read-only property whose assignment raises AttributeError with the reason."""

    name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __set__(self, instance: object, value: Any) -> None:
        self.refuse(instance, "is read-only")

    def refuse(self, instance: object, why: str) -> NoReturn:
        raise AttributeError(f"{type(instance).__name__}.{self.name} {why}: {_REPLAN}")


class ignored_in_graphs(readonly_property):  # noqa: N801, used like property
    """A read-only property that engines set, between replays of a graph, to the value in the plan
    that they are about to make."""

    def __set__(self, instance: object, value: Any) -> None:
        if not instance.is_cuda_graph_enabled:
            super().__set__(instance, value)


class constant_property(ignored_in_graphs):  # noqa: N801, used like property
    """A property of that kind that engines set only to its present value, or to None."""

    def __set__(self, instance: object, value: Any) -> None:
        super().__set__(instance, value)
        now = self.__get__(instance)
        if value is not None and value is not now and value != now:
            self.refuse(instance, f"is {now!r} and cannot become {value!r}")


class graph_buffer(readonly_property):  # noqa: N801, used like property
    """A buffer of a wrapper for CUDA graphs, which may be set after `_use_cuda_graph = True`, up to
    the first plan(); of other wrappers, a copy of what plan() was given.

    part: of GraphBuffers. planned: value of a wrapper without graphs; by default the batch's
    array of that name. absent: value where there is neither.
    """

    def __init__(
        self, part: str, planned: Callable[[Any], Any] | None = None, absent: Any = None
    ) -> None:
        def read(wrapper: Any) -> Any:
            if wrapper._graph is not None:
                return getattr(wrapper._graph.buffers, part)
            if wrapper._plan.request is None:
                given = wrapper._given_buffers if wrapper._awaits_buffers else {}
                return given.get(self.name.removeprefix("_"), absent)
            if planned is not None:
                return planned(wrapper)
            return planned_array(getattr(wrapper._batch, part), wrapper.device)

        super().__init__(read)

    def __set__(self, instance: object, value: Any) -> None:
        if not instance._awaits_buffers:
            super().__set__(instance, value)
        argument = self.name.removeprefix("_")
        instance._given_buffers = {**instance._given_buffers, argument: value}


def of_plan(
    path: str, before: Any = None, convert: Callable[[Any], Any] | None = None
) -> Callable[[Any], Any]:
    """Getter for an attribute path on a wrapper's current plan (_wrappers.plan.Plan). Returns
    `before` until the first plan(). convert: converts the value."""
    find = operator.attrgetter(path)

    def read(wrapper: Any) -> Any:
        plan = wrapper._plan
        if plan.request is None:
            return before
        return find(plan) if convert is None else convert(find(plan))

    return read


def forwards(part: str, *names: str, **renamed: str) -> Callable[[type], type]:
    """Class decorator: forwards reads and writes of attributes to the object in `part`, under their
    own names or others."""

    def decorate(owner: type) -> type:
        for name, theirs in {**dict(zip(names, names, strict=True)), **renamed}.items():
            setattr(owner, name, _forwarded(part, theirs))
        return owner

    return decorate


def _forwarded(part: str, name: str) -> property:
    def assign(instance: object, value: Any) -> None:
        setattr(getattr(instance, part), name, value)

    return property(operator.attrgetter(f"{part}.{name}"), assign)


def fixed_property(neutral: Any, why: str) -> property:
    """Property that may be set to one value only: engines set it, whether or not they use it."""
    return _fixed_property(lambda instance: neutral, f": {why}")


def _of_items(name: str) -> property:
    """Property for an argument of multi-item scoring, as plan() got it."""
    why = ": multi-item scoring is planned by plan(prefix_len_ptr=...); leave this as it is"
    return _fixed_property(of_plan(f"request.items.{name}", getattr(NO_ITEMS, name)), why)


def _fixed_property(read: Callable[[Any], Any], why: str) -> property:
    """Property that may be set to its present value only. why: error text after the class name."""

    def refuse_others(instance: object, value: Any) -> None:
        now = read(instance)
        if value is not now and (isinstance(value, torch.Tensor) or now is None or value != now):
            raise NotImplementedError(f"{type(instance).__name__}{why}")

    return property(read, refuse_others)


class PlannedValues(torch.Tensor):
    """A copy of an array that was given to plan(). The kernels have another one, so a write here
    would be lost; it raises, through views too."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if isinstance(args[0] if _writes(func.__name__) else kwargs.get("out"), cls):
            raise NotImplementedError(
                f"{func.__name__}: these are values of a plan, which a write does not reach: "
                f"{_REPLAN}"
            )
        result = super().__torch_function__(func, types, args, kwargs)
        source = next((a for a in args if isinstance(a, cls)), None)
        if not isinstance(result, cls) or source is None:
            return result
        with torch._C.DisableTorchFunctionSubclass():
            same = result.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
        return result if same else result.as_subclass(torch.Tensor)


def _writes(name: str) -> bool:
    if name.startswith("__"):
        augmented = name.startswith("__i") and name not in ("__index__", "__int__", "__invert__")
        return augmented or name in ("__setitem__", "__set__")
    return name.endswith("_")


def planned_array(values: list[int], device: torch.device) -> torch.Tensor:
    """Values that plan() got, as int32 on the device where engines expect them."""
    host = torch.tensor(values, dtype=torch.int32, device="cpu")
    return host.to(device).as_subclass(PlannedValues)


def planned_pages(request: Request) -> torch.Tensor:
    """The page indices of a plan. Those that plan() got on the GPU are the kernels' own."""
    if request.pages.on_device is not None:
        return request.pages.on_device
    return planned_array(request.batch.page_indices, request.device)


_BATCH = "request.batch"
_OPTIONS = "request.options"
_torch_dtype = dtypes.TORCH_DTYPES.get


def _mask(wrapper: Any) -> torch.Tensor | None:
    """A copy of the packed mask: the plan knows the full tiles of its own."""
    mask = wrapper._plan.request.mask
    if mask is None:
        return None
    return mask[: wrapper._batch.mask_bytes].clone().as_subclass(PlannedValues)


def _mask_indptr(wrapper: Any) -> torch.Tensor | None:
    if wrapper._plan.request.mask is None:
        return None
    return planned_array(wrapper._batch.mask_indptr, wrapper.device)


class EngineAttributes:
    """Attributes of both wrappers that engines read. The wrapper has `_plan`, `_graph`,
    `_given_buffers`, `_requested_backend` and `device`."""

    @property
    def _awaits_buffers(self) -> bool:
        """True if the first plan() will take the graph buffers from `_given_buffers`."""
        return self._graph is None and self.is_cuda_graph_enabled

    _batch = property(of_plan(_BATCH))

    @readonly_property
    def _backend(self) -> str:
        """The backend that the constructor's caller named, or the planned one after "auto".
        SGLang asserts that it is the "fa2" of its code, also if PREFLASH_BACKEND chose others."""
        return self._requested_backend.by_caller or self._planned_backend

    @property
    def _planned_backend(self) -> str:
        """The backend of the plan; before plan() the one that will be asked for it."""
        primary = self._plan.primary
        return self._requested_backend.name if primary is None else primary.backend.name

    _causal = readonly_property(of_plan("request.causal", False))
    _window_left = readonly_property(of_plan(f"{_OPTIONS}.window_left", -1))
    _logits_soft_cap = readonly_property(of_plan("request.logits_soft_cap", 0.0))
    _sm_scale = readonly_property(of_plan("request.scales.logits"))

    _pos_encoding_mode = constant_property(
        of_plan(f"{_OPTIONS}.position", convert=validate.MODE_OF.get)
    )
    # flashinfer's BatchDecodeWithSharedPrefixPagedKVCacheWrapper gives these two to the attention
    # over its prefix.
    _rope_scale = constant_property(of_plan(f"{_OPTIONS}.rope_scale"))
    _rope_theta = constant_property(of_plan(f"{_OPTIONS}.rope_theta"))
    _num_qo_heads = constant_property(of_plan(f"{_OPTIONS}.num_qo_heads"))
    _num_kv_heads = constant_property(of_plan(f"{_OPTIONS}.num_kv_heads"))
    _batch_size = constant_property(of_plan(f"{_BATCH}.num_requests"))
    _cached_q_data_type = constant_property(
        of_plan("request", convert=lambda r: r.q_given or _torch_dtype(r.options.q_dtype))
    )
    _cached_kv_data_type = constant_property(of_plan(f"{_OPTIONS}.kv_dtype", convert=_torch_dtype))
    _cached_o_data_type = constant_property(of_plan(f"{_OPTIONS}.o_dtype", convert=_torch_dtype))
    _plan_info = constant_property(of_plan("primary.plan"))
    _qo_indptr_last = ignored_in_graphs(of_plan(f"{_BATCH}.qo_end"))

    @property
    def _use_cuda_graph(self) -> bool:
        """RTP-LLM sets it, the buffers and _fixed_batch_size after the constructor."""
        return self.is_cuda_graph_enabled

    @_use_cuda_graph.setter
    def _use_cuda_graph(self, value: bool) -> None:
        value = validate.flag("_use_cuda_graph", value)
        if value == self._use_cuda_graph:
            return
        if self._graph is not None or self._plan.request is not None:
            raise AttributeError(
                f"{type(self).__name__}._use_cuda_graph = {value} after plan(): set it and the "
                "buffers before the first plan(), or construct another wrapper"
            )
        self._graph_enabled = value

    # 0: batches of any size, as always without CUDA graphs.
    _fixed_batch_size = graph_buffer("batch_size", lambda wrapper: 0, absent=0)
    _qo_indptr_buf = graph_buffer("qo_indptr")
    _custom_mask_buf = graph_buffer("mask", _mask)  # packed
    _mask_indptr_buf = graph_buffer("mask_indptr", _mask_indptr)  # first bytes in that

    @readonly_property
    def _max_total_num_rows(self) -> int | None:
        """Maximum query rows of any plan, set by the first one; None: no limit, as always without
        CUDA graphs."""
        return self._plan.graph_rows or None

    # NOTE: engines put sinks here for run() to find; they must not be lost.
    _sinks = _fixed_property(
        lambda self: None, "._sinks: run() does not look there; give it sinks="
    )
    _cached_module = readonly_property(PlanModule)
    _jit_module = fixed_property(None, "nothing is compiled at run time; _jit_module stays None")
    _prefix_len_ptr = _of_items("prefix_len_ptr")
    _token_pos_in_items_ptr = _of_items("token_pos_in_items_ptr")
    _token_pos_in_items_len = _of_items("token_pos_in_items_len")
    _max_item_len_ptr = _of_items("max_item_len_ptr")
    _block_tables = fixed_property(None, "block tables are plan()'s to check, and not used")

    _float_workspace_buffer = readonly_property(operator.attrgetter("_plan.workspace.float_tensor"))
    # The work list, which plan() allocates.
    _int_workspace_buffer = readonly_property(of_plan("primary.plan_buffer.buffer.tensor"))
    # The staging memory is not a tensor.
    _pin_memory_int_workspace_buffer = readonly_property(lambda wrapper: None)


class PagedEngineAttributes(EngineAttributes):
    @readonly_property
    def _kv_lens_buffer(self) -> torch.Tensor | None:
        """The keys of every request."""
        batch = self._batch
        if batch is None:
            return None
        return planned_array([batch.kv_len(i) for i in range(batch.num_requests)], self.device)

    _paged_kv_indptr_buf = graph_buffer("kv_indptr")
    _paged_kv_indices_buf = graph_buffer(
        "indices",
        lambda wrapper: planned_pages(wrapper._plan.request),
    )
    _paged_kv_last_page_len_buf = graph_buffer("last_page_len")


class RaggedEngineAttributes(EngineAttributes):
    _kv_indptr_buf = graph_buffer("kv_indptr")
