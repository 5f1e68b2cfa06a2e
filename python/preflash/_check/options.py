"""The first half of the check: from the arguments of a call to its AttentionOptions, which decide
a variant and a work list."""

from __future__ import annotations

import functools
import operator
from typing import Any, NamedTuple

import torch

from .. import _core
from . import values as check
from .arguments import PlanArguments, Qkv, RaggedPlanArguments, SingleArguments, UnservedRunOptions


def batch_options(a: PlanArguments) -> _core.AttentionOptions:
    """The options in the arguments of a wrapper's plan()."""
    check.not_traced()
    if (
        a.prefix_len_ptr is not None
        or a.token_pos_in_items_ptr is not None
        or type(a.token_pos_in_items_len) is not int
        or a.token_pos_in_items_len != 0
        or a.max_item_len_ptr is not None
    ):
        check.absent(
            prefix_len_ptr=a.prefix_len_ptr,
            token_pos_in_items_ptr=a.token_pos_in_items_ptr,
            max_item_len_ptr=a.max_item_len_ptr,
        )
        check.neutral("token_pos_in_items_len", a.token_pos_in_items_len, 0)
    if isinstance(a, RaggedPlanArguments):
        check.absent(v_indptr=a.v_indptr, o_indptr=a.o_indptr)
    masked = a.custom_mask is not None or a.packed_custom_mask is not None
    try:
        return _remembered(
            a.num_qo_heads, a.num_kv_heads, a.head_dim, a.head_dim_qk, a.head_dim_vo,
            a.q_data_type, a.kv_data_type, a.o_data_type, a.o_dtype, masked,
            a.causal, a.window_left, a.pos_encoding_mode, a.rope_scale, a.rope_theta,
            a.logits_soft_cap, a.fixed_split_size, a.disable_split_kv,
            a.allow_fp16_qk_reduction, a.use_fp16_qk_reduction, a.non_blocking,
        )  # fmt: skip
    except TypeError:  # not to be remembered, or wrong: the checks say so
        return _checked(_Given(masked=masked, **{name: getattr(a, name) for name in _ARGUMENTS}))


class _Given(NamedTuple):
    """What of a plan's arguments decides its options, as the caller gave it."""

    num_qo_heads: Any
    num_kv_heads: Any
    head_dim: Any
    head_dim_qk: Any
    head_dim_vo: Any
    q_data_type: Any
    kv_data_type: Any
    o_data_type: Any
    o_dtype: Any
    masked: bool
    causal: Any
    window_left: Any
    pos_encoding_mode: Any
    rope_scale: Any
    rope_theta: Any
    logits_soft_cap: Any
    fixed_split_size: Any
    disable_split_kv: Any
    allow_fp16_qk_reduction: Any
    use_fp16_qk_reduction: Any
    non_blocking: Any


_ARGUMENTS = tuple(name for name in _Given._fields if name != "masked")
_CONSTANT = (int, float, bool, str, type(None), torch.dtype)


# Steps differ in their lengths, not in these: checking them again would be a tenth of plan(). By
# type as well as by value, because 1, 1.0 and True are equal and not all of them accepted.
@functools.lru_cache(maxsize=256, typed=True)
def _remembered(*given: Any) -> _core.AttentionOptions:
    if not all(type(value) in _CONSTANT for value in given):
        raise TypeError("what is equal by identity, as tensors are, may hold another value by then")
    return _checked(_Given(*given))


def _checked(a: _Given) -> _core.AttentionOptions:
    encoding = check.position_encoding(a.pos_encoding_mode, a.rope_scale, a.rope_theta)
    check.permission("allow_fp16_qk_reduction", a.allow_fp16_qk_reduction)
    check.permission("use_fp16_qk_reduction", a.use_fp16_qk_reduction)
    # Both values get what False promises: the caller's arrays may change, and nobody waits.
    check.flag("non_blocking", a.non_blocking)
    head_dim = check.alias("head_dim", a.head_dim, "head_dim_qk", a.head_dim_qk)
    head_dim = check.integer("head_dim", check.required("head_dim", head_dim), at_least=1)
    head_dim_vo = head_dim if a.head_dim_vo is None else a.head_dim_vo
    dtypes = _data_types(
        _Asked("q_data_type", a.q_data_type),
        _Asked("kv_data_type", a.kv_data_type),
        a.o_data_type,
        a.o_dtype,
    )
    split = a.fixed_split_size
    return _core.AttentionOptions(
        num_qo_heads=check.integer("num_qo_heads", a.num_qo_heads, at_least=1),
        num_kv_heads=check.integer("num_kv_heads", a.num_kv_heads, at_least=1),
        head_dim_qk=head_dim,
        head_dim_vo=check.integer("head_dim_vo", head_dim_vo, at_least=1),
        q_dtype=dtypes.q,
        kv_dtype=dtypes.kv,
        o_dtype=dtypes.o,
        # causal is ignored when a custom mask is given; a window is not.
        causal=check.flag("causal", a.causal) and not a.masked,
        window_left=check.window_left(a.window_left),
        mask=_mask_kind(a.masked),
        position=encoding.position,
        rope_scale=encoding.rope_scale,
        rope_theta=encoding.rope_theta,
        soft_cap=check.soft_cap(a.logits_soft_cap),
        # -1, 0 and None all mean that the planner chooses.
        fixed_split_size=0
        if split is None
        else max(check.integer("fixed_split_size", split, at_least=-1), 0),
        disable_split=check.flag("disable_split_kv", a.disable_split_kv),
    )


def single_options(tensors: Qkv, a: SingleArguments) -> _core.AttentionOptions:
    """The options in the arguments of a single request. Of its tensors only what decides the
    variant is looked at: binding checks the rest."""
    q, k, v = tensors
    for name, value in (("q", q), ("k", k), ("v", v)):
        if value.dim() != 3:
            raise ValueError(
                f"{name} has shape {tuple(value.shape)}; must be three-dimensional: "
                "tokens, heads and head_dim"
            )
    check.one_of("kv_layout", a.kv_layout, check.KV_LAYOUTS)
    encoding = check.position_encoding(a.pos_encoding_mode, a.rope_scale, a.rope_theta)
    check.permission("allow_fp16_qk_reduction", a.allow_fp16_qk_reduction)
    check.permission("use_fp16_qk_reduction", a.use_fp16_qk_reduction)
    dtypes = _data_types(_Asked("q", q.dtype), _Asked("k", k.dtype), a.o_dtype, None)
    tokens, heads = (0, 1) if a.kv_layout == "NHD" else (1, 0)
    if v.shape[tokens] != k.shape[tokens]:
        raise ValueError(f"v has {v.shape[tokens]} tokens and k {k.shape[tokens]}; must be equal")
    return _core.AttentionOptions(
        num_qo_heads=q.shape[1],
        num_kv_heads=k.shape[heads],
        head_dim_qk=q.shape[2],
        head_dim_vo=v.shape[2],
        q_dtype=dtypes.q,
        kv_dtype=dtypes.kv,
        o_dtype=dtypes.o,
        causal=check.flag("causal", a.causal) and not a.masked,
        window_left=check.window_left(a.window_left),
        mask=_mask_kind(a.masked),
        position=encoding.position,
        rope_scale=encoding.rope_scale,
        rope_theta=encoding.rope_theta,
        soft_cap=check.soft_cap(a.logits_soft_cap),
        fixed_split_size=0,
        disable_split=False,
    )


def single_key(a: SingleArguments) -> tuple:
    """The options of a single request as a key holds them: with their types, because 1, 1.0 and
    True are equal and not all of them accepted, and by value, because an integer in a tensor or in
    an array of numpy's may be another one by the next call."""
    if not all(type(value) in _CONSTANT for value in a):
        a = SingleArguments(*map(check.plain, a))
        window = a.window_left
        if isinstance(window, torch.Tensor) and window.dtype != torch.bool:
            a = a._replace(window_left=operator.index(check.tensor("window_left", window)))
        if any(isinstance(value, torch.Tensor) for value in a):
            raise TypeError("no other option may be a tensor, and comparing keys would read it")
    return (a, *map(type, a))


def check_unserved(a: UnservedRunOptions) -> None:
    """Refuses, by name, what would change a result and is not served."""
    check.permission("enable_pdl", a.enable_pdl)
    check.absent(kv_cache_sf=a.kv_cache_sf)
    check.neutral("o_scale", a.o_scale, 1.0)
    check.neutral("skip_softmax_threshold_scale_factor", a.skip_softmax_threshold_scale_factor, 0.0)
    check.neutral("use_fp16_softmax", a.use_fp16_softmax, False)
    check.neutral("uses_spcompress", a.uses_spcompress, False)


class _DataTypes(NamedTuple):
    q: _core.DType
    kv: _core.DType
    o: _core.DType


class _Asked(NamedTuple):
    """A dtype as it was given, and by which argument."""

    name: str
    value: Any


def _data_types(q: _Asked, kv: _Asked, o: Any, o_alias: Any) -> _DataTypes:
    q_dtype = check.query_dtype(q.name, q.value)
    kv_dtype = q_dtype if kv.value is None else check.kv_dtype(kv.name, kv.value, q_dtype)
    o = check.alias("o_data_type", o, "o_dtype", o_alias)
    o_dtype = check.output_dtype("o_data_type", o, q_dtype)
    return _DataTypes(*(check.CORE_DTYPES[one] for one in (q_dtype, kv_dtype, o_dtype)))


def _mask_kind(masked: bool) -> _core.Mask:
    return _core.Mask.custom if masked else _core.Mask.bounds
