"""Problems for prefill beside decode: both wrappers, both sides with lengths and options of their
own as far as the wrapper has them. `pod_trial` computes them."""

from __future__ import annotations

import dataclasses
import enum
import random
from collections.abc import Sequence

import torch
from preflash.testing.case import Case, MaskKind

from .problems import SCALES, Brought
from .random_cases import Limits, contradiction, random_case, unflattened, with_defaults

_ABSENT = ("head_dim_vo", "soft_cap", "sinks", "head_scales", "o_dtype", "fixed_split_size",
           "disable_split_kv", "batch_invariant")  # fmt: skip


class Kind(enum.Enum):
    """Whose run() it is."""

    SINGLE = "PODWithPagedKVCacheWrapper"  # a prefill of one request, ragged
    BATCH = "BatchPODWithPagedKVCacheWrapper"


@dataclasses.dataclass(frozen=True)
class PodCall:
    """Arguments and forms of both cases' call. Pairs are (prefill, decode)."""

    return_lse: tuple[bool, bool] = (True, True)
    out: tuple[Brought, Brought] = (Brought.ABSENT, Brought.ABSENT)
    lse: tuple[Brought, Brought] = (Brought.ABSENT, Brought.ABSENT)
    lse_base: str = "log2"
    lse_layout: str = "NH"
    q_scale: float | None = None
    k_scale: float | None = None
    v_scale: float | None = None
    scales_in_tensors: bool = False
    workspace: int = 1 << 22
    replan: bool = False  # the wrapper had another plan before, and another prefill
    repeat: bool = False  # two runs give the same bits
    two_launches: bool = False  # also where a kernel takes both sides
    shorter_before: bool = False  # one plan has another prefill before (of one request)
    repeated: bool = False  # run() is given the options of the decode side again (of one request)
    other_mask: bool = False  # beside a packed mask a dense one, which does not count
    padding: int = 0  # rows of q before and after those of requests, with a qo_indptr


@dataclasses.dataclass(frozen=True)
class PodProblem:
    """Both sides, with options that the wrapper has."""

    kind: Kind
    prefill: Case
    decode: Case
    call: PodCall
    seed: int


# --- drawing -------------------------------------------------------------------


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
    decode = dataclasses.replace(
        decode,
        qo_lens=tuple(_queries(rng, kind) for _ in kv_lens),
        kv_lens=kv_lens,
        num_qo_heads=prefill.num_qo_heads,
        num_kv_heads=prefill.num_kv_heads,
        head_dim=prefill.head_dim,
        mask=MaskKind.NONE,
        page_size=decode.page_size or rng.choice([1, 3, 16, 64]),
    )
    if rng.random() < 0.06:
        decode = dataclasses.replace(decode, qo_lens=(), kv_lens=())
    prefill = _alone(prefill) if kind is Kind.SINGLE else _like(prefill, decode, rng)
    return PodProblem(
        kind, _possible(prefill), _possible(decode), _random_call(rng, kind), rng.randrange(2**31)
    )


def _queries(rng: random.Random, kind: Kind) -> int:
    return 1 if kind is Kind.SINGLE else rng.choice([0, 1, 1, 1, 1, 3])


def _at_most(lengths: Sequence[int], total: int) -> tuple[int, ...]:
    lengths = list(lengths)
    while sum(lengths) > max(total, len(lengths)):
        longest = lengths.index(max(lengths))
        lengths[longest] //= 2
    return tuple(lengths)


def _alone(case: Case) -> Case:
    one = {"qo_lens": case.qo_lens[:1], "kv_lens": case.kv_lens[:1], "page_size": 0}
    return dataclasses.replace(unflattened(case), **one)


def _like(prefill: Case, decode: Case, rng: random.Random) -> Case:
    """With the options that plan() has once for both sides."""
    shared = ("dtype", "kv_dtype", "page_size", "layout", "window_left", "sm_scale", "position",
              "rope_scale", "rope_theta")  # fmt: skip
    if decode.page_size != 1:
        prefill = unflattened(prefill)
    prefill = dataclasses.replace(prefill, **{name: getattr(decode, name) for name in shared})
    if rng.random() < 0.06:
        prefill = dataclasses.replace(prefill, qo_lens=(), kv_lens=(), mask=MaskKind.NONE)
    return prefill


def _possible(case: Case) -> Case:
    """With dtypes and numbers that go together."""
    if contradiction(case):
        case = with_defaults(case, ["magnitude"])
    if contradiction(case):
        dtype = torch.bfloat16 if case.dtype.itemsize == 1 else case.dtype
        case = dataclasses.replace(case, dtype=dtype, kv_dtype=None)
    return case


def _random_call(rng: random.Random, kind: Kind) -> PodCall:
    def pair(draw_one):
        return (draw_one(), draw_one())

    return_lse = pair(lambda: rng.random() < 0.7)
    if kind is Kind.BATCH:
        return_lse = (return_lse[0],) * 2
    return PodCall(
        return_lse=return_lse,
        out=pair(lambda: rng.choice(list(Brought))),
        lse=pair(lambda: rng.choice(list(Brought))),
        lse_base=rng.choice(["log2", "ln"]),
        lse_layout=rng.choice(["NH", "HN"]),
        q_scale=rng.choice(SCALES),
        k_scale=rng.choice(SCALES),
        v_scale=rng.choice([*SCALES, 0.0]),
        scales_in_tensors=rng.random() < 0.2,
        workspace=rng.choice([0, 1 << 14, 1 << 22]),
        replan=rng.random() < 0.2,
        repeat=rng.random() < 0.2,
        two_launches=rng.random() < 0.4,
        shorter_before=rng.random() < 0.2,
        repeated=rng.random() < 0.3,
        other_mask=rng.random() < 0.5,
        padding=rng.choice([0, 0, 2]),
    )
