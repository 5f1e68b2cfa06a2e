"""The first half of the check: from the arguments of a call to its AttentionOptions, which decide
a variant and a work list."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .. import _core
from . import calls, dtypes, torch_modes, validate
from .arguments import RunOptions
from .scales import Scales, softmax_scale

# The options of a call, as a tuple.
_given_to: dict[type, Callable[[Any], tuple]] = {
    kind: operator.attrgetter(*kind.OPTIONS)
    for kind in (calls.PagedPlanArguments, calls.RaggedPlanArguments, calls.SingleArguments)
}
_CONSTANT = frozenset((int, float, bool, str, type(None), torch.dtype))


class BatchOptions(NamedTuple):
    """Checked options of a wrapper's plan()."""

    options: _core.AttentionOptions
    masked: bool  # with a custom mask
    causal: bool  # as given; in the options it is off with a custom mask
    logits_soft_cap: float  # as given; in the options it is float32
    q_given: torch.dtype | None  # of queries that every run converts; None: no conversion
    scales: Scales  # for a plan() without sm_scale


def batch_options(a: calls.BatchArguments) -> BatchOptions:
    torch_modes.not_traced()
    kind = type(a)
    given = (kind, has_mask(a), *_given_to[kind](a))
    try:
        return _remembered(*given)
    except TypeError:  # not cacheable, or wrong: then the checks raise
        return _checked(*given)


# Steps of an engine differ in lengths, not in options, whose checks would be a tenth of plan().
# Keys have types too, because 1, 1.0 and True are equal, but not all of them are accepted.
@functools.lru_cache(maxsize=256, typed=True)
def _remembered(kind: type, masked: bool, *given: Any) -> BatchOptions:
    if not _CONSTANT.issuperset(map(type, given)):
        raise TypeError("what is equal by identity, as tensors are, may hold another value by then")
    return _checked(kind, masked, *given)


def _checked(kind: type, masked: bool, *given: Any) -> BatchOptions:
    options = _in_one_spelling(dict(zip(kind.OPTIONS, given, strict=True)))
    head_dim, head_dim_vo = options["head_dim"], options["head_dim_vo"]
    if head_dim is None:
        raise TypeError("missing required argument: head_dim")
    head_dim = validate.size("head_dim", head_dim)
    checked = _attention_options(
        options,
        masked,
        ("q_data_type", options["q_data_type"]),
        ("kv_data_type", options["kv_data_type"]),
        head_dim_qk=head_dim,
        head_dim_vo=head_dim if head_dim_vo is None else validate.size("head_dim_vo", head_dim_vo),
    )
    return BatchOptions(
        checked,
        masked,
        validate.flag("causal", options["causal"]),
        validate.soft_cap("logits_soft_cap", options["logits_soft_cap"]),
        converted_from(options["q_data_type"], checked),
        Scales(softmax_scale(None, checked), 1.0),
    )


def converted_from(given: Any, options: _core.AttentionOptions) -> torch.dtype | None:
    """The dtype of queries that every run converts; None: of none. given: q_data_type."""
    if options.q_dtype == options.kv_dtype:
        return None
    same = validate.dtype("q_data_type", given) == dtypes.CONVERTED_QUERY
    return dtypes.CONVERTED_QUERY if same else None


def single_options(a: calls.SingleArguments) -> _core.AttentionOptions:
    """The options in the arguments of a single request. Of its tensors only what decides the
    variant is looked at: binding checks the rest."""
    q, k, v = a.q, a.k, a.v
    for name, value in (("q", q), ("k", k), ("v", v)):
        validate.has_form(name, value, "single_tensor")
    options = _in_one_spelling(options_of(a))
    validate.one_of("kv_layout", a.kv_layout, validate.KV_LAYOUTS)
    tokens, heads = (0, 1) if a.kv_layout == "NHD" else (1, 0)
    if v.shape[tokens] != k.shape[tokens]:
        raise ValueError(f"v has {v.shape[tokens]} tokens and k {k.shape[tokens]}; must be equal")
    _check_layout(q.shape[1], k.shape, a.kv_layout)
    return _attention_options(
        options,
        has_mask(a),
        ("q", q.dtype),
        ("k", k.dtype),
        num_qo_heads=q.shape[1],
        num_kv_heads=k.shape[heads],
        head_dim_qk=q.shape[2],
        head_dim_vo=v.shape[2],
    )


def _check_layout(num_qo_heads: int, k: torch.Size, kv_layout: str) -> None:
    """Refuses a k whose heads fit those of q in the other layout alone."""
    heads, tokens = (k[1], k[0]) if kv_layout == "NHD" else (k[0], k[1])
    if heads > 0 and tokens > 0 and num_qo_heads % heads != 0 and num_qo_heads % tokens == 0:
        other, order = "NHD", "[kv_len, num_kv_heads, head_dim]"
        if kv_layout == "NHD":
            other, order = "HND", "[num_kv_heads, kv_len, head_dim]"
        raise ValueError(
            f"k has shape {tuple(k)}, so with kv_layout={kv_layout!r} num_kv_heads = {heads}, of "
            f"which num_qo_heads = {num_qo_heads} is not a multiple; pass kv_layout={other!r} if k "
            f"and v are {order}"
        )


def single_key(a: calls.SingleArguments) -> tuple:
    """The options of a single request as a key: with types, because 1, 1.0 and True are equal, but
    not all of them are accepted; by value, because a tensor or numpy array may hold another number
    at the next call."""
    values = _given_to[calls.SingleArguments](a)
    types = tuple(map(type, values))
    if not _CONSTANT.issuperset(types):
        given = dict(zip(calls.SingleArguments.OPTIONS, map(validate.plain, values), strict=True))
        window = given["window_left"]
        if isinstance(window, torch.Tensor) and window.dtype != torch.bool:
            given["window_left"] = operator.index(validate.tensor("window_left", window))
        values = tuple(given.values())
        types = tuple(map(type, values))
        if any(isinstance(value, torch.Tensor) for value in values):
            raise TypeError("no other option may be a tensor, and comparing keys would read it")
    return (values, types, has_mask(a))


def has_mask(a: Any) -> bool:
    """True if a call has a custom mask, or the items of multi-item scoring, which form one."""
    if a.custom_mask is not None or a.packed_custom_mask is not None:
        return True
    return getattr(a, "prefix_len_ptr", None) is not None


def check_neutral(options: dict[str, Any]) -> None:
    for name, value in calls.NEUTRAL.items():
        given = options.get(name, value)
        if given is not value:
            if value is None:
                validate.absent(**{name: given})
            validate.neutral(name, given, value)


def options_of(a: Any) -> dict[str, Any]:
    """Options that decide the plan of a call, by name."""
    return {name: getattr(a, name) for name in a.OPTIONS}


def check_unserved(a: RunOptions) -> None:
    """Refuses by name every option that would change a result and is not served."""
    validate.permission("enable_pdl", a.enable_pdl)
    validate.absent(kv_cache_sf=a.kv_cache_sf)
    validate.neutral("o_scale", a.o_scale, 1.0)
    validate.neutral("use_fp16_softmax", a.use_fp16_softmax, False)
    validate.neutral("uses_spcompress", a.uses_spcompress, False)


def _in_one_spelling(options: dict[str, Any]) -> dict[str, Any]:
    """Merges aliases into the canonical name of each option."""
    for alias, name in calls.ALIASES.items():
        if alias in options:
            options[name] = validate.alias(name, options[name], alias, options.pop(alias))
    return options


def _attention_options(
    options: dict[str, Any], masked: bool, q: tuple[str, Any], kv: tuple[str, Any], **known: int
) -> _core.AttentionOptions:
    """Checks options and makes AttentionOptions of them. q, kv: name and value of a dtype argument.
    known: fields that no option of the call sets."""
    check_neutral(options)
    encoding = validate.position_encoding(
        options["pos_encoding_mode"], options["rope_scale"], options["rope_theta"]
    )
    for name, check_alone, field, default in calls.CHECKED_ALONE:
        if field not in known:
            value = check_alone(name, options.get(name, default))
            if field:
                known[field] = value
    if validate.invariance("batch_invariant", options.get("batch_invariant", False)):
        # One pass over the keys: a fixed split of a prefill would write partial results.
        known["disable_split"] |= not known["fixed_split_size"]
    q_dtype = kv_dtype = validate.dtype(*q)
    _, kv_given = kv
    if q_dtype == dtypes.CONVERTED_QUERY:
        if kv_given is not None:
            kv_dtype = validate.dtype(*kv)
        q_dtype = validate.converted_query_dtype("o_data_type", options["o_data_type"], kv_dtype)
    else:
        validate.query_dtype(*q)
        if kv_given is not None:
            kv_dtype = validate.kv_dtype(*kv, q_dtype)
    o_dtype = validate.output_dtype("o_data_type", options["o_data_type"], q_dtype)
    return _core.AttentionOptions(
        q_dtype=dtypes.CORE_DTYPES[q_dtype],
        kv_dtype=dtypes.CORE_DTYPES[kv_dtype],
        o_dtype=dtypes.CORE_DTYPES[o_dtype],
        # causal is ignored when a custom mask is given; a window is not.
        causal=validate.flag("causal", options["causal"]) and not masked,
        mask=_core.Mask.custom if masked else _core.Mask.bounds,
        **encoding._asdict(),
        **known,
    )
