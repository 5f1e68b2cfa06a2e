"""Random problems for cudnn_batch_prefill_with_kv_cache, over all its options, with garbage in all
memory that no request owns."""

# ruff: noqa: RUF009 (drawn() makes fields, as dataclasses.field() does)
from __future__ import annotations

import dataclasses
import enum
import itertools
import random
from collections.abc import Sequence
from typing import NamedTuple

import preflash
import torch
from preflash import _core
from preflash.testing import inputs, runner
from preflash.testing.case import Case, KvForm, MaskKind
from preflash.testing.inputs import PAD_COLUMNS, SPARE_ROWS, fill_poison
from preflash.testing.oracle import Pipeline, reference

from . import guarded
from .guarded import Guarded, Result, bits, watched
from .problems import Brought, RunOptions
from .random_cases import Limits, drawn, random_case, random_fields, unflattened, with_defaults
from .wrapper_trial import Verdict, judged

_ABSENT = ("window_left", "soft_cap", "position", "rope_scale", "rope_theta", "sinks",
           "head_scales", "fixed_split_size", "disable_split_kv", "batch_invariant",
           "q_quantization")  # fmt: skip


class Ends(enum.Enum):
    """The form of the arrays of offsets."""

    WITH = "with"  # [batch_size + 1]
    WITHOUT = "without"  # [batch_size]
    NONE = "none"  # one request needs none


class Lse(enum.Enum):
    """The memory of the log-sum-exp."""

    ABSENT = "absent"  # the library's own
    PADDED = "padded"  # [batch_size, max_token_per_sequence, num_qo_heads]
    ROWS = "rows"  # [rows of q, num_qo_heads], with batch_offsets_stats


@dataclasses.dataclass(frozen=True)
class CudnnCall(RunOptions):
    """Arguments and forms of a case's call."""

    apart: bool = drawn(False, True)  # requests anywhere, in any order, in each tensor in another
    units: str = drawn("elements", "tokens")
    ends: Ends = drawn(Ends.WITH, *Ends)
    own_v_and_o: bool = drawn(True, False)  # their offsets are given; else k's and q's hold
    lengths: bool = drawn(True, False)  # given; else the offsets tell them
    four_dims: bool = drawn(False, False, True)  # lengths are [batch_size, 1, 1, 1]
    index_dtype: torch.dtype = drawn(torch.int32, torch.int64)
    index_on_device: bool = drawn(False, True)
    stats: bool = drawn(False, False, True)  # batch_offsets_stats is given
    out: Brought = drawn(*Brought)
    lse: Lse = drawn(*Lse)
    return_lse: bool = drawn(*[True] * 4, False)
    spare_length: int = drawn(0, 0, 1, 33)  # by which the longest lengths are exceeded
    capturable: bool = drawn(False, True)
    workspace: int = drawn(1 << 20, 1 << 12, 0)
    repeat: bool = drawn(*[False] * 4, True)  # two calls give the same bits


@dataclasses.dataclass(frozen=True)
class CudnnProblem:
    """A case without options that the function lacks; `layout` is that of its keys' memory."""

    case: Case
    call: CudnnCall
    seed: int

    @property
    def capturable(self) -> bool:
        """True if a graph may capture the call: ragged k and v have no gaps then."""
        return self.call.capturable and (self.case.paged or not self.call.apart)

    @property
    def pipeline(self) -> Pipeline:
        causal = self.case.mask is MaskKind.CAUSAL
        return self.call.scaled(Pipeline(sm_scale=self.case.scale, causal=causal))


def draw(seed: int, index: int, limits: Limits) -> CudnnProblem:
    """Draws problem `index` of `seed`."""
    rng = random.Random(f"cudnn {seed} {index}")
    case = with_defaults(unflattened(random_case(rng, "problem", limits)), _ABSENT)
    mask = rng.choice([MaskKind.NONE, MaskKind.CAUSAL, MaskKind.CAUSAL])
    case = dataclasses.replace(case, mask=mask, layout="HND" if case.paged else "NHD")
    call = _possible(CudnnCall(**random_fields(rng, CudnnCall)), case)
    return CudnnProblem(case, call, rng.randrange(2**31))


def _possible(call: CudnnCall, case: Case) -> CudnnCall:
    """Returns the call with forms of its arguments that go together."""
    if call.ends is Ends.NONE and case.batch_size > 1:
        call = dataclasses.replace(call, ends=Ends.WITH)
    in_tokens, apart = call.units == "tokens", call.apart and call.ends is not Ends.NONE
    told = in_tokens and call.ends is Ends.WITH and not apart and not case.paged
    return dataclasses.replace(
        call,
        apart=apart,
        own_v_and_o=call.own_v_and_o or apart or not in_tokens,  # k's and q's are tokens
        lengths=call.lengths or not told,
        lse=Lse.PADDED if call.lse is Lse.ROWS and not call.stats else call.lse,
    )


class _Places(NamedTuple):
    """Positions of the requests in one tensor, in tokens."""

    starts: list[int]
    lengths: Sequence[int]

    @property
    def ends(self) -> list[int]:
        return [start + length for start, length in zip(*self, strict=True)]

    def rows(self) -> torch.Tensor:
        """Returns row indices of all requests, one after the other."""
        return torch.cat([torch.arange(*ends) for ends in zip(self.starts, self.ends, strict=True)])


def _placed(lengths: Sequence[int], rng: random.Random, call: CudnnCall) -> _Places:
    order = list(range(len(lengths)))
    if call.apart:
        rng.shuffle(order)
    starts, at = [0] * len(lengths), 0 if call.ends is Ends.NONE else rng.choice([0, 0, 1, 5])
    for i in order:
        starts[i] = at
        at += lengths[i] + (rng.choice([0, 0, 1, 4]) if call.apart else 0)
    return _Places(starts, lengths)


@judged
def examine(problem: CudnnProblem, backend: str, device: torch.device) -> Verdict:
    """Makes one call, or two."""
    trial = _Trial(problem, backend, device)
    written = ("out", "lse", "workspace_buffer")
    changed = watched({name: t for name, t in trial.arguments.items() if name not in written})
    first = trial.run()
    expected = reference(trial.made, pipeline=problem.pipeline)
    options = {"lse_base": problem.call.lse_base}
    report = runner.compare(trial.made, first.out, first.lse, expected, **options)
    failures = first.failures + report.failures
    if problem.call.repeat and not trial.run().same_bits(first):
        failures.append("a second call has other bits")
    failures += trial.workspace.failures("workspace") + changed()
    return Verdict(failures, worst=report.worst)


class _Trial:
    """The arguments of a call, and the rows of its results."""

    def __init__(self, problem: CudnnProblem, backend: str, device: torch.device) -> None:
        self._problem, self._call, self._case = problem, problem.call, problem.case
        self._backend, self._device = backend, device
        case, call = self._case, self._call
        self._generator = torch.Generator().manual_seed(problem.seed)
        self.made = inputs.build(case, device=device, generator=self._generator)
        rng = random.Random(problem.seed)
        self._q_at = _placed(case.qo_lens, rng, call)
        self._o_at = _placed(case.qo_lens, rng, call) if call.apart else self._q_at
        self._k_at = _placed(case.kv_lens, rng, call)
        self._v_at = _placed(case.kv_lens, rng, call) if call.apart else self._k_at
        self._longest_q = max(case.qo_lens) + call.spare_length
        self._q, self._k, self._v = self._operands()
        self._stats_at = self._placed_stats(rng) if call.stats else None
        self._out, self._lse = self._outputs()
        self.workspace = guarded.workspace(call.workspace, device)
        self.arguments = self._arguments()

    def _operands(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Makes q, and k and v of ragged requests, with the rows of requests at their places."""
        case, made = self._case, self.made
        rows = max(self._q_at.ends + self._o_at.ends) + SPARE_ROWS
        # More garbage behind rows or behind heads.
        heads = case.num_qo_heads + (2 if case.form is KvForm.HALVES else 0)
        columns = case.head_dim + (PAD_COLUMNS if case.form is KvForm.PADDED else 0)
        q = torch.empty(rows, heads, columns, dtype=case.dtype)
        q = fill_poison(q, self._generator, case.garbage).to(self._device)
        q = q[:, : case.num_qo_heads, : case.head_dim]
        bits(q)[self._q_at.rows()] = bits(made.q)
        if case.paged:
            return q, made.k, made.v
        tokens = max(self._k_at.ends + self._v_at.ends) + SPARE_ROWS
        k, v, _ = inputs.storage(case, (tokens,), self._generator, self._device)
        for t, at, packed in ((k, self._k_at, made.k), (v, self._v_at, made.v)):
            bits(t)[at.rows()] = bits(packed)[: sum(case.kv_lens)]
        return q, k, v

    def _table(self) -> torch.Tensor:
        """Makes tables of pages and garbage; half of them are wider than what is needed."""
        case = self._case
        width = -(-(max(case.kv_lens) + self._call.spare_length) // case.page_size)
        garbage = torch.tensor([-7, 2**30, 2**31 - 1], dtype=torch.int32)
        table = garbage.repeat(case.batch_size, width // 3 + 2)
        for row, pages in zip(table, self.made.page_table, strict=True):
            row[: len(pages)] = torch.tensor(pages)
        table = table.to(self._array([]).device)
        return table if self._problem.seed % 2 else table[:, :width]

    def _placed_stats(self, rng: random.Random) -> _Places:
        """Places the LSE of the requests in as many rows as the padded form has, or as q has."""
        case, room = self._case, self._q.shape[0]
        if self._call.lse is not Lse.ROWS:
            room = case.batch_size * self._longest_q
        at = _placed(case.qo_lens, rng, self._call)
        if max(at.ends) <= room:
            return at
        starts = itertools.accumulate(case.qo_lens[:-1], initial=0)
        return _Places([*starts], case.qo_lens)

    def _outputs(self) -> tuple[Guarded | None, Guarded | None]:
        case, call, out, lse = self._case, self._call, None, None
        rows, heads = self._q.shape[:2]
        if call.out is not Brought.ABSENT:
            shape, strided = (rows, heads, case.dim_vo), call.out is Brought.STRIDED
            where = (case.dtype_o, self._device, case.garbage)
            out = guarded.output(shape, *where, strided=strided, own=self._o_at.rows())
        if call.lse is not Lse.ABSENT:
            shape = (rows, heads)
            own = slice(None) if self._stats_at is None else self._stats_at.rows()
            if call.lse is Lse.PADDED:
                shape, longest = (case.batch_size, self._longest_q, heads), self._longest_q
                own = own if self._stats_at is None else (own // longest, own % longest)
            lse = guarded.output(shape, torch.float32, self._device, case.garbage, own=own)
        return out, lse

    def _arguments(self) -> dict[str, object]:
        case, call = self._case, self._call
        q, k, v = self._q, self._k, self._v
        found = {
            "q": q, "k_cache": k, "v_cache": v, "scale": self._scale(case.scale),
            "max_token_per_sequence": self._longest_q,
            "max_sequence_kv": max(case.kv_lens) + call.spare_length,
            "actual_seq_lens_q": self._lengths(case.qo_lens),
            "actual_seq_lens_kv": self._lengths(case.kv_lens),
            "block_tables": self._table() if case.paged else None,
            "causal": case.mask is MaskKind.CAUSAL, "o_data_type": case.o_dtype,
            "return_lse": call.return_lse, "lse_base": call.lse_base,
            **{f"{x}_scale": self._scale(getattr(call, f"{x}_scale")) for x in "qkv"},
            "batch_offsets_q": self._offsets(self._q_at, q.stride(0)),
            "batch_offsets_stats": None, "batch_offsets_units": call.units,
            "out": None if self._out is None else self._out.given,
            "lse": None if self._lse is None else self._lse.given,
            "workspace_buffer": self.workspace.given, "backend": self._backend,
            "is_cuda_graph_compatible": self._problem.capturable,
        }  # fmt: skip
        if self._stats_at is not None:
            found["batch_offsets_stats"] = self._offsets(self._stats_at, case.num_qo_heads)
        if call.own_v_and_o:
            packed = case.num_qo_heads * case.dim_vo
            width = packed if self._out is None else self._out.given.stride(0)
            found["batch_offsets_o"] = self._offsets(self._o_at, width)
        if not case.paged:
            found["batch_offsets_k"] = self._offsets(self._k_at, k.stride(0))
            if call.own_v_and_o:
                found["batch_offsets_v"] = self._offsets(self._v_at, v.stride(0))
        return found

    def _array(self, values: Sequence[int]) -> torch.Tensor:
        """A call that a graph may capture reads its arrays on the device."""
        on_device = self._call.index_on_device or self._problem.capturable
        where = self._device if on_device else "cpu"
        return torch.tensor(values, dtype=self._call.index_dtype, device=where)

    def _scale(self, value: float | None) -> float | torch.Tensor | None:
        if value is None or not self._call.scales_in_tensors or self._problem.capturable:
            return value
        return torch.tensor([value], dtype=torch.float64, device=self._device)

    def _lengths(self, lengths: Sequence[int]) -> torch.Tensor | None:
        if not self._call.lengths:
            return None
        found = self._array(lengths)
        return found.view(-1, 1, 1, 1) if self._call.four_dims else found

    def _offsets(self, at: _Places, width: int) -> torch.Tensor | None:
        if self._call.ends is Ends.NONE and at is not self._stats_at:
            return None
        with_end = self._call.ends is Ends.WITH or at is self._stats_at
        tokens = at.starts + at.ends[-1:] * with_end
        return self._array(tokens) * (1 if self._call.units == "tokens" else width)

    def run(self) -> Result:
        """Calls once. Returns rows in the oracle's order, and failures other than wrong numbers."""
        out, lse = preflash.cudnn_batch_prefill_with_kv_cache(**self.arguments)
        self.made.variant = _core.last_variant()
        failures = []
        if (lse is not None) != self._call.return_lse:
            failures.append(f"lse is {lse if lse is None else 'returned'}: return_lse")
        if out.dtype != self._case.dtype_o:
            failures.append(f"out is {out.dtype}")
        taken = bits(out)[self._o_at.rows()].view(out.dtype)  # not every torch takes 8-bit floats
        for name, mine, got in (("out", self._out, out), ("lse", self._lse, lse)):
            failures += [] if mine is None else mine.failures(name, got)
        lse = self._lse.given if lse is None and self._lse is not None else lse
        return Result(taken, self._lse_rows(lse, failures), failures)

    def _lse_rows(self, lse: torch.Tensor | None, failures: list[str]) -> torch.Tensor | None:
        """Returns rows of requests; others are -inf, but not in `lse` with batch_offsets_stats."""
        if lse is None:
            return None
        case, longest, at = self._case, self._longest_q, self._stats_at
        if self._lse is None and lse.shape != (case.batch_size, longest, case.num_qo_heads):
            failures.append(f"lse has shape {tuple(lse.shape)}")
            return None
        flat = lse.view(-1, case.num_qo_heads)
        if at is None:
            at = _Places([i * longest for i in range(case.batch_size)], case.qo_lens)
        rows = at.rows().to(lse.device)
        others = flat.index_fill(0, rows, -torch.inf)
        all_written = self._stats_at is None or self._lse is None
        if all_written and not (others == -torch.inf).all():
            failures.append("lse: rows that no request has are not -inf")
        return flat[rows]
