"""Random problems: a case, how it is called, and what is looked at beside the numbers.

`draw(seed, index, limits)` is the same problem wherever it is called. `Problem.text` writes one on
a line as words `field=value`, defaults left out, and `parse` reads it back.
"""

# ruff: noqa: RUF009 (drawn() makes fields, as dataclasses.field() does)
from __future__ import annotations

import dataclasses
import enum
import random
import types
import typing

import torch
from preflash.testing.case import DTYPE_NAMES, Case, MaskKind, Position, Sinks
from preflash.testing.oracle import Pipeline

from .random_cases import (
    Limits,
    contradiction,
    drawn,
    first_request,
    random_case,
    random_fields,
    with_defaults,
)


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
    """Part of workspace_size() that the float workspace has, with room for a fixed split."""

    WHOLE = "whole"
    HALF = "half"
    NONE = "none"


class Copies(enum.Enum):
    """Values of PREFLASH_PREPASS: when RoPE and fp8 run on copies."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


class Integers(enum.Enum):
    """The integers of a dense mask: the low bytes of some are 0, some are negative."""

    NONE = "none"
    INT8 = "int8"
    INT16 = "int16"
    INT32 = "int32"
    INT64 = "int64"


class Also(enum.Enum):
    """Further checks, besides the numbers."""

    NOTHING = "nothing"
    REPEAT = "repeat"  # two runs, and a second wrapper, give the same bits
    ALONE = "alone"  # every request has the bits that it has without the others
    SPOILT = "spoilt"  # NaN and infinities in one request reach no other one
    REPLAN = "replan"  # the wrapper had another plan before, with other options
    INVARIANT = "invariant"  # also chunks and decode steps of a request have its prefill's bits


# All exact in float32, so that a scale in a tensor is the same scale.
_SCALES = (*[None] * 6, 0.5, 2.0, 1.25, -0.75)


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """Options that all calls have."""

    lse_base: str = drawn("log2", "ln")
    q_scale: float | None = drawn(*_SCALES)
    k_scale: float | None = drawn(*_SCALES)
    v_scale: float | None = drawn(*_SCALES, 0.0)
    scales_in_tensors: bool = drawn(*[False] * 4, True)

    def scaled(self, pipeline: Pipeline) -> Pipeline:
        """Returns the pipeline with the scales folded in."""
        q, k, v = (1.0 if s is None else s for s in (self.q_scale, self.k_scale, self.v_scale))
        return dataclasses.replace(pipeline, sm_scale=pipeline.sm_scale * (q * k), out_scale=v)


@dataclasses.dataclass(frozen=True)
class Call(RunOptions):
    """Arguments and forms of a case's call."""

    entry: Entry = drawn(*[Entry.BATCH] * 5, Entry.SINGLE, Entry.FORWARD)
    return_lse: bool = drawn(*[True] * 4, False)
    out: Brought = drawn(Brought.ABSENT, *Brought)
    lse: Brought = drawn(Brought.ABSENT, *Brought)
    lse_layout: str = drawn("NH", "HN")
    # window_left is given to run(), and plan() gets none.
    window_at_run: bool = drawn(False, False, True)
    skip_factor: float = drawn(0.0, 1e-8)  # for run(); what it leaves out is nothing
    scratch: Scratch = drawn(Scratch.WHOLE, *Scratch)
    index_on_device: bool = drawn(False, False, True)
    threads: int = drawn(1, 1, 2, 3)  # of the cpu backend
    copies: Copies = drawn(*Copies)  # of a case with a pre-pass
    padding: int = drawn(0, 0, 2)  # rows of q, and pages, of no request, before and behind theirs
    graph: bool = drawn(*[False] * 4, True)  # use_cuda_graph=True, with buffers
    hints: bool = drawn(False, False, True)  # plan() has lengths and pages in its other forms, too
    # plan() has upper bounds of the keys, run() their numbers.
    bounds: bool = drawn(*[False] * 5, True)
    other_mask: bool = drawn(False, True)  # beside a packed mask a dense one, which does not count
    long_mask: bool = drawn(False, False, True)  # masks are longer than needed
    integers: Integers = drawn(*[Integers.NONE] * 4, *Integers)
    table: bool = drawn(False, False, True)  # the page indices are rows of a wider block table
    columns: bool = drawn(False, False, True)  # index arrays are columns of larger ones


@dataclasses.dataclass(frozen=True)
class Problem:
    """Everything that decides a result. Raises ValueError where it makes no sense together."""

    case: Case
    call: Call = Call()
    also: Also = Also.NOTHING
    seed: int = 0  # of the numbers in the tensors

    def __post_init__(self) -> None:
        case, call = self.case, self.call
        if call.entry is Entry.SINGLE and (case.batch_size != 1 or case.paged):
            raise ValueError("entry=single: takes one ragged request")
        if rule := contradiction(case):
            raise ValueError(rule)
        for rule, names in _meaningless(case, call):
            for part in (case, call):
                if with_defaults(part, names) != part:
                    raise ValueError(f"{rule}: {', '.join(names)} must have their defaults")
        if self.also not in checks(case, call):
            raise ValueError(f"also={self.also.value} has no meaning in this problem")

    @property
    def text(self) -> str:
        """Writes the problem as words, for `parse`."""
        values = [
            (field.name, getattr(part, field.name), field.default)
            for part in (self.case, self.call, self)
            for field in dataclasses.fields(part)
            if field.name in _TYPES
        ]
        return " ".join(f"{name}={_word(value)}" for name, value, usual in values if value != usual)


_OF_PLAN = ("fixed_split_size", "disable_split_kv", "batch_invariant", "scratch", "padding",
            "graph", "hints", "bounds", "other_mask", "table", "columns")  # fmt: skip
_OF_RUN = ("sinks", "head_scales", "q_scale", "out", "lse", "lse_base", "lse_layout")


def _meaningless(case: Case, call: Call) -> typing.Iterator[tuple[str, tuple[str, ...]]]:
    """Yields rules of this problem with the options that have no meaning by them."""
    fixed_split = case.fixed_split_size is not None and not case.disable_split_kv
    if call.entry is Entry.SINGLE:
        yield "a single request is not planned", _OF_PLAN
    if call.entry is Entry.FORWARD:
        yield "forward() has no options of run()", _OF_RUN
    if call.entry is not Entry.BATCH:
        yield "only run() has them", ("window_at_run", "skip_factor")
    if case.window_left < 0:
        yield "there is no window", ("window_at_run",)
    if not _may_skip(case):
        yield "not every backend has kernels that skip tiles of the case", ("skip_factor",)
    if case.mask is not MaskKind.PACKED:
        yield "there is no packed mask", ("other_mask",)
    if not case.has_custom_mask:
        yield "there is no mask", ("long_mask", "integers")
    if not case.paged or call.graph:
        yield "there are no pages, or a buffer for a list of them", ("table",)
    if case.is_invariant and not fixed_split:
        yield "no keys are split", ("scratch",)
    if case.has_custom_mask or call.hints or (fixed_split and case.window_left >= 0):
        yield "plan() has to know the keys", ("bounds",)


def checks(case: Case, call: Call) -> list[Also]:
    """Returns checks that have a meaning, some of them twice to be drawn more often."""
    found = [Also.NOTHING, Also.REPEAT, *[Also.SPOILT] * (case.batch_size > 1)]
    if call.bounds:  # the rest plans other lengths or masks
        return found
    if call.entry is not Entry.SINGLE:
        found.append(Also.REPLAN)
    if call.entry is Entry.BATCH and case.is_invariant:
        found += [Also.ALONE] * 2
        found += [Also.INVARIANT] * 2 * _may_be_cut(case, call)
    return found


def _may_be_cut(case: Case, call: Call) -> bool:
    """True if a row sees the same keys in a part of its request, by its own position or by none."""
    placed = case.window_left >= 0 or case.position is not Position.NONE
    fixed = case.fixed_split_size is not None and not case.disable_split_kv
    return (
        call.skip_factor == 0.0
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


_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
# Types of the fields of all parts, no two of which have a field of the same name.
_TYPES = {
    name: hint
    for part in (Case, Call, Problem)
    for name, hint in typing.get_type_hints(part).items()
    if name not in ("name", "case", "call")
}


def _word(value: object) -> str:
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if isinstance(value, torch.dtype):
        return DTYPE_NAMES[value]
    return repr(value) if isinstance(value, float) else str(value)


def parse(text: str) -> Problem:
    """Reads what `Problem.text` wrote. Raises ValueError for anything else."""
    words = dict(word.split("=", 1) for word in text.split() if "=" in word)
    if len(words) != len(text.split()):
        raise ValueError(f"{text!r}: must be words field=value, each field once")
    values = {name: _value(name, word) for name, word in words.items()}

    def of(part: type) -> dict[str, object]:
        names = {field.name for field in dataclasses.fields(part)}
        return {name: values[name] for name in values if name in names}

    try:
        return Problem(Case("problem", **of(Case)), Call(**of(Call)), **of(Problem))
    except TypeError as error:
        raise ValueError(f"{text!r}: {error}") from error


def _value(name: str, word: str) -> object:
    if name not in _TYPES:
        raise ValueError(f"there is no field {name}")
    hint = _TYPES[name]
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


def draw(seed: int, index: int, limits: Limits) -> Problem:
    """Draws problem `index` of `seed`."""
    rng = random.Random(f"preflash {seed} {index}")
    call = Call(**random_fields(rng, Call))
    # A few are larger, for more work items and longer splits.
    work = limits.work * (10 if rng.random() < 0.03 else 1)
    case = random_case(rng, "problem", dataclasses.replace(limits, work=work))
    if call.entry is Entry.SINGLE:
        case = first_request(case)
    for _, names in _meaningless(case, call):
        case, call = with_defaults(case, names), with_defaults(call, names)
    return Problem(case, call, rng.choice(checks(case, call)), rng.randrange(2**31))
