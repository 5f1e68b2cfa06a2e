"""Arguments as callers gave them, before any check. calls.py has the parameters of plan(),
forward() and the single functions; this module has those of run(), and what all calls share."""

from __future__ import annotations

import operator
from collections import namedtuple
from collections.abc import Callable
from typing import Any, NamedTuple, TypedDict, TypeVar

import torch
from torch.compiler import is_dynamo_compiling

Scale = float | torch.Tensor | None
KvCache = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
Arguments = TypeVar("Arguments")


class CheckedAlone(NamedTuple):
    """An option whose check needs no other option."""

    name: str
    check: Callable[[str, Any], Any]
    field: str  # of AttentionOptions, gets the result of the check; "": none
    default: Any  # for a call without this parameter


def converted(a: Any, kind: type[Arguments], **given: Any) -> Arguments:
    """A call converted to another kind: the given values, the arguments that both have, defaults
    for the rest."""
    key = (type(a), kind, *given)
    both = _in_both.get(key)  # torch.compile warns of functools.cache
    if both is None:
        names = [n for n in key[0].__slots__ if n in kind.__slots__ and n not in given]
        both = _in_both[key] = (names, operator.attrgetter(*names))
    names, values_of = both
    # torch.compile cannot look into an attrgetter.
    values = [getattr(a, n) for n in names] if is_dynamo_compiling() else values_of(a)
    return kind(**dict(zip(names, values)), **given)  # noqa: B905, which takes time


_in_both: dict[tuple, tuple[list[str], Callable[[Any], tuple]]] = {}


class GivenScales(NamedTuple):
    """The calibration scales of a run."""

    q_scale: Scale = None
    k_scale: Scale = None
    v_scale: Scale = None

    @property
    def given(self) -> bool:
        q_scale, k_scale, v_scale = self
        return not (q_scale is None and k_scale is None and v_scale is None)


class PerHead(NamedTuple):
    """The tensors of a run that hold one float32 for each head; None: absent."""

    sinks: torch.Tensor | None = None
    scale_q: torch.Tensor | None = None
    scale_k: torch.Tensor | None = None
    scale_v: torch.Tensor | None = None

    @property
    def given(self) -> bool:
        sinks, scale_q, scale_k, scale_v = self
        return not (sinks is None and scale_q is None and scale_k is None and scale_v is None)

    @property
    def scaled(self) -> bool:
        """True if any per-head scale factor is given."""
        return not (self.scale_q is None and self.scale_k is None and self.scale_v is None)


def scales_of(a: Any) -> GivenScales:
    """Returns the GivenScales of a call that has all three arguments."""
    return GivenScales(a.q_scale, a.k_scale, a.v_scale)


def per_head_of(a: Any) -> PerHead:
    """Returns the PerHead of a call that has all of these arguments."""
    return PerHead(*_per_head_of(a))


_per_head_of = operator.attrgetter(*PerHead._fields)


# The fp8 operand that each per-head factor scales.
PER_HEAD_OPERANDS = {"scale_q": "q", "scale_k": "k", "scale_v": "v"}


class Items(NamedTuple):
    """Multi-item scoring as plan() was given it; prefix_len_ptr is None without."""

    prefix_len_ptr: torch.Tensor | None = None
    token_pos_in_items_ptr: torch.Tensor | None = None
    token_pos_in_items_len: int = 0
    max_item_len_ptr: torch.Tensor | None = None


NO_ITEMS = Items()


class RunKwargs(TypedDict, total=False):
    """Options that run() of every batch wrapper takes by name alone, None by default."""

    scale_q: torch.Tensor | None
    scale_k: torch.Tensor | None
    scale_v: torch.Tensor | None
    window_left: int | None
    skip_softmax_threshold_scale_factor: float | None
    # This build serves only the neutral values of these.
    enable_pdl: bool | None
    kv_cache_sf: torch.Tensor | None
    o_scale: float | None
    use_fp16_softmax: bool | None
    uses_spcompress: bool | None


# Arguments of run() of the batch wrappers, as called, without tensors of the batch and outputs.
# extra: positional arguments after the tensors.
_GIVEN = ("extra", "q_scale", "k_scale", "v_scale", "sinks", *RunKwargs.__annotations__)
RunOptions = namedtuple("RunOptions", _GIVEN, defaults=((), *[None] * (len(_GIVEN) - 1)))


def taken_by_position(
    given: RunOptions, return_lse: Any, names: tuple[str, ...]
) -> tuple[RunOptions, Any]:
    """Names the positional arguments after the tensors: returns the options and return_lse.
    Their order is `names`, which ends with return_lse, or the newer scale_q, scale_k, scale_v."""
    args = given.extra
    last = len(names) - 1
    if len(args) > last and isinstance(args[last], (torch.Tensor, float)):
        if len(args) != 3:
            raise TypeError(
                "run(): a factor stands where return_lse would. By position, q, k and v may be "
                "followed by scale_q, scale_k and scale_v, all three of them; or give them by name"
            )
        # A tensor has a factor for each head, a float one for all.
        both = [(f"scale_{x}", f"{x}_scale") for x in "qkv"]
        twice = [n for pair in both for n in pair if getattr(given, n) is not None]
        if twice:
            raise TypeError(f"run(): {twice[0]} beside scales by position; give them once")
        found = {
            name if isinstance(value, torch.Tensor) else of_all: value
            for (name, of_all), value in zip(both, args, strict=True)
        }
        return given._replace(extra=(), **found), return_lse
    found = {n: value for n, value in zip(names, args, strict=False) if value is not None}
    for name in found:
        # return_lse=False by name looks like its default.
        if return_lse if name == "return_lse" else getattr(given, name) is not None:
            raise TypeError(f"run() got multiple values for argument {name!r}")
    return_lse = found.pop("return_lse", return_lse)
    return given._replace(extra=args[len(names) :], **found), return_lse
