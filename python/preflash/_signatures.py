"""Signatures that inspect.signature, and hence editors and callers, see as documented."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

Arguments = TypeVar("Arguments")


def head_dim_has_two_names(plan: Callable) -> Callable:
    """Lets `head_dim_qk` stand for the required argument `head_dim`."""
    position = list(inspect.signature(plan).parameters).index("head_dim")

    @functools.wraps(plan)
    def with_alias(*args: Any, **kwargs: Any) -> Any:
        if "head_dim_qk" in kwargs and len(args) <= position:
            kwargs.setdefault("head_dim", kwargs["head_dim_qk"])
        return plan(*args, **kwargs)

    return with_alias


def same_arguments_as(
    plan: Callable, kind: type[Arguments]
) -> Callable[[Callable[[Any, Arguments], Any]], Callable]:
    """Gives a method plan()'s parameters; it receives them as one object, with a field for each."""
    signature = inspect.signature(plan)

    def decorate(method: Callable) -> Callable:
        @head_dim_has_two_names
        @functools.wraps(plan)
        def bound(*args: Any, **kwargs: Any) -> Any:
            arguments = signature.bind(*args, **kwargs)
            arguments.apply_defaults()
            self = arguments.arguments.pop("self")
            return method(self, kind(**arguments.arguments))

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
