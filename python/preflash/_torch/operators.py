"""The operators torch.ops.preflash.*, which stand for calls of this package in graphs of torch.

Each has an implementation, which is the ordinary call, and a fake one, which knows shapes and
dtypes alone: of tensors, never of a plan, because a graph outlives plans. They are forward only,
and what they cannot serve they refuse when they run, in the words of the ordinary call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import cascade, page, quantization
from .._check import values as check
from .._check.arguments import (
    ForwardArguments,
    GivenScales,
    PerHead,
    Qkv,
    Result,
    RunArguments,
    SingleArguments,
    SingleCall,
)
from .._check.outputs import Outputs
from .._wrap import single
from .._wrap.traced import find_wrapper, lse_shape, out_shape

_library = torch.library.Library("preflash", "DEF")

# Strides are what an eager call would see; before torch 2.7 their order is.
_TAGS = (
    torch.Tag.pt2_compliant_tag,
    getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order),
)
# A launch names the work list of a plan, which a later plan() replaces: a CUDA graph that torch
# captures by itself would go on with the old one, so that torch keeps these out of its graphs.
_CUDAGRAPH_UNSAFE = getattr(torch.Tag, "cudagraph_unsafe", None)
_UNSAFE_TAGS = _TAGS if _CUDAGRAPH_UNSAFE is None else (*_TAGS, _CUDAGRAPH_UNSAFE)


def _define(
    schema: str, real: Callable, fake: Callable, tags: tuple[torch.Tag, ...] = _TAGS
) -> None:
    name = schema.partition("(")[0]

    @check.eager
    def implementation(*args: Any, **kwargs: Any) -> Any:
        return real(*args, **kwargs)

    def fake_implementation(*args: Any, **kwargs: Any) -> Any:
        check.not_differentiated(*(a for a in (*args, *kwargs.values()) if torch.is_tensor(a)))
        return fake(*args, **kwargs)

    _library.define(schema, tags=tags)
    _library.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"preflash::{name}", fake_implementation, lib=_library)


# Attention: each in three forms, because an operator returns always the same and either makes its
# results or writes into given ones.

_SCALES = ", ".join(
    f"float? {name}=None, Tensor? {name}_tensor=None"
    for name in ("q_scale", "k_scale", "v_scale", "sm_scale")
)
_PER_HEAD = ", ".join(f"Tensor? {name}=None" for name in PerHead._fields)
_LSE = "str lse_base='log2', str lse_layout='NH'"
_ENCODING = "float? logits_soft_cap=None, float? rope_scale=None, float? rope_theta=None"


def _define_attention(name: str, arguments: str, attend: Callable[..., Result]) -> None:
    """The two forms that make their results. attend(outputs, *arguments) is the call; its arguments
    are q, k and v, or a wrapper's name before them, and options."""

    def run(*args: Any, **options: Any) -> torch.Tensor:
        return attend(Outputs(), *args, **options)

    def run_return_lse(
        *args: Any, lse_base: str = "log2", lse_layout: str = "NH", **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return attend(Outputs(None, None, True, lse_base, lse_layout), *args, **options)

    _define(f"{name}({arguments}) -> Tensor", run, _fake_out, _UNSAFE_TAGS)
    _define(
        f"{name}_return_lse({arguments}, {_LSE}) -> (Tensor, Tensor)",
        run_return_lse,
        _fake_out_and_lse,
        _UNSAFE_TAGS,
    )


def _define_attention_into(name: str, arguments: str, attend: Callable[..., Result]) -> None:
    """The form that writes into given tensors. NOTE: of an argument called `out`, dynamo demands
    that it is contiguous."""

    def run_into(
        *args: Any,
        output: torch.Tensor,
        lse: torch.Tensor | None = None,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        **options: Any,
    ) -> None:
        attend(Outputs(output, lse, False, lse_base, lse_layout), *args, **options)

    schema = f"{name}_into({arguments}, Tensor(a!) output, Tensor(b!)? lse=None, {_LSE}) -> ()"
    _define(schema, run_into, _fake_nothing, _UNSAFE_TAGS)


def _fake_out(*args: Any, o_dtype: torch.dtype | None = None, **options: Any) -> torch.Tensor:
    q, k, v = args[-3:]
    o_dtype = check.output_dtype("o_dtype", o_dtype, q.dtype)
    return q.new_empty(out_shape(q, k if v is None else v), dtype=o_dtype)


def _fake_out_and_lse(
    *args: Any, lse_layout: str = "NH", **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    q = args[-3]
    lse = q.new_empty(lse_shape(q, lse_layout), dtype=torch.float32)
    return _fake_out(*args, **options), lse


def _fake_nothing(*args: Any, **options: Any) -> None:
    """Of an operator that writes into its arguments."""


def _run(
    outputs: Outputs,
    name: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    *,
    o_dtype: torch.dtype | None = None,
    window_left: int | None = None,
    **options: Any,
) -> Result:
    wrapper = _found(name, q, o_dtype)
    arguments = RunArguments(
        _given_scales(options), window_left, _per_head(options), _scale("sm_scale", options)
    )
    return wrapper._run_with(q, k if v is None else (k, v), arguments, outputs)


def _forward(
    outputs: Outputs,
    name: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    *,
    causal: bool,
    pos_encoding_mode: str,
    window_left: int,
    o_dtype: torch.dtype | None = None,
    logits_soft_cap: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    **options: Any,
) -> Result:
    wrapper = _found(name, q, o_dtype)
    arguments = ForwardArguments(
        causal=causal,
        pos_encoding_mode=pos_encoding_mode,
        allow_fp16_qk_reduction=None,
        use_fp16_qk_reduction=False,
        window_left=window_left,
        logits_soft_cap=logits_soft_cap,
        sm_scale=_scale("sm_scale", options),
        rope_scale=rope_scale,
        rope_theta=rope_theta,
        scales=_given_scales(options),
    )
    return wrapper._forward(q, k if v is None else (k, v), arguments, outputs)


def _single_prefill(
    outputs: Outputs,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    custom_mask: torch.Tensor | None = None,
    packed_custom_mask: torch.Tensor | None = None,
    **options: Any,
) -> Result:
    _refuse_blind_capture(q)
    call = SingleCall(
        custom_mask,
        packed_custom_mask,
        _scale("sm_scale", options),
        _given_scales(options),
        _per_head(options),
    )
    arguments = SingleArguments(
        allow_fp16_qk_reduction=False,
        use_fp16_qk_reduction=None,
        masked=custom_mask is not None or packed_custom_mask is not None,
        **{**_SINGLE_DEFAULTS, **options},
    )
    return single.prefill(Qkv(q, k, v), arguments, call, outputs)


# An operator does not hand on what is equal to its schema's default.
_SINGLE_DEFAULTS = {
    "logits_soft_cap": None,
    "rope_scale": None,
    "rope_theta": None,
    "o_dtype": None,
}


def _scale(name: str, options: dict[str, Any]) -> float | torch.Tensor | None:
    value, tensor = options.pop(name, None), options.pop(f"{name}_tensor", None)
    return value if tensor is None else tensor


def _given_scales(options: dict[str, Any]) -> GivenScales:
    return GivenScales(*(_scale(name, options) for name in GivenScales._fields))


def _per_head(options: dict[str, Any]) -> PerHead:
    return PerHead(*(options.pop(name, None) for name in PerHead._fields))


def _found(name: str, q: torch.Tensor, o_dtype: torch.dtype | None) -> Any:
    """The wrapper of this name, if it plans for the dtype that the graph was made for."""
    _refuse_blind_capture(q)
    wrapper = find_wrapper(name)
    if o_dtype is not None:
        planned = check.TORCH_DTYPES[wrapper._planned().asked.request.options.o_dtype]
        if planned != o_dtype:
            raise ValueError(
                f"o_data_type={planned} in plan(); the compiled graph expects {o_dtype}, which "
                "was planned when it was made: plan that, or torch.compiler.reset()"
            )
    return wrapper


def _refuse_blind_capture(q: torch.Tensor) -> None:
    """An older torch cannot be told what to keep out of the CUDA graphs that it captures."""
    if _CUDAGRAPH_UNSAFE is None and q.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a compiled graph with attention in it is being captured into a CUDA graph, which a "
            "later plan() would not reach; compile without mode='reduce-overhead' and "
            "'max-autotune', or use a torch that has torch.Tag.cudagraph_unsafe"
        )


_QKV = "Tensor q, Tensor k, Tensor? v"
_RUN = (
    f"str wrapper, {_QKV}, *, ScalarType? o_dtype=None, SymInt? window_left=None, "
    f"{_SCALES}, {_PER_HEAD}"
)
_FORWARD = (
    f"str wrapper, {_QKV}, *, bool causal, str pos_encoding_mode, SymInt window_left, "
    f"ScalarType? o_dtype=None, {_ENCODING}, {_SCALES}"
)
_SINGLE = (
    "Tensor q, Tensor k, Tensor v, *, bool causal, str kv_layout, str pos_encoding_mode, "
    "SymInt window_left, str backend, Tensor? custom_mask=None, Tensor? packed_custom_mask=None, "
    f"ScalarType? o_dtype=None, {_ENCODING}, {_SCALES}, {_PER_HEAD}"
)
_define_attention("run", _RUN, _run)
_define_attention_into("run", _RUN, _run)
_define_attention("forward", _FORWARD, _forward)
_define_attention("single", _SINGLE, _single_prefill)
_define_attention_into("single", _SINGLE, _single_prefill)


# Merging.


def _fake_merge_state(
    v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return v_a.new_empty(v_a.shape), v_a.new_empty(s_a.shape, dtype=torch.float32)


def _fake_merge_states(v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, _, heads, head_dim = v.shape
    merged = v.new_empty((tokens, heads, head_dim))
    return merged, v.new_empty((tokens, heads), dtype=torch.float32)


_define(
    "merge_state(Tensor v_a, Tensor s_a, Tensor v_b, Tensor s_b) -> (Tensor, Tensor)",
    cascade.merge_state,
    _fake_merge_state,
)
_define(
    "merge_state_in_place(Tensor(a!) v, Tensor(b!) s, Tensor v_other, Tensor s_other, "
    "Tensor? mask=None) -> ()",
    cascade.merge_state_in_place,
    _fake_nothing,
)
_define(
    "merge_states(Tensor v, Tensor s) -> (Tensor, Tensor)",
    cascade.merge_states,
    _fake_merge_states,
)


# Masks. Both send an array from the host, which is not there when a CUDA graph is replayed.


def _fake_packbits(x: torch.Tensor, bitorder: str) -> torch.Tensor:
    return x.new_empty((x.numel() + 7) // 8, dtype=torch.uint8)


def _fake_segment_packbits(
    x: torch.Tensor, indptr: torch.Tensor, bitorder: str
) -> tuple[torch.Tensor, torch.Tensor]:
    packed = x.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.uint8)
    return packed, indptr.new_empty(indptr.shape, dtype=torch.int32)


_define(
    "packbits(Tensor x, str bitorder) -> Tensor",
    quantization.packbits,
    _fake_packbits,
    _UNSAFE_TAGS,
)
_define(
    "segment_packbits(Tensor x, Tensor indptr, str bitorder) -> (Tensor, Tensor)",
    quantization.segment_packbits,
    _fake_segment_packbits,
    _UNSAFE_TAGS,
)


# Page tables.


def _append(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor | None,
    *page_table: Any,
) -> None:
    cache = k_cache if v_cache is None else (k_cache, v_cache)
    page.append_paged_kv_cache(
        append_key, append_value, batch_indices, positions, cache, *page_table
    )


def _indices_into(
    append_indptr: torch.Tensor,
    seq_lens: torch.Tensor,
    nnz: int,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    page.get_batch_indices_positions(append_indptr, seq_lens, nnz, batch_indices, positions)


def _fake_seq_lens(
    kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor, page_size: int
) -> torch.Tensor:
    return kv_last_page_len.new_empty(kv_last_page_len.shape, dtype=torch.int32)


_define(
    "append_paged_kv_cache(Tensor append_key, Tensor append_value, Tensor batch_indices, "
    "Tensor positions, Tensor(a!) k_cache, Tensor(b!)? v_cache, Tensor kv_indices, "
    "Tensor kv_indptr, Tensor kv_last_page_len, str kv_layout) -> ()",
    _append,
    _fake_nothing,
)
_define(
    "get_batch_indices_positions(Tensor append_indptr, Tensor seq_lens, SymInt nnz, "
    "Tensor(a!) batch_indices, Tensor(b!) positions) -> ()",
    _indices_into,
    _fake_nothing,
)
_define(
    "get_seq_lens(Tensor kv_indptr, Tensor kv_last_page_len, SymInt page_size) -> Tensor",
    page.get_seq_lens,
    _fake_seq_lens,
)
