"""jit_args of FlashInfer's variant with attention sinks: what they say, and the run() that goes
with them. Nothing is compiled; sinks are an option of every kernel."""

from __future__ import annotations

import types
from typing import Any

import torch

from .._check import validate
from .._check.arguments import KvCache, Result, RunOptions, Scale
from .._check.names import with_nearest
from .._check.options import check_unserved
from .._check.outputs import Outputs

# Names and types of the variant's tensors and scalars, in the order of jit_args.
_TAKES = [["sink"], ["float"], ["sm_scale"], ["double"]]
_KWARGS = ("use_sliding_window", "use_fp16_qk_reduction", "use_logits_soft_cap")
_OUTPUTS = Outputs()._asdict()


def options_of(jit_args: Any, jit_kwargs: Any) -> dict[str, Any] | None:
    """Returns the options that jit_args fix and plan() must not contradict; None without jit_args.

    jit_args: (uri, dtypes of q, k and v, output and indices, two head_dims, names and types of
    tensors, names and types of scalars, the variant's name, its source). The source is not read.

    Raises NotImplementedError for every variant but "AttentionSink".
    """
    if jit_args is None:
        validate.neutral("jit_kwargs", jit_kwargs)
        return None
    given = list(jit_args) if isinstance(jit_args, (tuple, list)) else []
    served = len(given) == 13 and given[11] == "AttentionSink" and given[4] == torch.int32
    if not served or [list(n) for n in given[7:11] if isinstance(n, (list, tuple))] != _TAKES:
        raise NotImplementedError(
            "jit_args: this build compiles nothing at run time and serves one variant, "
            "'AttentionSink' with a tensor 'sink' (float) and a scalar 'sm_scale' (double) over "
            "int32 indices; leave it None"
        )
    kwargs = dict(jit_kwargs or {})
    mode = validate.size(
        "jit_kwargs['pos_encoding_mode']", kwargs.pop("pos_encoding_mode", 0), "pos_encoding_mode"
    )
    for name in _KWARGS:
        validate.permission(f"jit_kwargs[{name!r}]", kwargs.pop(name, None))
    if kwargs:
        raise NotImplementedError(
            f"jit_kwargs[{min(kwargs)!r}] is not served by this build; it takes "
            f"{', '.join(_KWARGS)} and pos_encoding_mode"
        )
    return {
        "pos_encoding_mode": validate.ENCODING_MODES[mode],
        "q_data_type": validate.dtype("jit_args[1]", given[1]),
        "kv_data_type": validate.dtype("jit_args[2]", given[2]),
        "o_data_type": validate.dtype("jit_args[3]", given[3]),
        "head_dim_qk": validate.size("jit_args[5]", given[5], "head_dim_qk"),
        "head_dim_vo": validate.size("jit_args[6]", given[6], "head_dim_vo"),
    }


def give_run(wrapper: Any, *, paged: bool) -> None:
    """Gives the wrapper a run() with sink and sm_scale by position after the tensors."""
    wrapper.run = types.MethodType(_run_paged if paged else _run_ragged, wrapper)


def _run_paged(
    self: Any,
    q: torch.Tensor,
    paged_kv_cache: KvCache,
    sink: torch.Tensor | None = None,
    sm_scale: Scale = None,
    *args: None,
    **options: Any,
) -> Result:
    """run() of a wrapper with jit_args of "AttentionSink".

    Args:
        sink: [num_qo_heads] float32, as sinks in single_prefill_with_kv_cache.
        sm_scale: factor of the logits instead of plan()'s; None is plan()'s.
        The others are those of the wrapper's run(), by name.
    """
    validate.one_cache((sink,))
    return _run(self, q, paged_kv_cache, sink, sm_scale, args, options)


def _run_ragged(
    self: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor | None = None,
    sm_scale: Scale = None,
    *args: None,
    **options: Any,
) -> Result:
    return _run(self, q, (k, v), sink, sm_scale, args, options)


_run_ragged.__doc__ = _run_paged.__doc__


def _run(
    wrapper: Any,
    q: torch.Tensor,
    kv: KvCache,
    sink: torch.Tensor | None,
    sm_scale: Scale,
    args: tuple,
    options: dict[str, Any],
) -> Result:
    validate.nothing_more("run", args)
    names = RunOptions._fields[1:]
    given = RunOptions(**{name: options.pop(name) for name in names if name in options})
    check_unserved(given)
    sink = validate.alias("sink", sink, "sinks", given.sinks)
    if sink is None:
        raise TypeError(
            "run() missing sink: the wrapper was constructed with jit_args of 'AttentionSink'"
        )
    outputs = Outputs(*(options.pop(name, default) for name, default in _OUTPUTS.items()))
    if options:
        says = f"run() got an unexpected keyword argument {min(options)!r}"
        raise TypeError(with_nearest(says, (*names, *_OUTPUTS)))
    return wrapper._run_given(q, kv, given._replace(sinks=sink), outputs, sm_scale)
