"""Random problems: a case, how it is called, and what is looked at beside the numbers.

`draw(seed, index, limits)` is the same problem wherever it is called. `Problem.text` writes one on
a line as words `field=value`, defaults left out, and `parse` reads it back.
"""

from __future__ import annotations

import dataclasses
import enum
import random
import types
import typing

import torch
from preflash.testing.case import DTYPE_NAMES, Case, KvForm, MaskKind, Position, Sinks
from preflash.testing.oracle import Pipeline

from . import problem_limits as limits
from .random_cases import Limits, random_case


class Entry(enum.Enum):
    """The public function that computes the problem."""

    SINGLE = "single"  # single_prefill_with_kv_cache
    BATCH = "batch"  # plan() and run() of the paged or the ragged wrapper
    FORWARD = "forward"  # the deprecated forward(), which is given the options of the logits


class Brought(enum.Enum):
    """The memory of an output."""

    ABSENT = "absent"  # the library's own
    CONTIGUOUS = "contiguous"
    STRIDED = "strided"  # memory of somebody else between the rows


class Scratch(enum.Enum):
    """Size of the float workspace, as a part of what workspace_size() says."""

    WHOLE = "whole"
    HALF = "half"
    NONE = "none"


class Copies(enum.Enum):
    """Values of PREFLASH_PREPASS: when RoPE and fp8 run on copies."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


class Also(enum.Enum):
    """Further checks, besides the numbers."""

    NOTHING = "nothing"
    REPEAT = "repeat"  # two runs, and a second wrapper, give the same bits
    ALONE = "alone"  # every request has the bits that it has without the others
    SPOILT = "spoilt"  # NaN and infinities in one request reach no other one
    REPLAN = "replan"  # the wrapper had another plan before, with other options
    INVARIANT = (
        "invariant"  # also chunks and decode steps of a request have the bits of its prefill
    )
    REFUSALS = "refusals"  # wrong options raise, write nothing, and leave the wrapper as it was


@dataclasses.dataclass(frozen=True)
class Call:
    """Arguments and forms of a case's call."""

    entry: Entry = Entry.BATCH
    return_lse: bool = True
    out: Brought = Brought.ABSENT
    lse: Brought = Brought.ABSENT
    lse_base: str = "log2"
    lse_layout: str = "NH"
    q_scale: float | None = None
    k_scale: float | None = None
    v_scale: float | None = None
    scales_in_tensors: bool = False
    window_at_run: bool = False  # window_left is given to run(), and plan() gets none
    skip_factor: float = 0.0  # given to run()
    scratch: Scratch = Scratch.WHOLE
    index_on_device: bool = False
    threads: int = 1  # of the cpu backend
    copies: Copies = Copies.AUTO  # of a case with a pre-pass
    padding: int = 0  # rows of q, and pages, that no request has, before and behind theirs
    graph: bool = False  # use_cuda_graph=True, with buffers
    hints: bool = False  # plan() is told the lengths and pages in its other forms, too
    bounds: bool = False  # plan() has upper bounds of the keys, run() their numbers
    other_mask: bool = False  # beside a packed mask a dense one, which does not count
    long_mask: bool = False  # masks are longer than needed


# Drawn scales: all exact in float32, so that a scale in a tensor is the same scale.
SCALES = [None] * 6 + [0.5, 2.0, 1.25, -0.75]


def with_scales(pipeline: Pipeline, call) -> Pipeline:
    """Returns the pipeline with a call's q_scale, k_scale and v_scale folded in."""
    q, k, v = (1.0 if s is None else s for s in (call.q_scale, call.k_scale, call.v_scale))
    return dataclasses.replace(pipeline, sm_scale=pipeline.sm_scale * (q * k), out_scale=v)


@dataclasses.dataclass(frozen=True)
class Problem:
    """Everything that decides a result. Raises ValueError where it makes no sense together."""

    case: Case
    call: Call = Call()
    also: Also = Also.NOTHING
    seed: int = 0  # of the numbers in the tensors

    def __post_init__(self) -> None:
        case, call, entry = self.case, self.call, self.call.entry
        splits = case.is_invariant
        if entry is Entry.SINGLE:
            _must(case.batch_size == 1 and not case.paged, "one ragged request")
            _must(not splits, "a single request has no split policy")
            _must(
                not (call.graph or call.hints or call.padding or call.bounds), "options of plan()"
            )
            _must(not (call.other_mask or call.long_mask), "masks of plan()")
            _must(
                self.also not in (Also.ALONE, Also.INVARIANT, Also.REPLAN),
                "a single request is not planned",
            )
        if entry is Entry.FORWARD:
            _must(case.sinks is Sinks.NONE and call.q_scale is None, "options of run()")
            _must(call.out is Brought.ABSENT and call.lse is Brought.ABSENT, "options of run()")
            _must(call.lse_base == "log2" and call.lse_layout == "NH", "options of run()")
            _must(
                self.also not in (Also.ALONE, Also.INVARIANT, Also.REFUSALS), "looked at with run()"
            )
            _must(not case.head_scales, "options of run()")
        _must(not limits.contradiction(case), limits.contradiction(case))
        _must(not call.other_mask or case.mask is MaskKind.PACKED, "beside a packed mask")
        _must(not call.bounds or _may_be_bounded(case, call), "keys that plan() has to know")
        _must(not call.bounds or self.also in _WITH_BOUNDS, "looked at with exact lengths")
        _must(not call.long_mask or case.has_custom_mask, "there is no mask")
        _must(not call.window_at_run or entry is Entry.BATCH, "an option of run()")
        _must(call.skip_factor == 0.0 or entry is Entry.BATCH, "an option of run()")
        _must(
            call.scratch is Scratch.WHOLE or (entry is not Entry.SINGLE and not splits),
            "a part of the workspace is for a split that the planner chooses",
        )
        _must(self.also is not Also.SPOILT or case.batch_size > 1, "there is no other request")
        _must(self.also is not Also.ALONE or splits, "a split policy makes requests independent")
        _must(self.also is not Also.INVARIANT or _may_be_cut(case, call), "rows that may be cut")

    @property
    def text(self) -> str:
        """The problem as words, for `parse`."""
        words = []
        for name, value, default in _fields(self):
            if value != default and name != "name":
                words.append(f"{name}={_word(value)}")
        return " ".join(words)


def _must(condition: bool, rule: str) -> None:
    if not condition:
        raise ValueError(rule)


# --- text ----------------------------------------------------------------------

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_PARTS = {"case": Case, "call": Call}


def _fields(problem: Problem) -> typing.Iterator[tuple[str, object, object]]:
    """(name, value, default) of every field; no two parts have a field of the same name."""
    for part in (problem.case, problem.call, problem):
        for field in dataclasses.fields(part):
            if field.name not in _PARTS:
                yield field.name, getattr(part, field.name), field.default


def _word(value: object) -> str:
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if isinstance(value, torch.dtype):
        return DTYPE_NAMES[value]
    return repr(value) if isinstance(value, float) else str(value)


def parse(text: str) -> Problem:
    """The problem that `Problem.text` wrote. Raises ValueError for anything else."""
    words = dict(word.split("=", 1) for word in text.split() if "=" in word)
    if len(words) != len(text.split()):
        raise ValueError(f"{text!r}: must be words field=value, each field once")
    parts = {}
    for name, kind in _PARTS.items():
        parts[name] = _take(kind, words)
    rest = _take(Problem, words)
    if words:
        raise ValueError(f"there is no field {', '.join(words)}")
    for values in parts.values():
        limits.check_fields(values)
    try:
        case = Case("problem", **parts["case"])
    except TypeError as error:
        raise ValueError(f"{text!r}: {error}") from error
    limits.check_size(case)
    return Problem(case, Call(**parts["call"]), **rest)


def _take(kind: type, words: dict[str, str]) -> dict[str, object]:
    """The fields of `kind` among the words, which are taken out of them."""
    hints = typing.get_type_hints(kind)
    names = [name for name in hints if name in words and name not in ("name", *_PARTS)]
    return {name: _value(name, words.pop(name), hints[name]) for name in names}


def _value(name: str, word: str, hint: object) -> object:
    if isinstance(hint, types.UnionType):
        if word == "None":
            return None
        hint = typing.get_args(hint)[0]
    try:
        if typing.get_origin(hint) is tuple:
            return tuple(int(part) for part in word.split(","))
        if hint is bool:
            return {"True": True, "False": False}[word]
        return _DTYPES[word] if hint is torch.dtype else hint(word)
    except (KeyError, ValueError):
        raise ValueError(f"{name}={word}: not a value of {name}") from None


# --- drawing -------------------------------------------------------------------


def draw(seed: int, index: int, limits: Limits) -> Problem:
    """Problem `index` of `seed`."""
    rng = random.Random(f"preflash {seed} {index}")
    entry = rng.choice([Entry.SINGLE, *[Entry.BATCH] * 5, Entry.FORWARD])
    # A few are larger, for more work items and longer splits.
    work = limits.work * (10 if rng.random() < 0.03 else 1)
    case = random_case(rng, "problem", dataclasses.replace(limits, work=work))
    case = _adapted(case, entry)
    call = _random_call(rng, case, entry)
    also = rng.choice(_looked_at(case, entry))
    seed = rng.randrange(2**31)
    call = dataclasses.replace(call, copies=rng.choice(list(Copies)))
    call = _planned_call(rng, case, call)
    if also is Also.INVARIANT and not _may_be_cut(case, call):
        also = Also.NOTHING
    if call.entry is not Entry.SINGLE and also in _WITH_BOUNDS and _may_be_bounded(case, call):
        call = dataclasses.replace(call, bounds=rng.random() < 0.3)
    return Problem(case, call, also, seed)


def _planned_call(rng: random.Random, case: Case, call: Call) -> Call:
    """The call with what only plan() takes."""
    padding = rng.choice([0, 0, 2])
    graph, hints, other_mask, long_mask = (rng.random() < share for share in (0.2, 0.3, 0.5, 0.3))
    skips = rng.random() < 0.4 and call.entry is Entry.BATCH and _may_skip(case)
    if call.entry is Entry.SINGLE:
        return call
    return dataclasses.replace(
        call,
        padding=padding,
        graph=graph,
        hints=hints,
        other_mask=other_mask and case.mask is MaskKind.PACKED,
        long_mask=long_mask and case.has_custom_mask,
        skip_factor=1e-8 if skips else 0.0,  # what it leaves out is nothing beside the rest
    )


# What is looked at without a plan of other lengths or masks.
_WITH_BOUNDS = (Also.NOTHING, Also.REPEAT, Also.SPOILT)


def _may_be_bounded(case: Case, call: Call) -> bool:
    """True if plan() takes upper bounds of the keys."""
    fixed = case.fixed_split_size is not None and not case.disable_split_kv
    return not (case.has_custom_mask or call.hints or (fixed and case.window_left >= 0))


def _may_be_cut(case: Case, call: Call) -> bool:
    """True if a part of a request's rows is a request with the same results: what a row sees goes
    by its own position, or by none. Tiles are skipped for all rows of a warpgroup."""
    placed = case.window_left >= 0 or case.position is not Position.NONE
    fixed = case.fixed_split_size is not None and not case.disable_split_kv
    return (
        case.is_invariant
        and call.skip_factor == 0.0
        and call.copies is not Copies.ALWAYS
        # Logits with ALiBi are counted from the first row of the call.
        and case.position is not Position.ALIBI
        # A row takes its sink with its keys, or where its chunks are merged.
        and not (fixed and case.sinks is not Sinks.NONE)
        and (case.mask is MaskKind.CAUSAL or not placed)
    )


def _may_skip(case: Case) -> bool:
    """True if every backend has kernels that skip tiles of the case."""
    plain = case.position is Position.NONE and not case.soft_cap and not case.has_custom_mask
    wide = case.dtype.itemsize == case.dtype_kv.itemsize == 2
    return plain and wide and max(case.head_dim, case.dim_vo) <= 256


def _adapted(case: Case, entry: Entry) -> Case:
    """The case without what the entry point does not take."""
    if entry is Entry.SINGLE:
        form = KvForm.SEPARATE if case.form is KvForm.FLAT else case.form
        case = dataclasses.replace(
            case,
            qo_lens=case.qo_lens[:1],
            kv_lens=case.kv_lens[:1],
            page_size=0,
            form=form,
            fixed_split_size=None,
            disable_split_kv=False,
            batch_invariant=False,
        )
    if entry is Entry.FORWARD:
        case = dataclasses.replace(case, sinks=Sinks.NONE, head_scales=False)
    return case


def _looked_at(case: Case, entry: Entry) -> list[Also]:
    choices = [Also.NOTHING, Also.REPEAT]
    if entry is not Entry.SINGLE:
        choices.append(Also.REPLAN)
    if entry is not Entry.FORWARD:
        choices.append(Also.REFUSALS)
    if case.batch_size > 1:
        choices.append(Also.SPOILT)
    if entry is Entry.BATCH and case.is_invariant:
        choices += [Also.ALONE] * 2
        choices += [Also.INVARIANT] * 2
    return choices


def _random_call(rng: random.Random, case: Case, entry: Entry) -> Call:
    q_scale, k_scale = rng.choice(SCALES), rng.choice(SCALES)
    v_scale = rng.choice([*SCALES, 0.0])
    out, lse = (rng.choice([Brought.ABSENT, *Brought]) for _ in range(2))
    splits = case.is_invariant
    scratch = rng.choice([Scratch.WHOLE, *Scratch])
    call = Call(
        entry=entry,
        return_lse=rng.random() < 0.8,
        out=out,
        lse=lse,
        lse_base=rng.choice(["log2", "ln"]),
        lse_layout=rng.choice(["NH", "HN"]),
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        scales_in_tensors=rng.random() < 0.2,
        window_at_run=entry is Entry.BATCH and case.window_left >= 0 and rng.random() < 0.4,
        scratch=Scratch.WHOLE if splits or entry is Entry.SINGLE else scratch,
        index_on_device=rng.random() < 0.3,
        threads=rng.choice([1, 1, 2, 3]),
    )
    if entry is Entry.FORWARD:
        absent = Brought.ABSENT
        call = dataclasses.replace(
            call, out=absent, lse=absent, lse_base="log2", lse_layout="NH", q_scale=None
        )
    return call
