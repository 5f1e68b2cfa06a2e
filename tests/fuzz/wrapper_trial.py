"""Computes one random problem through the public functions and says everything that is wrong.

Numbers are compared with the float64 oracle. Memory that is not an output's stays as it is: inputs,
what lies around outputs, what lies around the workspace, which has exactly the bytes that
workspace_size() asks for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import prepass_policy
import torch
import wrapper_options
from preflash import _core
from preflash.testing import runner
from preflash.testing.case import Case, MaskKind, Position
from preflash.testing.inputs import Inputs, build
from preflash.testing.oracle import reference

from . import guarded
from .altered_inputs import lone, part, recycle, spoil, surrounded, with_bounds
from .guarded import GivenOutputs, Guarded, Result, watched_inputs
from .problems import Also, Call, Entry, Integers, Problem, RunOptions, Scratch

_MOST_ALONE = 4  # requests of a batch that are computed again
ARRAYS = ("qo_indptr", "kv_indptr", "indices", "last_page_len")
# Options between q k^T and the softmax, and the values that leave them out.
NEUTRAL = {
    "causal": False,
    "window_left": -1,
    "logits_soft_cap": None,
    "pos_encoding_mode": "NONE",
    "rope_scale": None,
    "rope_theta": None,
    "sm_scale": None,
}


@dataclass
class Verdict:
    """Outcome of a problem; nothing is wrong with its result if `failures` is empty."""

    failures: list[str] = field(default_factory=list)
    not_compiled: str = ""  # the refusal, where this build holds no kernel for the problem
    worst: float = 0.0  # the largest error as a part of what is allowed


def judged(compute: Callable[..., Verdict]) -> Callable[..., Verdict]:
    """Makes examine(problem, backend=, device=), in which an exception is a failure."""

    def examine(problem, *, backend: str, device: torch.device | str = "cpu") -> Verdict:
        try:
            # The problems are small: torch's own threads would cost more than they bring.
            with _threads(1), _poisoned_memory():
                return compute(problem, backend, torch.device(device))
        except Exception as error:
            # The CPU backend is always built whole.
            missing = isinstance(error, NotImplementedError) and "compiled" in str(error)
            if backend != "cpu" and missing:
                return Verdict(not_compiled=str(error))
            return Verdict([f"{type(error).__name__}: {error}"])

    return examine


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _poisoned_memory() -> Iterator[None]:
    """Makes torch fill each new tensor with NaN, so that values that nothing wrote are visible."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@judged
def examine(problem: Problem, backend: str, device: torch.device) -> Verdict:
    """Computes the problem by the wrappers for prefill."""
    call = problem.call
    with prepass_policy.forced(call.copies.value):
        inputs = _build(problem, device)
        # With rounded queries, too, where they may be: the kernel decides.
        rounds = [False, True] if inputs.case.q_quantization == "row" else [False]
        pipeline = call.scaled(inputs.pipeline)
        pipelines = [dataclasses.replace(pipeline, quantizes_q=rounded) for rounded in rounds]
        expected = [reference(inputs, pipeline=one) for one in pipelines]
        recycle(inputs)
        changed = watched_inputs(inputs)
        made = Trial(problem, inputs, backend)
        result = made.run()
        wanted = expected[inputs.pipeline.quantizes_q]
        report = runner.compare(inputs, result.out, result.lse, wanted, lse_base=call.lse_base)
        failures = report.failures + result.failures
        if problem.also in _CHECKS:
            failures += _CHECKS[problem.also](made, result)
    if made.workspace is not None:
        failures += made.workspace.failures("workspace")
    return Verdict(failures + changed(), worst=report.worst)


def _build(problem: Problem, device: torch.device) -> Inputs:
    index_device = device if problem.call.index_on_device else "cpu"
    inputs = build(problem.case, device=device, index_device=index_device, seed=problem.seed)
    add_garbage(inputs)
    return inputs


def add_garbage(inputs: Inputs) -> None:
    """Writes garbage where index arrays and masks are longer than what counts."""
    if inputs.indices is not None:
        beyond = inputs.indices.new_full((3,), 2**31 - 1)
        inputs.indices = torch.cat([inputs.indices, beyond])
        inputs.last_page_len = inputs.last_page_len.clone()
        pages = inputs.kv_indptr.diff().to(inputs.last_page_len.device)
        inputs.last_page_len[pages == 0] = -(2**31)
    if inputs.packed_custom_mask is not None:  # ones behind the last element of every request
        inputs.packed_custom_mask, end = inputs.packed_custom_mask.clone(), 0
        for mask in inputs.masks:
            end += -(-mask.numel() // 8)
            if used := mask.numel() % 8:
                inputs.packed_custom_mask[end - 1] |= 255 & ~((1 << used) - 1)


def _integers(mask: torch.Tensor, call: Call) -> torch.Tensor:
    """Returns a dense mask as the integers of the call, or as it is."""
    if call.integers is Integers.NONE:
        return mask
    dtype = getattr(torch, call.integers.value)
    limits = torch.iinfo(dtype)
    kept = [1, -1, limits.min, limits.max, *(n for n in (1 << 8, 1 << 32) if n < limits.max)]
    values = torch.tensor(kept, dtype=dtype)[torch.arange(mask.numel()) % len(kept)]
    values = values * (mask != 0).cpu()
    return values.to(mask.device) if call.index_on_device else values


def _block_table(inputs: Inputs) -> torch.Tensor:
    """Returns the pages as the first columns of a wider table, with numbers of no page."""
    counts = inputs.kv_indptr.diff().tolist()
    table = inputs.indices.new_full((len(counts), 2 * max(counts) + 2), 2**31 - 1)
    pages = inputs.indices[int(inputs.kv_indptr[0]) :]
    for row, own in zip(table, pages[: sum(counts)].split(counts), strict=True):
        row[: len(own)] = own
    return table[:, : max(counts) + 1]


def _longer(mask: torch.Tensor | None, inputs: Inputs) -> torch.Tensor | None:
    """Returns the mask in a longer buffer. A packed one of the dense size would be refused."""
    if mask is None:
        return None
    dense = sum(one.numel() for one in inputs.masks)
    more = 10 if mask.numel() + 9 == dense else 9
    return torch.cat([mask, mask.new_ones(more)]).view(1, -1, 1)


def inverted_mask(inputs: Inputs) -> torch.Tensor:
    """Returns the dense inverse of all masks, which a packed mask beside it makes ineffective."""
    return ~torch.cat([mask.flatten() for mask in inputs.masks])


def _given(call: Call, inputs: Inputs) -> Inputs:
    """Returns the wrapper's inputs: in larger arrays, with masks and bounds as the call says."""
    given = surrounded(inputs, call.padding)
    masks = {"custom_mask": given.custom_mask, "packed_custom_mask": given.packed_custom_mask}
    if call.other_mask:
        masks["custom_mask"] = inverted_mask(inputs)
    if masks["custom_mask"] is not None:
        masks["custom_mask"] = _integers(masks["custom_mask"], call)
    if call.long_mask:
        masks = {name: _longer(mask, inputs) for name, mask in masks.items()}
    given = dataclasses.replace(given, **masks)
    given = with_bounds(given) if call.bounds and inputs.case.paged else given
    if call.columns:
        arrays = {name: getattr(given, name) for name in ARRAYS if getattr(given, name) is not None}
        columns = {name: torch.stack([t, ~t], 1)[:, 0] for name, t in arrays.items()}
        given = dataclasses.replace(given, **columns)
    return dataclasses.replace(given, indices=_block_table(given)) if call.table else given


def scale_arguments(
    call: RunOptions, device: torch.device, names: Sequence[str] = ("q_scale", "k_scale", "v_scale")
) -> dict[str, float | torch.Tensor | None]:
    """Returns a call's scales, as tensors where the call says so."""
    found = {name: getattr(call, name) for name in names}
    if not call.scales_in_tensors:
        return found
    return {n: x if x is None else torch.tensor([x], device=device) for n, x in found.items()}


class Trial:
    """A problem ready to run: its wrapper planned, with a workspace that holds NaN."""

    def __init__(self, problem: Problem, inputs: Inputs, backend: str) -> None:
        self.problem, self.call, self.backend = problem, problem.call, backend
        self.inputs, self.device = inputs, inputs.q.device
        self.given = _given(problem.call, inputs)
        self.workspace: Guarded | None = None
        self.wrapper = None
        if self.call.entry is not Entry.SINGLE:
            with _threads(self.call.threads):
                self._plan()

    def another(self, inputs: Inputs, **changes) -> Trial:
        """Returns a trial with a wrapper of its own. changes: other values of the call's fields."""
        call = dataclasses.replace(self.call, **changes)
        return Trial(dataclasses.replace(self.problem, call=call), inputs, self.backend)

    def _plan(self) -> None:
        part = {Scratch.WHOLE: 1.0, Scratch.HALF: 0.5, Scratch.NONE: 0.0}[self.call.scratch]
        if self.call.entry is Entry.FORWARD and self.inputs.case.fixed_split_size is not None:
            part = 1.0  # forward() may need more than the plan
        num_bytes = int(self._workspace_bytes() * part)
        while True:  # copies that fit the bytes of a refusal may need more beside them
            try:
                return self._plan_in(num_bytes)
            except ValueError as error:
                refused = re.search(rf"buffer has {num_bytes} .* needs (\d+) bytes", str(error))
                if refused is None or int(refused[1]) <= num_bytes:
                    raise
                num_bytes = int(refused[1])

    def _plan_in(self, num_bytes: int) -> None:
        self.workspace = guarded.workspace(num_bytes, self.device)
        self.wrapper = self._wrapper(self.workspace.given)
        if self.problem.also is Also.REPLAN:  # with heads and options of which none may stay
            if not self.call.graph:
                case = self.inputs.case
                kept = {"page_size": case.page_size, "layout": case.layout}
                other = Case("other", (9, 2), (5, 0), 5, 1, 40, mask=MaskKind.CUSTOM, **kept)
                runner.plan(self.wrapper, build(other, device=self.device))
            runner.plan(self.wrapper, self.given, **self._something_else())
            runner.run(self.wrapper, self.given, sinks=None, v_scale=3.0)
        hints = wrapper_options.hints(self.inputs) if self.call.hints else {}
        options = {**self._plan_overrides(), **self._bounds(), **hints}
        runner.plan(self.wrapper, self.given, **options)

    def _wrapper(self, buffer: torch.Tensor):
        graph = wrapper_options.graph_options(self.given) if self.call.graph else {}
        where = {"backend": self.backend, "device": self.device, "buffer": buffer}
        return runner.make_wrapper(self.inputs.case, **where, **graph)

    def _plan_overrides(self) -> dict[str, object]:
        """Returns options that plan() gets otherwise, because a later call is given them."""
        if self.call.entry is Entry.FORWARD:
            other = NEUTRAL | self._something_else()
            if self.inputs.case.position is Position.ROPE:
                other |= {"pos_encoding_mode": "ROPE_LLAMA", "rope_scale": 2.0, "rope_theta": 77.0}
            if self.call.bounds:  # a window and a fixed split do not go together there
                other["window_left"] = -1
            return {name: other[name] for name in self._logits_options()}
        return {"window_left": -1} if self.call.window_at_run else {}

    def _bounds(self) -> dict[str, object]:
        """Returns options of plan() where it has upper bounds of the keys."""
        if not self.call.bounds:
            return {}
        lens = torch.tensor(self.inputs.case.kv_lens, dtype=torch.int32, device=self.device)
        return {"seq_lens": lens, "lengths_are_upper_bounds": True}

    def _workspace_bytes(self) -> int:
        """Returns bytes for the options of plan() and for those of the later call."""
        probe = self._wrapper(runner.workspace(self.device, 0))
        positional, options = runner.plan_arguments(self.given)
        plans = [self._bounds(), self._plan_overrides() | self._bounds()]
        if self.problem.also is Also.REPLAN:
            plans.append(self._something_else())
        return max(probe.workspace_size(*positional, **{**options, **one})[0] for one in plans)

    def _something_else(self) -> dict[str, object]:
        """Returns other options of plan()."""
        case = self.inputs.case
        pairs = sum(a * b for a, b in zip(case.qo_lens, case.kv_lens, strict=True))
        mask = torch.zeros(pairs, dtype=torch.bool, device=self.device)
        return {
            "custom_mask": None if case.has_custom_mask else mask,
            "packed_custom_mask": None,
            "causal": case.mask is not MaskKind.CAUSAL,
            "window_left": 3 if case.window_left < 0 else -1,
            "logits_soft_cap": None if case.soft_cap else 0.7,
            "sm_scale": 0.1,
            "disable_split_kv": True,
        }

    def run(self) -> Result:
        """Runs once into fresh outputs."""
        call = self.call
        form = (call.lse_layout, call.padding)
        outputs = GivenOutputs(self.inputs, *form, out=call.out, lse=call.lse)
        with _threads(call.threads):
            returned = self.compute(out=outputs.out, lse=outputs.lse)
            self.inputs.variant = _core.last_variant()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return outputs.settle(returned, with_lse=call.return_lse)

    def compute(self, **outputs):
        """Calls the public function, with the options of the problem and these outputs."""
        call = self.call
        if call.entry is Entry.FORWARD:
            return self._forward()
        options = {name: getattr(call, name) for name in ("return_lse", "lse_base", "lse_layout")}
        options |= scale_arguments(call, self.device) | outputs
        if call.window_at_run:
            options["window_left"] = self.inputs.case.window_left
        if call.skip_factor:
            options["skip_softmax_threshold_scale_factor"] = call.skip_factor
        if call.entry is Entry.SINGLE:
            if (mask := self.given.custom_mask) is not None:
                shape = (-1,) if call.long_mask else self.inputs.masks[0].shape
                options["custom_mask"] = mask.view(shape)
            return runner.single(self.inputs, backend=self.backend, **options)
        return runner.run(self.wrapper, self.given, **options)

    def _forward(self):
        inputs = self.given
        kv = (inputs.cache,) if inputs.case.paged else (inputs.k, inputs.v)
        name = "forward_return_lse" if self.call.return_lse else "forward"
        scales = scale_arguments(self.call, self.device, ("k_scale", "v_scale"))
        return getattr(self.wrapper, name)(inputs.q, *kv, **self._logits_options(), **scales)

    def _logits_options(self) -> dict[str, object]:
        """Returns options of plan() that forward() has, too."""
        _, options = runner.plan_arguments(self.given)
        return {name: options[name] for name in NEUTRAL if name in options}


def _repeat(trial: Trial, result: Result) -> list[str]:
    """Checks a run after one with other sinks and scales, and a run of another wrapper."""
    if trial.wrapper is not None:
        sinks = torch.zeros(trial.inputs.case.num_qo_heads, device=trial.device)
        runner.run(trial.wrapper, trial.given, sinks=sinks, v_scale=3.0)
    again = {"run": trial, "wrapper": trial.another(trial.inputs)}
    return [f"a second {x} has other bits" for x in again if not again[x].run().same_bits(result)]


def _alone(trial: Trial, result: Result) -> list[str]:
    return [
        f"request {i} has other bits without the rest of its batch"
        for i, own in enumerate(_of_requests(trial, result)[:_MOST_ALONE])
        if not trial.another(lone(trial.inputs, i)).run().same_bits(own)
    ]


def _invariant(trial: Trial, result: Result) -> list[str]:
    """Checks requests alone, their chunks and decode steps, eager or with a graph's buffers."""
    rng, failures = random.Random(trial.problem.seed), _alone(trial, result)
    for i, own in enumerate(_of_requests(trial, result)[:_MOST_ALONE]):
        for begin, end in _parts(rng, trial.inputs.case, i):
            graph = rng.random() < 0.5
            changes = {"graph": graph, "table": trial.call.table and not graph}
            computed = trial.another(part(trial.inputs, i, begin, end), **changes).run()
            if not computed.same_bits(own.rows(begin, end)):
                kind = "with a graph's buffers" if graph else "eager"
                failures.append(f"rows {begin} to {end} of request {i}, {kind}, have other bits")
    return failures


def _parts(rng: random.Random, case: Case, i: int) -> list[tuple[int, int]]:
    """Returns rows of request i: its last one, some others, and chunks that make up the rest."""
    rows = case.qo_lens[i]
    # Rows before the first key see none: a request without keys has no such rows.
    first = max(rows - case.kv_lens[i], 0) if case.mask is MaskKind.CAUSAL else 0
    if rows <= first:
        return []
    ends = sorted({*(rng.randrange(first, rows) + 1 for _ in range(2)), rows})
    singles = {rows - 1, rng.randrange(first, rows)}
    return [*itertools.pairwise([first, *ends]), *((row, row + 1) for row in sorted(singles))]


def _spoilt(trial: Trial, result: Result) -> list[str]:
    spoilt = trial.problem.seed % trial.problem.case.batch_size
    inputs = _build(trial.problem, trial.device)
    spoil(inputs, spoilt)
    others = _of_requests(trial, trial.another(inputs).run())
    return [
        f"request {i} has other bits with garbage in request {spoilt}"
        for i, own in enumerate(_of_requests(trial, result))
        if i != spoilt and not others[i].same_bits(own)
    ]


def _of_requests(trial: Trial, result: Result) -> list[Result]:
    ends = itertools.accumulate(trial.inputs.case.qo_lens, initial=0)
    return [result.rows(*rows) for rows in itertools.pairwise(ends)]


# Also.REPLAN has made its other plan before.
_CHECKS: dict[Also, Callable[[Trial, Result], list[str]]] = {
    Also.REPEAT: _repeat,
    Also.ALONE: _alone,
    Also.INVARIANT: _invariant,
    Also.SPOILT: _spoilt,
}
