"""Computes problems of `cudnn_problems`, with garbage in all memory that no request owns, and says
everything that is wrong."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Sequence

import preflash
import torch
from preflash import _core
from preflash.testing import inputs, runner
from preflash.testing.case import KvForm, MaskKind
from preflash.testing.inputs import PAD_COLUMNS, SPARE_PAGES, SPARE_ROWS, fill_poison
from preflash.testing.oracle import Expected, attend, concatenate

from . import guarded
from .cudnn_problems import CudnnCall, CudnnProblem, Ends, Lse
from .guarded import Guarded, Untouched, around_workspace, bits
from .outputs import Result
from .problems import Brought
from .wrapper_trial import Verdict, judged


@dataclasses.dataclass
class _Places:
    """Positions of the requests in one tensor, in tokens."""

    starts: list[int]
    end: int  # behind the last of them in memory

    def rows(self, lengths: Sequence[int]) -> torch.Tensor:
        """Row indices of all requests, one after the other."""
        pairs = zip(self.starts, lengths, strict=True)
        return torch.tensor(
            [row for start, length in pairs for row in range(start, start + length)],
            dtype=torch.long,
        )


def _placed(lengths: Sequence[int], rng: random.Random, call: CudnnCall) -> _Places:
    if call.ends is Ends.NONE:
        return _Places([0], lengths[0])
    order = list(range(len(lengths)))
    if call.apart:
        rng.shuffle(order)
    starts, at = [0] * len(lengths), rng.choice([0, 0, 1, 5])
    for i in order:
        starts[i] = at
        at += lengths[i] + (rng.choice([0, 0, 1, 4]) if call.apart else 0)
    return _Places(starts, at)


class CudnnInputs:
    """The arguments of the call, and what it is expected to do with them."""

    def __init__(self, problem: CudnnProblem, device: torch.device | str) -> None:
        self.problem, self.case, self.device = problem, problem.case, torch.device(device)
        case, call = self.case, problem.call
        self._generator = torch.Generator().manual_seed(problem.seed)
        rng = random.Random(problem.seed)
        self._q_at = _placed(case.qo_lens, rng, call)
        self.o_at = _placed(case.qo_lens, rng, call) if call.apart else self._q_at
        self._k_at = _placed(case.kv_lens, rng, call)
        self._v_at = _placed(case.kv_lens, rng, call) if call.apart else self._k_at
        self._fill()
        self.longest_q = max(case.qo_lens) + call.spare_length
        self._bring_outputs()
        self.stats_at = self._placed_stats(rng) if call.stats else None
        self.arguments = self._arguments()
        self.variant = ""  # of the kernel that ran last

    def expected(self) -> Expected:
        pipeline = self.problem.pipeline
        return concatenate([attend(*request, pipeline) for request in self._requests])

    def _values(self, kind: str, lengths: Sequence[int], heads: int, dim: int):
        return [inputs.values(self.case, kind, n, heads, dim, self._generator) for n in lengths]

    def _fill(self) -> None:
        case = self.case
        q = self._values("q", case.qo_lens, case.num_qo_heads, case.head_dim)
        k = self._values("k", case.kv_lens, case.num_kv_heads, case.head_dim)
        v = self._values("v", case.kv_lens, case.num_kv_heads, case.dim_vo)
        self._requests = [
            (one.to(case.dtype), k.to(case.dtype_kv), v.to(case.dtype_kv))
            for one, k, v in zip(q, k, v, strict=True)
        ]
        self.q = self._query_memory()
        for start, request in zip(self._q_at.starts, self._requests, strict=True):
            self.q[start : start + request[0].shape[0]] = request[0]
        self.table = None
        if case.paged:
            self._fill_pages()
        else:
            self._fill_tokens()
        self.q, self.k, self.v = (_moved(t, self.device) for t in (self.q, self.k, self.v))

    def _query_memory(self) -> torch.Tensor:
        """Garbage [rows, heads, head_dim], with more of it behind rows or behind heads."""
        case = self.case
        rows = max(self._q_at.end, self.o_at.end) + SPARE_ROWS
        heads = case.num_qo_heads + (2 if case.form is KvForm.HALVES else 0)
        columns = case.head_dim + (PAD_COLUMNS if case.form is KvForm.PADDED else 0)
        wide = torch.empty(rows, heads, columns, dtype=case.dtype)
        fill_poison(wide, self._generator, case.garbage)
        return wide[:, : case.num_qo_heads, : case.head_dim]

    def _fill_tokens(self) -> None:
        tokens = max(self._k_at.end, self._v_at.end) + SPARE_ROWS
        self.k, self.v, _ = inputs.storage(self.case, (tokens,), self._generator, "cpu")
        for i, (_, k, v) in enumerate(self._requests):
            for t, at, rows in ((self.k, self._k_at, k), (self.v, self._v_at, v)):
                t[at.starts[i] : at.starts[i] + rows.shape[0]] = rows

    def _fill_pages(self) -> None:
        case = self.case
        size = case.page_size
        counts = [-(-n // size) for n in case.kv_lens]
        leading = (sum(counts) + SPARE_PAGES, size)
        self.k, self.v, _ = inputs.storage(case, leading, self._generator, "cpu")
        pages = torch.randperm(leading[0], generator=self._generator).tolist()
        width = -(-(max(case.kv_lens) + self.problem.call.spare_length) // size)
        garbage = torch.tensor([-7, 2**30, 2**31 - 1], dtype=torch.int32)
        table = garbage.repeat(case.batch_size, width // 3 + 2)  # wider than what is needed
        for i, (_, k, v) in enumerate(self._requests):
            for n in range(counts[i]):
                page = pages.pop()
                table[i, n] = page
                rows = slice(n * size, min((n + 1) * size, case.kv_lens[i]))
                for pool, values in ((self.k, k), (self.v, v)):
                    pool[page, :, : rows.stop - rows.start] = values[rows].transpose(0, 1)
        self.table = table if self.problem.seed % 2 else table[:, :width]

    def _bring_outputs(self) -> None:
        case, call = self.case, self.problem.call
        rows, heads = self.q.shape[0], case.num_qo_heads
        self.out = self.lse = None
        if call.out is not Brought.ABSENT:
            self.out = guarded.output(
                (rows, heads, case.dim_vo),
                case.dtype_o,
                self.device,
                case.garbage,
                strided=call.out is Brought.STRIDED,
            )
        if call.lse is not Lse.ABSENT:
            padded = call.lse is Lse.PADDED
            leading = (case.batch_size, self.longest_q) if padded else (rows,)
            shape = (*leading, heads)
            self.lse = guarded.output(
                shape, torch.float32, self.device, case.garbage, strided=False
            )

    def _placed_stats(self, rng: random.Random) -> _Places:
        """Places the LSE of the requests in as many rows as the padded form has, or as q has."""
        case, call = self.case, self.problem.call
        room = self.q.shape[0]
        if call.lse is not Lse.ROWS:
            room = case.batch_size * self.longest_q
        at = _placed(case.qo_lens, rng, call)
        if at.end <= room:
            return at
        starts = itertools.accumulate(case.qo_lens, initial=0)
        return _Places(list(starts)[:-1], sum(case.qo_lens))

    def _arguments(self) -> dict[str, object]:
        case, call = self.case, self.problem.call
        width_o = case.num_qo_heads * case.dim_vo
        if self.out is not None:
            width_o = self.out.view.stride(0)
        found = {
            "q": self.q,
            "k_cache": self.k,
            "v_cache": self.v,
            "scale": self._scale(case.scale),
            "max_token_per_sequence": self.longest_q,
            "max_sequence_kv": max(case.kv_lens) + call.spare_length,
            "actual_seq_lens_q": self._lengths(case.qo_lens, call.lengths),
            "actual_seq_lens_kv": self._lengths(case.kv_lens, call.lengths),
            "block_tables": None if self.table is None else self.table.to(self._index_device()),
            "causal": case.mask is MaskKind.CAUSAL,
            "return_lse": call.return_lse,
            "q_scale": self._scale(call.q_scale),
            "k_scale": self._scale(call.k_scale),
            "v_scale": self._scale(call.v_scale),
            "batch_offsets_q": self._offsets(self._q_at, case.qo_lens, self.q.stride(0)),
            "batch_offsets_stats": None,
            "batch_offsets_units": call.units,
            "out": None if self.out is None else self.out.given,
            "lse": None if self.lse is None else self.lse.given,
            "is_cuda_graph_compatible": call.capturable,
            "o_data_type": case.o_dtype,
            "lse_base": call.lse_base,
        }
        if self.stats_at is not None:
            found["batch_offsets_stats"] = self._offsets(
                self.stats_at, case.qo_lens, case.num_qo_heads, Ends.WITH
            )
        if call.own_v_and_o:
            found["batch_offsets_o"] = self._offsets(self.o_at, case.qo_lens, width_o)
        if not case.paged:
            found["batch_offsets_k"] = self._offsets(self._k_at, case.kv_lens, self.k.stride(0))
            if call.own_v_and_o:
                width = self.v.stride(0)
                found["batch_offsets_v"] = self._offsets(self._v_at, case.kv_lens, width)
        return found

    def _index_device(self) -> torch.device | str:
        """A call that a graph may capture reads its arrays there."""
        call = self.problem.call
        return self.device if call.index_on_device or call.capturable else "cpu"

    def _scale(self, value: float | None) -> float | torch.Tensor | None:
        call = self.problem.call
        if value is None or not call.scales_in_tensors or call.capturable:
            return value
        return torch.tensor([value], dtype=torch.float64, device=self.device)

    def _lengths(self, lengths: Sequence[int], given: bool) -> torch.Tensor | None:
        if not given:
            return None
        call = self.problem.call
        found = torch.tensor(lengths, dtype=call.index_dtype, device=self._index_device())
        return found.view(-1, 1, 1, 1) if call.four_dims else found

    def _offsets(
        self, at: _Places, lengths: Sequence[int], width: int, ends: Ends | None = None
    ) -> torch.Tensor | None:
        call = self.problem.call
        ends = call.ends if ends is None else ends
        if ends is Ends.NONE:
            return None
        tokens = list(at.starts)
        if ends is Ends.WITH:
            tokens.append(at.starts[-1] + lengths[-1])
        found = torch.tensor(tokens, dtype=call.index_dtype)
        if call.units == "elements":
            found *= width
        return found.to(self._index_device())


def _moved(t: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies to the device with the same strides, and the same garbage between the rows."""
    if t.device == device:
        return t
    whole = torch.empty(0, dtype=t.dtype).set_(t.untyped_storage()).to(device)
    return whole.as_strided(t.shape, t.stride(), t.storage_offset())


@judged
def examine(problem: CudnnProblem, backend: str, device: torch.device) -> Verdict:
    """Makes one call, or two."""
    call = problem.call
    if call.apart and not problem.case.paged:
        # With is_cuda_graph_compatible=True ragged requests lie one after the other in k and v.
        call = dataclasses.replace(call, capturable=False)
        problem = dataclasses.replace(problem, call=call)
    made = CudnnInputs(problem, device)
    tensors = {name: t for name, t in made.arguments.items() if isinstance(t, torch.Tensor)}
    untouched = Untouched({name: t for name, t in tensors.items() if name not in ("out", "lse")})
    workspace = guarded.workspace(call.workspace, device)
    trial = _Trial(made, workspace, backend)
    first = trial.run()
    failures = first.failures
    report = runner.compare(made, first.out, first.lse, made.expected(), lse_base=call.lse_base)
    failures += report.failures
    if call.repeat and not trial.run().same_bits(first):
        failures.append("a second call has other bits")
    failures += around_workspace(workspace) + untouched.changed()
    return Verdict(failures, worst=report.worst)


class _Trial:
    """Calls of one problem."""

    def __init__(self, made: CudnnInputs, workspace: Guarded, backend: str) -> None:
        self._made, self._workspace, self._backend = made, workspace, backend
        self._before = [None if t is None else t.view.clone() for t in (made.out, made.lse)]

    def run(self) -> Result:
        """Calls once. Returns the rows of requests, on the CPU and in the oracle's order, and all
        failures other than wrong numbers."""
        made, call = self._made, self._made.problem.call
        out, lse = preflash.cudnn_batch_prefill_with_kv_cache(
            **made.arguments, workspace_buffer=self._workspace.view, backend=self._backend
        )
        made.variant = _core.last_variant()
        if made.device.type == "cuda":
            torch.cuda.synchronize(made.device)
        failures = []
        if (lse is not None) != call.return_lse:
            failures.append(f"lse is {lse if lse is None else 'returned'}: {call.return_lse=}")
        for name, mine, got in (("out", made.out, out), ("lse", made.lse, lse)):
            failures += [] if mine is None else mine.failures(name, got)
        if out.dtype != made.case.dtype_o:
            failures.append(f"out is {out.dtype}")
        rows = made.o_at.rows(made.case.qo_lens).to(made.device)
        if made.out is not None and _changed(out, self._before[0], rows):
            failures.append("out: rows that no request has are written")
        lse = made.lse.given if lse is None and made.lse is not None else lse
        taken = bits(out)[rows].view(out.dtype)  # not every torch takes rows of 8-bit floats
        return Result(taken.cpu(), self._lse_rows(lse, failures), failures)

    def _lse_rows(self, lse: torch.Tensor | None, failures: list[str]) -> torch.Tensor | None:
        if lse is None:
            return None
        made, case = self._made, self._made.case
        padded = (case.batch_size, made.longest_q, case.num_qo_heads)
        if made.lse is None and tuple(lse.shape) != padded:
            failures.append(f"lse has shape {tuple(lse.shape)}")
            return None
        flat = lse.view(-1, case.num_qo_heads)
        at = made.stats_at
        if at is None:
            at = _Places([i * made.longest_q for i in range(case.batch_size)], flat.shape[0])
        rows = at.rows(case.qo_lens).to(made.device)
        if made.stats_at is not None and made.lse is not None:
            if _changed(flat, self._before[1].view_as(flat), rows):
                failures.append("lse: rows that no request has are written")
        elif not (_others(flat, rows) == -torch.inf).all():
            failures.append("lse: rows that no request has are not -inf")
        return flat[rows].cpu()


def _others(t: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    keep = torch.ones(t.shape[0], dtype=torch.bool, device=t.device)
    return t[keep.index_fill(0, rows, False)]


def _changed(t: torch.Tensor, before: torch.Tensor, rows: torch.Tensor) -> bool:
    """True if any bit outside `rows` has changed."""
    return not torch.equal(_others(bits(t), rows), _others(bits(before), rows))
