"""What plan() asks for, checked and normalised: the part that decides a variant and a work list."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch

from . import _core
from . import _validate as check


class Options(NamedTuple):
    """Hashable: plans of one batch are remembered by their options."""

    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int
    q_dtype: torch.dtype
    kv_dtype: torch.dtype
    causal: bool
    window_left: int
    logits_soft_cap: float
    custom_mask: bool
    fixed_split_size: int
    disable_split_kv: bool


@functools.lru_cache(maxsize=256)
def core_options(options: Options) -> _core.AttentionOptions:
    return _core.AttentionOptions(
        num_qo_heads=options.num_qo_heads,
        num_kv_heads=options.num_kv_heads,
        head_dim_qk=options.head_dim_qk,
        head_dim_vo=options.head_dim_vo,
        q_dtype=check.CORE_DTYPES[options.q_dtype],
        kv_dtype=check.CORE_DTYPES[options.kv_dtype],
        o_dtype=check.CORE_DTYPES[options.q_dtype],
        causal=options.causal,
        window_left=options.window_left,
        soft_cap=options.logits_soft_cap,
        mask=_core.Mask.custom if options.custom_mask else _core.Mask.bounds,
        fixed_split_size=options.fixed_split_size,
        disable_split=options.disable_split_kv,
    )


def softmax_scale(sm_scale: Any, options: Options) -> float:
    if sm_scale is None:
        return 1.0 / math.sqrt(options.head_dim_qk)
    cap = options.logits_soft_cap
    return check.logits_scale("sm_scale", check.real("sm_scale", sm_scale), cap)


def data_types(q: Any, kv: Any, o: Any, o_alias: Any) -> tuple[torch.dtype, torch.dtype]:
    """The dtypes of q and of k and v; the output has q's."""
    q = check.attention_dtype("q_data_type", q)
    kv = q if kv is None else check.attention_dtype("kv_data_type", kv)
    if kv != q:
        raise TypeError(f"kv_data_type={kv}: must be q_data_type, which is {q}")
    o = check.alias("o_data_type", o, "o_dtype", o_alias)
    if o is not None and check.dtype("o_data_type", o) != q:
        raise NotImplementedError(
            f"o_data_type={o}: this build writes q's dtype, {q}; leave it None and convert"
        )
    return q, kv


def batch_options(a: Any) -> Options:
    """The options in the arguments `a` of a wrapper's plan()."""
    check.not_traced()
    check.position_encoding(a.pos_encoding_mode, a.rope_scale, a.rope_theta)
    check.permission("allow_fp16_qk_reduction", a.allow_fp16_qk_reduction)
    check.permission("use_fp16_qk_reduction", a.use_fp16_qk_reduction)
    if (
        a.prefix_len_ptr is not None
        or a.token_pos_in_items_ptr is not None
        or a.token_pos_in_items_len
        or a.max_item_len_ptr is not None
    ):
        check.absent(
            prefix_len_ptr=a.prefix_len_ptr,
            token_pos_in_items_ptr=a.token_pos_in_items_ptr,
            token_pos_in_items_len=a.token_pos_in_items_len or None,
            max_item_len_ptr=a.max_item_len_ptr,
        )
    check.flag("non_blocking", a.non_blocking)
    head_dim = check.alias("head_dim", a.head_dim, "head_dim_qk", a.head_dim_qk)
    head_dim = check.integer("head_dim", check.required("head_dim", head_dim), at_least=1)
    head_dim_vo = head_dim if a.head_dim_vo is None else a.head_dim_vo
    q_dtype, kv_dtype = data_types(a.q_data_type, a.kv_data_type, a.o_data_type, a.o_dtype)
    split = a.fixed_split_size
    custom_mask = a.custom_mask is not None or a.packed_custom_mask is not None
    return Options(
        num_qo_heads=check.integer("num_qo_heads", a.num_qo_heads, at_least=1),
        num_kv_heads=check.integer("num_kv_heads", a.num_kv_heads, at_least=1),
        head_dim_qk=head_dim,
        head_dim_vo=check.integer("head_dim_vo", head_dim_vo, at_least=1),
        q_dtype=q_dtype,
        kv_dtype=kv_dtype,
        # causal is ignored when a custom mask is given; a window is not.
        causal=check.flag("causal", a.causal) and not custom_mask,
        window_left=check.integer("window_left", a.window_left, at_least=-1),
        logits_soft_cap=check.soft_cap(a.logits_soft_cap),
        custom_mask=custom_mask,
        # -1, 0 and None all mean that the planner chooses.
        fixed_split_size=0
        if split is None
        else max(check.integer("fixed_split_size", split, at_least=-1), 0),
        disable_split_kv=check.flag("disable_split_kv", a.disable_split_kv),
    )
