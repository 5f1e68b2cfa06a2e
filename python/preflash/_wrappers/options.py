"""Options of a wrapper's calls: those that run() takes by name, those of plan() that constructors
fix, and those of forward(), which replace plan()'s."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from .. import _core
from .._check import dtypes
from .._check.arguments import RunKwargs, RunOptions
from .._check.calls import BatchArguments
from .._check.names import with_nearest
from .._check.options import check_unserved
from .plan import Plan

Run = TypeVar("Run", bound=Callable[..., Any])

_RUN_KWARGS = RunKwargs.__annotations__


def lists_options(run: Run) -> Run:
    """Shows RunKwargs in the signature of a run() that takes them as **options."""
    options = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=getattr(of_type, "__forward_arg__", of_type),
        )
        for name, of_type in _RUN_KWARGS.items()
    ]
    return _with_options(run, options)


def lists_options_of(base: Callable[..., Any]) -> Callable[[Run], Run]:
    """Shows the keywords of another run() in the signature of a run() that passes them on as
    **options."""
    parameters = inspect.signature(base).parameters.values()
    keywords = [one for one in parameters if one.kind is one.KEYWORD_ONLY]
    return lambda run: _with_options(run, keywords)


def _with_options(run: Run, options: Sequence[inspect.Parameter]) -> Run:
    own = inspect.signature(run)
    *named, _ = own.parameters.values()
    more = [one for one in options if one.name not in own.parameters]
    run.__signature__ = own.replace(parameters=[*named, *more])
    return run


def constructor_options(a: BatchArguments, options: _core.AttentionOptions) -> dict[str, Any]:
    """Options of a plan that constructors may fix, with their values in this plan."""
    return {
        "pos_encoding_mode": a.pos_encoding_mode,
        "q_data_type": dtypes.TORCH_DTYPES[options.q_dtype],
        "kv_data_type": dtypes.TORCH_DTYPES[options.kv_dtype],
        "o_data_type": dtypes.TORCH_DTYPES[options.o_dtype],
        "head_dim_qk": options.head_dim_qk,
        "head_dim_vo": options.head_dim_vo,
        "window_left": options.window_left,
    }


def with_forward(
    options: _core.AttentionOptions, forward: Mapping[str, Any]
) -> _core.AttentionOptions:
    """forward: the options of forward() that choose a variant. causal counts without a mask."""
    causal = forward["causal"] and options.mask != _core.Mask.custom
    return options.replace(**{**forward, "causal": causal})


def check_constructor_options(fixed: Mapping[str, Any], planned: Mapping[str, Any]) -> None:
    """Raises ValueError if plan() contradicts an option of the constructor."""
    for name, value in fixed.items():
        if planned[name] != value:
            raise ValueError(
                f"{name}={planned[name]} in plan() contradicts the constructor's {value}: "
                "give both the same, or construct another wrapper"
            )


def quick_variant(plan: Plan, options: RunKwargs) -> _core.ExecutionPlan | None:
    """Returns the variant of a run() without options, or with a window alone that an earlier run()
    had. None: other options are set, or unknown, or the window is new."""
    window_left = None
    for name, value in options.items():
        if name == "window_left" and type(value) is int:
            window_left = value
        elif value is not None or name not in _RUN_KWARGS:
            return None
    return plan.default_variant if window_left is None else plan.windows.get(window_left)


def run_options(wrapper: Any, first: tuple, options: RunKwargs) -> RunOptions:
    """The options of one run(). first: fields of RunOptions that are not in RunKwargs."""
    try:
        given = RunOptions(*first, **options)
    except TypeError:
        unknown = min(options.keys() - _RUN_KWARGS.keys())
        says = f"{type(wrapper).__name__}.run() got an unexpected keyword argument {unknown!r}"
        parameters = inspect.signature(wrapper.run).parameters
        raise TypeError(with_nearest(says, parameters)) from None
    if options:
        check_unserved(given)
    return given
