"""The operators torch.ops.preflash.*, which stand for calls of this package in graphs of torch.

Each has an implementation, which is the ordinary call, and a fake one, which knows shapes and
dtypes alone: of tensors, never of a plan, because a graph outlives plans. They are forward only,
and what they cannot serve they refuse when they run, in the words of the ordinary call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from .. import cascade, page, quantization
from .._check import dtypes, torch_modes, validate
from .._check.arguments import GivenScales, KvCache, PerHead, Result, RunOptions
from .._check.calls import ForwardArguments, SingleArguments
from .._check.outputs import Outputs
from .._wrappers import single
from .._wrappers.compile_ops import find_wrapper, lse_shape, out_shape

_library = torch.library.Library("preflash", "DEF")

# Strides are what an eager call would see; before torch 2.7 their order is.
_TAGS = (
    torch.Tag.pt2_compliant_tag,
    getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order),
)
# A later plan() replaces the work list of a launch. A CUDA graph that torch captures by itself
# would keep the old one, so torch keeps these operators out of its graphs.
_CUDAGRAPH_UNSAFE = getattr(torch.Tag, "cudagraph_unsafe", None)
_UNSAFE_TAGS = _TAGS if _CUDAGRAPH_UNSAFE is None else (*_TAGS, _CUDAGRAPH_UNSAFE)


def _define(
    schema: str,
    real: Callable,
    fake: Callable | None = None,
    tags: tuple[torch.Tag, ...] = _TAGS,
) -> None:
    """fake: None for an operator that returns nothing: it writes into its arguments."""
    name = schema.partition("(")[0]

    @torch_modes.eager
    def implementation(*args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        return result if fake else None

    def fake_implementation(*args: Any, **kwargs: Any) -> Any:
        torch_modes.not_differentiated(
            *(a for a in (*args, *kwargs.values()) if torch.is_tensor(a))
        )
        return fake(*args, **kwargs) if fake else None

    _library.define(schema, tags=tags)
    _library.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"preflash::{name}", fake_implementation, lib=_library)


def _cache(k: torch.Tensor, v: torch.Tensor | None) -> KvCache:
    """k alone is a cache that holds both."""
    return k if v is None else (k, v)


# Attention: each in three forms, because an operator returns always the same and either makes its
# results or writes into given ones.


def _define_attention(
    name: str, arguments: str, attend: Callable[..., Result], *, into: bool = True
) -> None:
    """attend(outputs, *arguments) is the call; its arguments are q, k and v, or a wrapper's name
    before them, and options. into: it also has the form that writes into given tensors."""

    # Dynamo demands that an argument called `out` is contiguous.
    def real(
        *args: Any,
        output: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        **options: Any,
    ) -> Result:
        return attend(Outputs(output, lse, return_lse, lse_base, lse_layout), *args, **options)

    of_lse = "str lse_base='log2', str lse_layout='NH'"
    both = functools.partial(real, return_lse=True)
    schema = f"{name}_return_lse({arguments}, {of_lse}) -> (Tensor, Tensor)"
    _define(f"{name}({arguments}) -> Tensor", real, _fake_out, _UNSAFE_TAGS)
    _define(schema, both, _fake_out_and_lse, _UNSAFE_TAGS)
    if into:
        written = "Tensor(a!) output, Tensor(b!)? lse=None"
        _define(f"{name}_into({arguments}, {written}, {of_lse}) -> ()", real, tags=_UNSAFE_TAGS)


def _fake_out(*args: Any, o_dtype: torch.dtype | None = None, **options: Any) -> torch.Tensor:
    q, k, v = args[-3:]
    o_dtype = validate.output_dtype("o_dtype", o_dtype, q.dtype)
    return q.new_empty(out_shape(q, k if v is None else v), dtype=o_dtype)


def _fake_out_and_lse(
    *args: Any, lse_layout: str = "NH", **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    q = args[-3]
    lse = q.new_empty(lse_shape(q, lse_layout), dtype=torch.float32)
    return _fake_out(*args, **options), lse


def _run(
    outputs: Outputs, name: str, q: torch.Tensor, *kv: torch.Tensor | None, **options: Any
) -> Result:
    wrapper, given = _found(name, q, **options)
    sm_scale = given.pop("sm_scale", None)
    skip_factor = given.pop("skip_factor", None)
    run_options = RunOptions(skip_softmax_threshold_scale_factor=skip_factor, **given)
    return wrapper._run_with(q, _cache(*kv), run_options, outputs, sm_scale)


def _forward(
    outputs: Outputs, name: str, q: torch.Tensor, *kv: torch.Tensor | None, **options: Any
) -> Result:
    wrapper, given = _found(name, q, **options)
    return wrapper._forward(q, _cache(*kv), ForwardArguments(**given), outputs)


def _single_prefill(
    outputs: Outputs, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any
) -> Result:
    _refuse_blind_capture(q)
    return single.prefill(SingleArguments(q, k, v, **outputs._asdict(), **_by_name(options)))


def _by_name(options: dict[str, Any]) -> dict[str, Any]:
    """An option is a float or a tensor of one element; an operator has an argument for either."""
    return {name.removesuffix("_tensor"): value for name, value in options.items()}


def _found(
    name: str, q: torch.Tensor, *, o_dtype: torch.dtype | None = None, **options: Any
) -> tuple[Any, dict[str, Any]]:
    """The wrapper of this name, if it plans for the dtype that the graph was made for, and the
    other options."""
    _refuse_blind_capture(q)
    wrapper = find_wrapper(name)
    if o_dtype is not None:
        planned = dtypes.TORCH_DTYPES[wrapper._current().request.options.o_dtype]
        if planned != o_dtype:
            raise ValueError(
                f"o_data_type={planned} in plan(); the compiled graph expects {o_dtype}, which "
                "was planned when it was made: plan that, or torch.compiler.reset()"
            )
    return wrapper, _by_name(options)


def _refuse_blind_capture(q: torch.Tensor) -> None:
    """An older torch cannot be told what to keep out of the CUDA graphs that it captures."""
    if _CUDAGRAPH_UNSAFE is None and q.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a compiled graph with attention in it is being captured into a CUDA graph, which a "
            "later plan() would not reach; compile without mode='reduce-overhead' and "
            "'max-autotune', or use a torch that has torch.Tag.cudagraph_unsafe"
        )


_ON_WRAPPER = "str wrapper, Tensor q, Tensor k, Tensor? v, *, ScalarType? o_dtype=None"
_OF_RUN = (*GivenScales._fields, "sm_scale", *PerHead._fields)
_RUN = ", ".join(
    (_ON_WRAPPER, "SymInt? window_left=None", "float skip_factor=0.0",
     *(SingleArguments.OPERATOR[name] for name in _OF_RUN))
)  # fmt: skip
_FORWARD = ", ".join((_ON_WRAPPER, *ForwardArguments.OPERATOR.values()))
_SINGLE = ", ".join(
    ("Tensor q, Tensor k, Tensor v, *, ScalarType? o_dtype=None",
     *SingleArguments.OPERATOR.values())
)  # fmt: skip
_define_attention("run", _RUN, _run)
_define_attention("forward", _FORWARD, _forward, into=False)
_define_attention("single", _SINGLE, _single_prefill)


# Merging.

_define(
    "merge_state(Tensor v_a, Tensor s_a, Tensor v_b, Tensor s_b) -> (Tensor, Tensor)",
    cascade.merge_state,
    lambda v, s, *_: (v.new_empty(v.shape), v.new_empty(s.shape, dtype=torch.float32)),
)
_define(
    "merge_state_in_place(Tensor(a!) v, Tensor(b!) s, Tensor v_other, Tensor s_other, "
    "Tensor? mask=None) -> ()",
    cascade.merge_state_in_place,
)
_define(
    "merge_states(Tensor v, Tensor s) -> (Tensor, Tensor)",
    cascade.merge_states,
    lambda v, s: (
        v.new_empty((v.shape[0], *v.shape[2:])),
        v.new_empty((v.shape[0], v.shape[2]), dtype=torch.float32),
    ),
)


# Masks. Both send an array from the host, which is not there when a CUDA graph is replayed.

_define(
    "packbits(Tensor x, str bitorder) -> Tensor",
    quantization.packbits,
    lambda x, bitorder: x.new_empty((x.numel() + 7) // 8, dtype=torch.uint8),
    _UNSAFE_TAGS,
)
_define(
    "segment_packbits(Tensor x, Tensor indptr, str bitorder) -> (Tensor, Tensor)",
    quantization.segment_packbits,
    lambda x, indptr, bitorder: (
        x.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.uint8),
        indptr.new_empty(indptr.shape, dtype=torch.int32),
    ),
    _UNSAFE_TAGS,
)


# Page tables.


def _append(*given: Any) -> None:
    *new, k_cache, v_cache = given[:6]
    page.append_paged_kv_cache(*new, _cache(k_cache, v_cache), *given[6:])


_define(
    "append_paged_kv_cache(Tensor append_key, Tensor append_value, Tensor batch_indices, "
    "Tensor positions, Tensor(a!) k_cache, Tensor(b!)? v_cache, Tensor kv_indices, "
    "Tensor kv_indptr, Tensor kv_last_page_len, str kv_layout) -> ()",
    _append,
)
_define(
    "get_batch_indices_positions(Tensor append_indptr, Tensor seq_lens, SymInt nnz, "
    "Tensor(a!) batch_indices, Tensor(b!) positions) -> ()",
    page.get_batch_indices_positions,
)
_define(
    "get_seq_lens(Tensor kv_indptr, Tensor kv_last_page_len, SymInt page_size) -> Tensor",
    page.get_seq_lens,
    lambda indptr, last, page_size: last.new_empty(last.shape, dtype=torch.int32),
)
