"""Signatures of the public calls: those of calls.py, with arguments in either positional order."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from .. import _core
from .._check.calls import DecodePlanArguments
from .._check.names import with_nearest
from .._check.outputs import Outputs
from .._check.torch_modes import (
    eager,
    function_mode_is_active,
    is_dynamo_compiling,
    num_dispatch_modes,
)
from .._plan.masks import DENSE_DTYPES

P = ParamSpec("P")
Arguments = TypeVar("Arguments")
Self = TypeVar("Self")
Result = TypeVar("Result")

_signature = functools.cache(inspect.signature)

_USE_PREFILL = "use BatchPrefillWithPagedKVCacheWrapper with one query per request"
# What to do instead of passing a keyword that a call lacks.
_WAYS_OUT = {
    DecodePlanArguments: dict.fromkeys(("custom_mask", "packed_custom_mask"), _USE_PREFILL)
}


def _is_integer(value: Any) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, (bool, torch.Tensor))


def _is_flag(value: Any) -> bool:
    if isinstance(value, (torch.Tensor, str)):
        return False
    return type(value).__name__ in ("bool", "bool_") or (_is_integer(value) and value in (0, 1))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _is_number(value: Any) -> bool:
    if _is_tensor(value):
        return value.numel() == 1 and value.dtype != torch.bool
    return hasattr(value, "__float__") and not isinstance(value, bool)


def _is_scale_tensor(value: Any) -> bool:
    return _is_tensor(value) and value.dtype.is_floating_point


# Tests whether a value fits a parameter, by the parameter's name or its type without None; other
# parameters take any value.
_FITS: dict[str, Callable[[Any], bool]] = {
    "custom_mask": lambda value: _is_tensor(value) and value.dtype in DENSE_DTYPES,
    "packed_custom_mask": lambda value: _is_tensor(value) and value.dtype == torch.uint8,
    "scale_q": _is_scale_tensor,
    "scale_k": _is_scale_tensor,
    "scale_v": _is_scale_tensor,
    "int": _is_integer,
    "bool": _is_flag,
    "str": lambda value: isinstance(value, str),
    "float": _is_number,
    "float | torch.Tensor": _is_number,
    "str | torch.dtype": lambda value: isinstance(value, (str, torch.dtype)),
}
_NEVER_NONE = ("int", "bool", "str")


class _Orders:
    """Both orders of one call's positional parameters."""

    def __init__(self, kind: type) -> None:
        parameters = _signature(kind).parameters.values()
        self._types = {parameter.name: parameter.annotation for parameter in parameters}
        self.documented = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        self._newer = getattr(kind, "NEWER", self.documented)
        # Calls with no more positional arguments than this mean the same in either order.
        same = [a == b for a, b in zip(self.documented, self._newer, strict=False)]
        self.num_same = same.index(False) if False in same else len(self._newer)
        # Position of the argument that may be called head_dim_qk; -1: no such argument.
        self.head_dim_at = -1
        if "head_dim_qk" in self._types:
            self.head_dim_at = self.documented.index("head_dim")

    def translated(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """The call in the documented order. Where the values fit both orders, the documented one
        counts; where they fit neither, its checks say why."""
        first = self.num_same
        if len(args) > first:
            tail, newer = args[first:], self._newer[first:]
            if not self._fit(self.documented[first:], tail) and self._fit(newer, tail):
                named = dict(zip(newer, tail, strict=False))
                twice = named.keys() & kwargs.keys()
                if twice:
                    raise TypeError(f"{min(twice)} was given by position and by name; give it once")
                return args[:first], {**named, **kwargs}
        elif len(args) <= self.head_dim_at and "head_dim_qk" in kwargs:
            kwargs = {"head_dim": kwargs["head_dim_qk"], **kwargs}
        return args, kwargs

    def _fit(self, order: Sequence[str], values: Sequence[Any]) -> bool:
        return len(values) <= len(order) and all(map(self._fits, order, values))

    def _fits(self, name: str, value: Any) -> bool:
        of_type = self._types[name]
        if value is None:
            return "None" in of_type or of_type not in _NEVER_NONE
        fits = _FITS.get(name) or _FITS.get(of_type.removesuffix(" | None"))
        return fits is None or fits(value)


def takes(
    kind: Callable[P, Arguments],
) -> Callable[[Callable[[Self, Arguments], Result]], Callable[Concatenate[Self, P], Result]]:
    """Gives a method the parameters of a call. It receives them as one object, in whichever order
    they came; `head_dim_qk` may stand for `head_dim`."""

    def decorate(method: Callable) -> Callable:
        collect = _collector(kind, method, {})

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            return method(self, collect(args, kwargs))

        return _with_signature(call, method, kind, {})

    return decorate


def plans(
    kind: Callable[P, Arguments], **arrays: str
) -> Callable[[Callable[[Self, Arguments], None]], Callable[Concatenate[Self, P], None]]:
    """takes() for a plan(). One call of C++ makes a plan that differs from the wrapper's last one
    in index arrays alone, as the steps of an engine do.

    arrays: the role of each index array (_core.RepeatedPlan), by the name of its parameter.
    """
    orders = _Orders(kind)
    first = orders.documented[: orders.num_same]  # at the same positions in both orders
    roles = [(n, first.index(n) if n in first else -1, role) for n, role in arrays.items()]

    def decorate(method: Callable) -> Callable:
        collect = _collector(kind, method, {})

        @eager
        def call(self: Any, *args: Any, **kwargs: Any) -> None:
            if not _core.plan_again(self, call, args, kwargs):
                a = collect(args, kwargs)
                method(self, a)
                self._remember(a, (call, roles), (args, kwargs))

        return _with_signature(call, method, kind, {})

    return decorate


def forwards(
    kind: Callable[P, Arguments],
) -> Callable[[Callable[[Self, Arguments], Result]], Callable[Concatenate[Self, P], Result]]:
    """takes() for a forward(), which engines call for every layer with the same options: those of
    an earlier call are not checked again."""
    tensors = 3 if "k" in _signature(kind).parameters else 2

    def decorate(method: Callable) -> Callable:
        collect = _collector(kind, method, {})

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling() or function_mode_is_active() or num_dispatch_modes():
                return method(self, collect(args, kwargs))
            options, known = args[tensors:], None
            if len(args) >= tensors:
                known = self._forward_again(call, options, kwargs)
            if known is not None:
                kv = args[1] if tensors == 2 else args[1:3]
                return self._run_forward(known, args[0], kv, call.outputs)
            a = collect(args, kwargs)
            result = method(self, a)
            if len(args) >= tensors:
                self._forwards.keep(call, options, kwargs, lambda: self._forward_options(a))
            return result

        call.outputs = Outputs(return_lse=method.__name__ == "forward_return_lse")
        return _with_signature(call, method, kind, {})

    return decorate


def function_takes(
    kind: Callable[P, Arguments], **defaults: Any
) -> Callable[[Callable[[Arguments], Result]], Callable[P, Result]]:
    """takes() for a plain function, with these defaults instead of the call's."""

    def decorate(function: Callable) -> Callable:
        collect = _collector(kind, function, defaults)

        def call(*args: Any, **kwargs: Any) -> Any:
            return function(collect(args, kwargs))

        return _with_signature(call, function, kind, defaults)

    return decorate


def by_position(*names: str) -> Callable[[Callable[P, Result]], Callable[P, Result]]:
    """Documents parameters that a method takes by name and, out of its *args, by position."""

    def decorate(method: Callable) -> Callable:
        own = inspect.signature(method)
        rest = [p for p in own.parameters.values() if p.name not in names]
        at = next(i for i, p in enumerate(rest) if p.kind is p.VAR_POSITIONAL)
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        rest[at:at] = [own.parameters[name].replace(kind=kind) for name in names]
        method.__signature__ = own.replace(parameters=rest)
        return method

    return decorate


def _collector(kind: type, function: Callable, defaults: dict[str, Any]) -> Callable:
    orders = _Orders(kind)
    num_same, head_dim_at = orders.num_same, orders.head_dim_at

    def collect(args: tuple, kwargs: dict[str, Any]) -> Any:
        if defaults:
            kwargs = {**defaults, **kwargs}
        if len(args) > num_same or len(args) <= head_dim_at:
            args, kwargs = orders.translated(args, kwargs)
        try:
            return kind(*args, **kwargs)
        except TypeError:
            _refuse(kind, function, args, kwargs)
            raise

    return collect


def _refuse(kind: type, function: Callable, args: tuple, kwargs: dict[str, Any]) -> None:
    """Says what is missing, unknown or too much, in the name of the function that was called."""
    try:
        _signature(kind).bind(*args, **kwargs)
    except TypeError as error:
        names, ways_out = _signature(kind).parameters, _WAYS_OUT.get(kind, {})
        says = with_nearest(str(error), names, ways_out)
        raise TypeError(f"{function.__qualname__}(): {says}") from None


def _with_signature(
    call: Callable, function: Callable, kind: type, defaults: dict[str, Any]
) -> Callable:
    """call in the place of function, with the parameters that this has before its arguments, and
    those of kind."""
    functools.update_wrapper(call, function)
    own = inspect.signature(function)
    first = list(own.parameters.values())[:-1]
    of_call = [
        parameter.replace(default=defaults.get(parameter.name, parameter.default))
        for parameter in _signature(kind).parameters.values()
    ]
    call.__signature__ = own.replace(parameters=[*first, *of_call])
    named = {p.name: p.annotation for p in (*first, *of_call) if p.annotation is not p.empty}
    call.__annotations__ = {**named, "return": own.return_annotation}
    return call
