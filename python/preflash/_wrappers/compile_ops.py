"""Calls that torch records instead of making them: torch.compile, make_fx, torch.export and
FakeTensorMode.

The public functions come here when `torch_modes.traced()`. Recorded is one operator of _torch_ops
for each call, with the arguments of the call. A planned wrapper is named by a string, a constant of
the graph; what it has planned is looked up when the operator runs, so that a graph sees every
plan() and depends on none.
"""

from __future__ import annotations

import itertools
import os
import weakref
from typing import Any

import torch

from .._check import dtypes, torch_modes, validate
from .._check.arguments import KvCache, PerHead, Result, RunOptions, Scale, scales_of
from .._check.calls import CHECKED_ALONE, ForwardArguments, SingleArguments
from .._check.options import check_neutral, options_of
from .._check.outputs import Outputs, outputs_of

_wrappers: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_ordinals = itertools.count()
_PROCESS = os.urandom(8).hex()
_is_exporting = getattr(torch.compiler, "is_exporting", lambda: False)  # torch 2.7 and later


def name_wrapper(wrapper: Any) -> str:
    """A name for a new wrapper, which nothing else gets as long as the process lives."""
    name = str(next(_ordinals))
    _wrappers[name] = wrapper
    return name


def find_wrapper(recorded: str) -> Any:
    """The wrapper that a graph calls by this name."""
    name, _, process = recorded.partition("@")
    wrapper = _wrappers.get(name) if process in ("", _PROCESS) else None
    if wrapper is None:
        raise ValueError(
            f"wrapper={recorded!r}: the wrapper that was recorded in this graph is gone, or lives "
            "in another process; keep it as long as the graph, and trace again where it lives"
        )
    return wrapper


def _recorded_name(name: str) -> str:
    """A graph of torch.compile is guarded by the wrapper's name, which is the same in the next
    process, for torch's caches on disk. Graphs that may travel without guards name their
    process."""
    if torch_modes.is_dynamo_compiling() and not _is_exporting():
        return name
    return f"{name}@{_PROCESS}"


def planned_o_dtype(name: str) -> torch.dtype:
    """Asked while tracing; dynamo takes the answer for a constant, and the operator checks it."""
    return dtypes.TORCH_DTYPES[find_wrapper(name)._current().request.options.o_dtype]


planned_o_dtype._dynamo_marked_constant = True  # torch.compiler.assume_constant_result


def run(
    name: str, q: torch.Tensor, kv: KvCache, a: RunOptions, outputs: Outputs, sm_scale: Scale
) -> Result:
    """run() of the wrapper of this name."""
    per_head = {field: getattr(a, field) for field in PerHead._fields}
    options = _by_type(**scales_of(a)._asdict(), sm_scale=sm_scale, **per_head)
    if a.window_left is not None:
        options["window_left"] = a.window_left
    skip_factor = validate.skip_factor(a.skip_softmax_threshold_scale_factor)
    if skip_factor > 0.0:
        options["skip_factor"] = skip_factor
    o_dtype = None
    if q.dtype not in dtypes.WIDE_DTYPES and outputs.out is None:
        options["o_dtype"] = o_dtype = planned_o_dtype(name)
    arguments = (_recorded_name(name), q, *pools_of(kv))
    return _recorded("run", arguments, o_dtype, outputs, options)


def forward(
    name: str, q: torch.Tensor, kv: KvCache, a: ForwardArguments, outputs: Outputs
) -> Result:
    """The deprecated forward() and forward_return_lse()."""
    options = _options(a)
    if q.dtype not in dtypes.WIDE_DTYPES:
        options["o_dtype"] = planned_o_dtype(name)
    operators = torch.ops.preflash
    operator = operators.forward_return_lse if outputs.return_lse else operators.forward
    return operator(_recorded_name(name), q, *pools_of(kv), **options)


def single(a: SingleArguments) -> Result:
    """single_prefill_with_kv_cache()."""
    check_neutral(options_of(a))
    validate.custom_mask("custom_mask", a.custom_mask)
    outputs = outputs_of(a)
    options = _options(a)
    o_dtype = validate.alias("o_data_type", a.o_data_type, "o_dtype", a.o_dtype)
    options["o_dtype"] = o_dtype = None if o_dtype is None else validate.dtype("o_dtype", o_dtype)
    if outputs.out is not None or outputs.lse is not None:
        o_dtype = validate.output_dtype("o_dtype", o_dtype, a.q.dtype)
    return _recorded("single", (a.q, a.k, a.v), o_dtype, outputs, options)


def _recorded(
    operator: str,
    arguments: tuple[Any, ...],
    o_dtype: torch.dtype | None,
    outputs: Outputs,
    options: dict[str, Any],
) -> Result:
    """Calls the operator, in the form for these outputs. The last arguments are q, k and v, or q, a
    cache with both and None."""
    operators = torch.ops.preflash
    out, lse, return_lse, lse_base, lse_layout = outputs
    of_lse = {"lse_base": lse_base, "lse_layout": lse_layout}
    if out is None and lse is None:
        if not return_lse:
            return getattr(operators, operator)(*arguments, **options)
        return getattr(operators, f"{operator}_return_lse")(*arguments, **options, **of_lse)
    *_, q, k, v = arguments
    if out is None:
        out = q.new_empty(out_shape(q, k if v is None else v), dtype=o_dtype or q.dtype)
    if lse is None and return_lse:
        lse = q.new_empty(lse_shape(q, lse_layout), dtype=torch.float32)
    into = getattr(operators, f"{operator}_into")
    into(*arguments, output=out, lse=lse, **options, **of_lse)
    return (out, lse) if return_lse else out


def pools_of(kv: KvCache) -> tuple[torch.Tensor, torch.Tensor | None]:
    """k and v, or one cache that holds both."""
    return (kv, None) if isinstance(kv, torch.Tensor) else kv


def out_shape(q: torch.Tensor, v: torch.Tensor) -> tuple[int, int, int]:
    """[rows of q, num_qo_heads, head_dim_vo]; v, or a cache with it, has head_dim_vo last."""
    if q.dim() != 3:
        raise ValueError(f"q has shape {tuple(q.shape)}; must be [tokens, num_qo_heads, head_dim]")
    return (q.shape[0], q.shape[1], v.shape[-1])


def lse_shape(q: torch.Tensor, lse_layout: str) -> tuple[int, int]:
    tokens, heads = q.shape[0], q.shape[1]
    return (tokens, heads) if lse_layout == "NH" else (heads, tokens)


def _options(a: ForwardArguments | SingleArguments) -> dict[str, Any]:
    """Returns the options in the form that the call's operator takes."""
    for name, check_alone, field, _ in CHECKED_ALONE:
        if not field and name in a.OPTIONS:
            check_alone(name, getattr(a, name))
    given = {name: getattr(a, name) for name in a.OPERATOR}
    return {**_by_type(**given), "causal": validate.flag("causal", a.causal)}


def _by_type(**options: Any) -> dict[str, Any]:
    """Drops None and picks the operator's argument by type: a factor is a float or a tensor of one
    element, and the operator has an argument for either."""
    schema = SingleArguments.OPERATOR
    return {
        f"{name}_tensor"
        if isinstance(value, torch.Tensor) and f"{name}_tensor" in schema[name]
        else name: value
        for name, value in options.items()
        if value is not None
    }
