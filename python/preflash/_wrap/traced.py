"""Calls that torch records instead of making them: torch.compile, make_fx, torch.export and
FakeTensorMode.

The public functions come here when `check.traced()`. What is recorded is one operator of _torch_ops
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

from .._check import values as check
from .._check.arguments import (
    ForwardArguments,
    KvCache,
    PerHead,
    Qkv,
    Result,
    RunArguments,
    SingleArguments,
    SingleCall,
)
from .._check.outputs import Outputs

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
    """A graph of torch.compile is guarded by the name, which is the same in the next process, for
    torch's caches on disk. Graphs that may travel without guards tell their process."""
    if check.is_dynamo_compiling() and not _is_exporting():
        return name
    return f"{name}@{_PROCESS}"


def planned_o_dtype(name: str) -> torch.dtype:
    """Asked while tracing; dynamo takes the answer for a constant, and the operator checks it."""
    return check.TORCH_DTYPES[find_wrapper(name)._planned().asked.request.options.o_dtype]


planned_o_dtype._dynamo_marked_constant = True  # torch.compiler.assume_constant_result


def run(name: str, q: torch.Tensor, kv: KvCache, a: RunArguments, outputs: Outputs) -> Result:
    """run() of the wrapper of this name."""
    options: dict[str, Any] = {
        **_scale_options(**a.scales._asdict(), sm_scale=a.sm_scale),
        **_per_head_options(a.per_head),
    }
    if a.window_left is not None:
        options["window_left"] = a.window_left
    k, v = (kv, None) if isinstance(kv, torch.Tensor) else kv
    o_dtype = None
    if q.dtype not in check.WIDE_DTYPES and outputs.out is None:
        options["o_dtype"] = o_dtype = planned_o_dtype(name)
    arguments = (_recorded_name(name), q, k, v)
    if outputs.out is None and outputs.lse is None:
        if not outputs.return_lse:
            return torch.ops.preflash.run(*arguments, **options)
        return torch.ops.preflash.run_return_lse(*arguments, **options, **_lse_options(outputs))
    outputs = _allocated(q, k if v is None else v, o_dtype, outputs)
    torch.ops.preflash.run_into(
        *arguments, output=outputs.out, lse=outputs.lse, **options, **_lse_options(outputs)
    )
    return _returned(outputs)


def forward(
    name: str, q: torch.Tensor, kv: KvCache, a: ForwardArguments, outputs: Outputs
) -> Result:
    """The deprecated forward() and forward_return_lse()."""
    check.permission("use_fp16_qk_reduction", a.use_fp16_qk_reduction)
    check.permission("allow_fp16_qk_reduction", a.allow_fp16_qk_reduction)
    options: dict[str, Any] = {
        "causal": check.flag("causal", a.causal),
        "pos_encoding_mode": a.pos_encoding_mode,
        "window_left": a.window_left,
        "logits_soft_cap": a.logits_soft_cap,
        "rope_scale": a.rope_scale,
        "rope_theta": a.rope_theta,
        **_scale_options(**a.scales._asdict(), sm_scale=a.sm_scale),
    }
    if q.dtype not in check.WIDE_DTYPES:
        options["o_dtype"] = planned_o_dtype(name)
    k, v = (kv, None) if isinstance(kv, torch.Tensor) else kv
    operators = torch.ops.preflash
    operator = operators.forward_return_lse if outputs.return_lse else operators.forward
    return operator(_recorded_name(name), q, k, v, **options)


def single(tensors: Qkv, a: SingleArguments, call: SingleCall, outputs: Outputs) -> Result:
    """single_prefill_with_kv_cache()."""
    q, _, v = tensors
    check.permission("allow_fp16_qk_reduction", a.allow_fp16_qk_reduction)
    check.permission("use_fp16_qk_reduction", a.use_fp16_qk_reduction)
    options: dict[str, Any] = {
        "causal": check.flag("causal", a.causal),
        "kv_layout": a.kv_layout,
        "pos_encoding_mode": a.pos_encoding_mode,
        "window_left": a.window_left,
        "logits_soft_cap": a.logits_soft_cap,
        "rope_scale": a.rope_scale,
        "rope_theta": a.rope_theta,
        "backend": a.backend,
        "custom_mask": call.custom_mask,
        "packed_custom_mask": call.packed_custom_mask,
        **_scale_options(**call.scales._asdict(), sm_scale=call.sm_scale),
        **_per_head_options(call.per_head),
    }
    o_dtype = None if a.o_dtype is None else check.dtype("o_dtype", a.o_dtype)
    options["o_dtype"] = o_dtype
    if outputs.out is None and outputs.lse is None:
        if not outputs.return_lse:
            return torch.ops.preflash.single(*tensors, **options)
        return torch.ops.preflash.single_return_lse(*tensors, **options, **_lse_options(outputs))
    outputs = _allocated(q, v, check.output_dtype("o_dtype", o_dtype, q.dtype), outputs)
    torch.ops.preflash.single_into(
        *tensors, output=outputs.out, lse=outputs.lse, **options, **_lse_options(outputs)
    )
    return _returned(outputs)


def out_shape(q: torch.Tensor, v: torch.Tensor) -> tuple[int, int, int]:
    """[rows of q, num_qo_heads, head_dim_vo]; v, or a cache with it, has head_dim_vo last."""
    if q.dim() != 3:
        raise ValueError(f"q has shape {tuple(q.shape)}; must be [tokens, num_qo_heads, head_dim]")
    return (q.shape[0], q.shape[1], v.shape[-1])


def lse_shape(q: torch.Tensor, lse_layout: str) -> tuple[int, int]:
    tokens, heads = q.shape[0], q.shape[1]
    return (tokens, heads) if lse_layout == "NH" else (heads, tokens)


def _allocated(
    q: torch.Tensor, v: torch.Tensor, o_dtype: torch.dtype | None, outputs: Outputs
) -> Outputs:
    """The outputs with a tensor for each that is wanted and not given."""
    out, lse, return_lse, _, lse_layout = outputs
    if out is None:
        out = q.new_empty(out_shape(q, v), dtype=q.dtype if o_dtype is None else o_dtype)
    if lse is None and return_lse:
        lse = q.new_empty(lse_shape(q, lse_layout), dtype=torch.float32)
    return outputs._replace(out=out, lse=lse)


def _returned(outputs: Outputs) -> Result:
    return (outputs.out, outputs.lse) if outputs.return_lse else outputs.out


def _scale_options(**scales: Any) -> dict[str, Any]:
    """A factor is a float or a tensor of one element; an operator has an argument for either."""
    floats, tensors = {}, {}
    for name, value in scales.items():
        if isinstance(value, torch.Tensor):
            tensors[f"{name}_tensor"] = value
        elif value is not None:
            floats[name] = value
    return {**floats, **tensors}


def _per_head_options(per_head: PerHead) -> dict[str, torch.Tensor]:
    return {name: value for name, value in per_head._asdict().items() if value is not None}


def _lse_options(outputs: Outputs) -> dict[str, str]:
    return {"lse_base": outputs.lse_base, "lse_layout": outputs.lse_layout}
