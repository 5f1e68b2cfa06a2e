"""Problems for prefill beside decode: both wrappers, both sides with lengths and options of their
own as far as the wrapper has them. `pod_trial` computes them."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import random
from collections.abc import Sequence

import torch
from preflash.testing.case import Case, MaskKind

from .problems import Brought, RunOptions
from .random_cases import (
    Limits,
    contradiction,
    drawn,
    first_request,
    random_case,
    random_fields,
    unflattened,
    with_defaults,
)

_ABSENT = ("head_dim_vo", "soft_cap", "sinks", "head_scales", "o_dtype", "fixed_split_size",
           "disable_split_kv", "batch_invariant")  # fmt: skip


class Kind(enum.Enum):
    """Whose run() it is."""

    SINGLE = "PODWithPagedKVCacheWrapper"  # a prefill of one request, ragged
    BATCH = "BatchPODWithPagedKVCacheWrapper"


@dataclasses.dataclass(frozen=True)
class PodCall(RunOptions):
    """Arguments and forms of both cases' call. Pairs are (prefill, decode)."""

    return_lse: tuple[bool, bool] = drawn((True, True), *itertools.product((True, False), repeat=2))
    out: tuple[Brought, Brought] = drawn(*itertools.product(Brought, repeat=2))
    lse: tuple[Brought, Brought] = drawn(*itertools.product(Brought, repeat=2))
    lse_layout: str = drawn("NH", "HN")
    workspace: int = drawn(1 << 22, 1 << 14, 0)
    replan: bool = drawn(*[False] * 4, True)  # the wrapper had another plan and prefill before
    repeat: bool = drawn(*[False] * 4, True)  # two runs give the same bits
    two_launches: bool = drawn(False, False, True)  # also where a kernel takes both sides
    # Of one request: the plan has another prefill before; run() gets the decode options again.
    shorter_before: bool = drawn(*[False] * 4, True)
    repeated: bool = drawn(False, False, True)
    other_mask: bool = drawn(False, True)  # beside a packed mask a dense one, which does not count
    padding: int = drawn(0, 0, 2)  # rows of q before and after those of requests, with a qo_indptr


@dataclasses.dataclass(frozen=True)
class PodProblem:
    """Both sides, with options that the wrapper has."""

    kind: Kind
    prefill: Case
    decode: Case
    call: PodCall
    seed: int


def draw(seed: int, index: int, limits: Limits) -> PodProblem:
    """Problem `index` of `seed`."""
    rng = random.Random(f"pod {seed} {index}")
    kind = rng.choice(list(Kind))
    work = dataclasses.replace(limits, work=limits.work / 2)
    prefill, decode = (
        with_defaults(random_case(rng, name, work), _ABSENT) for name in ("prefill", "decode")
    )
    most = int(limits.work / (2 * prefill.num_qo_heads * prefill.head_dim * 8))
    kv_lens = _at_most(decode.kv_lens, most)
    queries = [1] if kind is Kind.SINGLE else [0, 1, 1, 1, 1, 3]
    decode = dataclasses.replace(
        decode,
        qo_lens=tuple(rng.choice(queries) for _ in kv_lens),
        kv_lens=kv_lens,
        num_qo_heads=prefill.num_qo_heads,
        num_kv_heads=prefill.num_kv_heads,
        head_dim=prefill.head_dim,
        mask=MaskKind.NONE,
        page_size=decode.page_size or rng.choice([1, 3, 16, 64]),
    )
    if rng.random() < 0.06:
        decode = dataclasses.replace(decode, qo_lens=(), kv_lens=())
    call = PodCall(**random_fields(rng, PodCall))
    if kind is Kind.SINGLE:
        prefill = first_request(prefill)
    else:  # run() has one return_lse
        prefill = _like(prefill, decode, rng)
        call = dataclasses.replace(call, return_lse=call.return_lse[:1] * 2)
    return PodProblem(kind, _possible(prefill), _possible(decode), call, rng.randrange(2**31))


def _at_most(lengths: Sequence[int], total: int) -> tuple[int, ...]:
    lengths = list(lengths)
    while sum(lengths) > max(total, len(lengths)):
        longest = lengths.index(max(lengths))
        lengths[longest] //= 2
    return tuple(lengths)


def _like(prefill: Case, decode: Case, rng: random.Random) -> Case:
    """With the options that plan() has once for both sides."""
    shared = ("dtype", "kv_dtype", "page_size", "layout", "window_left", "sm_scale", "position",
              "rope_scale", "rope_theta")  # fmt: skip
    if decode.page_size != 1:
        prefill = unflattened(prefill)
    prefill = dataclasses.replace(prefill, **{name: getattr(decode, name) for name in shared})
    none = {"qo_lens": (), "kv_lens": (), "mask": MaskKind.NONE} if rng.random() < 0.06 else {}
    return dataclasses.replace(prefill, **none)


def _possible(case: Case) -> Case:
    """With dtypes and numbers that go together."""
    if contradiction(case):
        case = with_defaults(case, ["magnitude"])
    if contradiction(case):
        dtype = torch.bfloat16 if case.dtype.itemsize == 1 else case.dtype
        case = dataclasses.replace(case, dtype=dtype, kv_dtype=None)
    return case
