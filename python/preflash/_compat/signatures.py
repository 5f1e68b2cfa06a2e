"""Signatures that inspect.signature, and hence editors and callers, see as documented."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from .._plan.masks import DENSE_DTYPES

Arguments = TypeVar("Arguments")

_NEWER_MASK_TO_SCALES = ("custom_mask", "packed_custom_mask", "causal")
_MULTI_ITEM = (
    "prefix_len_ptr",
    "token_pos_in_items_ptr",
    "token_pos_in_items_len",
    "max_item_len_ptr",
)
# The order of later releases of the same API, which put new parameters between old ones.
NEWER_PAGED_ORDER = (
    "qo_indptr",
    "paged_kv_indptr",
    "paged_kv_indices",
    "paged_kv_last_page_len",
    "num_qo_heads",
    "num_kv_heads",
    "head_dim",
    "page_size",
    "head_dim_vo",
    *_NEWER_MASK_TO_SCALES,
    "pos_encoding_mode",
    "use_fp16_qk_reduction",
    "sm_scale",
    "window_left",
    "logits_soft_cap",
    "rope_scale",
    "rope_theta",
    "q_data_type",
    "kv_data_type",
    "o_data_type",
    "non_blocking",
    *_MULTI_ITEM,
    "seq_lens",
    "seq_lens_q",
    "block_tables",
    "max_token_per_sequence",
    "max_sequence_kv",
    "fixed_split_size",
    "disable_split_kv",
    "uniform_q_len",
)
NEWER_RAGGED_ORDER = (
    "qo_indptr",
    "kv_indptr",
    "num_qo_heads",
    "num_kv_heads",
    "head_dim",
    "head_dim_vo",
    *_NEWER_MASK_TO_SCALES,
    "pos_encoding_mode",
    "use_fp16_qk_reduction",
    "window_left",
    "logits_soft_cap",
    "sm_scale",
    "rope_scale",
    "rope_theta",
    "q_data_type",
    "kv_data_type",
    "o_data_type",
    "non_blocking",
    *_MULTI_ITEM,
    "fixed_split_size",
    "disable_split_kv",
    "seq_lens",
    "seq_lens_q",
    "max_token_per_sequence",
    "max_sequence_kv",
    "v_indptr",
    "o_indptr",
    "uniform_q_len",
)
NEWER_DECODE_ORDER = (
    "indptr",
    "indices",
    "last_page_len",
    "num_qo_heads",
    "num_kv_heads",
    "head_dim",
    "page_size",
    "pos_encoding_mode",
    "window_left",
    "logits_soft_cap",
    "q_data_type",
    "kv_data_type",
    "o_data_type",
    "data_type",
    "sm_scale",
    "rope_scale",
    "rope_theta",
    "non_blocking",
    "block_tables",
    "seq_lens",
    "fixed_split_size",
    "disable_split_kv",
    "q_len_per_req",
)
NEWER_SINGLE_ORDER = (
    "q",
    "k",
    "v",
    "scale_q",
    "scale_k",
    "scale_v",
    "o_dtype",
    *_NEWER_MASK_TO_SCALES,
    "kv_layout",
    "pos_encoding_mode",
    "use_fp16_qk_reduction",
    "sm_scale",
    "window_left",
    "logits_soft_cap",
    "rope_scale",
    "rope_theta",
    "backend",
    "return_lse",
    "kv_cache_sf",
    "k_scale",
    "v_scale",
)


def _is_integer(value: Any) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, (bool, torch.Tensor))


def _is_flag(value: Any) -> bool:
    if isinstance(value, (torch.Tensor, str)):
        return False
    return type(value).__name__ in ("bool", "bool_") or (_is_integer(value) and value in (0, 1))


def _is_mask(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in DENSE_DTYPES


def _is_packed_mask(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.uint8


def _is_scale_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype.is_floating_point


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and value.dtype != torch.bool
    return hasattr(value, "__float__") and not isinstance(value, bool)


def _is_dtype(value: Any) -> bool:
    return isinstance(value, (str, torch.dtype))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


# What a value must be to stand for a parameter; those that are not here may be anything.
_FITS: dict[str, Callable[[Any], bool]] = {
    "custom_mask": _is_mask,
    "packed_custom_mask": _is_packed_mask,
    "scale_q": _is_scale_tensor,
    "scale_k": _is_scale_tensor,
    "scale_v": _is_scale_tensor,
    "head_dim_vo": _is_integer,
    "window_left": _is_integer,
    "causal": _is_flag,
    "allow_fp16_qk_reduction": _is_flag,
    "use_fp16_qk_reduction": _is_flag,
    "non_blocking": _is_flag,
    "pos_encoding_mode": _is_text,
    "kv_layout": _is_text,
    "backend": _is_text,
    "sm_scale": _is_number,
    "logits_soft_cap": _is_number,
    "rope_scale": _is_number,
    "rope_theta": _is_number,
    "q_data_type": _is_dtype,
    "kv_data_type": _is_dtype,
    "data_type": _is_dtype,
    "o_data_type": _is_dtype,
    "o_dtype": _is_dtype,
}
_NEVER_NONE = ("causal", "kv_layout", "pos_encoding_mode", "window_left", "backend", "non_blocking")


def _fit(order: Sequence[str], values: Sequence[Any]) -> bool:
    """Whether all values may stand where they are."""
    if len(values) > len(order):
        return False
    for name, value in zip(order, values, strict=False):
        if value is None:
            if name in _NEVER_NONE:
                return False
        elif name in _FITS and not _FITS[name](value):
            return False
    return True


class _Spellings:
    """Both orders of one function's positional parameters."""

    def __init__(self, function: Callable, newer: Sequence[str]) -> None:
        parameters = inspect.signature(function).parameters.values()
        self._older = [
            parameter.name
            for parameter in parameters
            if parameter.kind is parameter.POSITIONAL_OR_KEYWORD and parameter.name != "self"
        ]
        self._newer = newer
        same = [a == b for a, b in zip(self._older, newer, strict=False)]
        self._num_same = same.index(False)
        self._num_bound = len([p for p in parameters if p.name == "self"])
        # Where the argument is that may be called head_dim_qk; -1: there is none.
        self._head_dim_at = self._older.index("head_dim") if "head_dim" in self._older else -1

    def ambiguous_outside(self) -> tuple[int, int]:
        """Calls with more positional arguments than the second number, up to the first, mean the
        same in either order."""
        bound = self._num_bound
        return self._num_same + bound, self._head_dim_at + bound

    def translated(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """The call in the documented order. Where the values fit both orders, they mean the same
        or the documented one counts; where they fit neither, its checks say why."""
        given = len(args) - self._num_bound
        if given > self._num_same:
            first = self._num_same + self._num_bound
            tail, newer = args[first:], self._newer[self._num_same :]
            if not _fit(self._older[self._num_same :], tail) and _fit(newer, tail):
                named = dict(zip(newer, tail, strict=False))
                twice = named.keys() & kwargs.keys()
                if twice:
                    raise TypeError(f"{min(twice)} was given by position and by name; give it once")
                return args[:first], {**named, **kwargs}
        elif given <= self._head_dim_at and "head_dim_qk" in kwargs:
            kwargs.setdefault("head_dim", kwargs["head_dim_qk"])
        return args, kwargs


def newer_spellings(newer: Sequence[str]) -> Callable[[Callable], Callable]:
    """Lets a function be called in the newer positional order too, as far as types tell the two
    apart, and lets `head_dim_qk` stand for the required argument `head_dim`."""

    def decorate(function: Callable) -> Callable:
        spellings = _Spellings(function, newer)
        num_same, head_dim_at = spellings.ambiguous_outside()

        @functools.wraps(function)
        def in_either_order(*args: Any, **kwargs: Any) -> Any:
            if len(args) > num_same or len(args) <= head_dim_at:
                args, kwargs = spellings.translated(args, kwargs)
            return function(*args, **kwargs)

        in_either_order._spellings = spellings
        return in_either_order

    return decorate


def same_arguments_as(
    plan: Callable, kind: type[Arguments]
) -> Callable[[Callable[[Any, Arguments], Any]], Callable]:
    """Gives a method plan()'s parameters; it receives them as one object, with a field for each."""
    signature = inspect.signature(plan)
    spellings: _Spellings | None = getattr(plan, "_spellings", None)
    parameters = list(signature.parameters.values())[1:]
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    by_position = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]

    def decorate(method: Callable) -> Callable:
        @functools.wraps(plan)
        def bound(*args: Any, **kwargs: Any) -> Any:
            if spellings is not None:
                args, kwargs = spellings.translated(args, kwargs)
            # signature.bind() by hand: it alone would take as long as a plan.
            given = dict(zip(by_position, args[1:], strict=False))
            given.update(kwargs)
            if len(given) != len(args) - 1 + len(kwargs):
                signature.bind(*args, **kwargs)  # says what is wrong
            try:
                arguments = kind(**{**defaults, **given})
            except TypeError:
                signature.bind(*args, **kwargs)
                raise
            return method(args[0], arguments)

        functools.update_wrapper(bound, method)
        bound.__signature__ = signature.replace(
            return_annotation=inspect.signature(method).return_annotation
        )
        return bound

    return decorate


def same_signature_as(function: Callable, **defaults: Any) -> Callable[[Callable], Callable]:
    """Shows the parameters of `function` with other defaults."""
    signature = inspect.signature(function)
    parameters = [
        parameter.replace(default=defaults.get(name, parameter.default))
        for name, parameter in signature.parameters.items()
    ]

    def decorate(other: Callable) -> Callable:
        other.__signature__ = signature.replace(parameters=parameters)
        return other

    return decorate
