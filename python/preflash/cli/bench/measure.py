"""Measures a row: checks every call against the oracle, then times all of them together."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from ...testing import Report, runner, timing
from ...testing.case import Case, flops
from ..batches import Sample, batches
from ..console import Table
from ..machine import Place
from .baselines import READ, WORKSPACE_BYTES, Call, baselines_of
from .rows import BenchRow, Metric

Calls = dict[str, Sequence[Call]]  # by name; each has one for every set of inputs

OURS = "preflash"
BASE = "base"  # ours, on the case that the row is relative to

# The calls rotate over sets of inputs that together exceed every last-level cache.
_ROTATION_BYTES = 192 * 1024 * 1024
_MAX_SETS = 16
_ROWS_PER_REQUEST = 3
# A baseline may round where preflash does not; beyond four times the bound it is another function.
_BASELINE_SLACK = 4.0
_LEGEND = (
    "(1.20x): preflash is 1.20 times as fast. TFLOP/s counts kept pairs: half for causal. of base: "
    "speed beside the plain case of the row (without pages, without options), timed again in turns."
)


@dataclass
class Result:
    """The measurements of one row; `absent` says why a call was not timed."""

    row: BenchRow
    variant: str = ""
    launches: int = 0  # of a POD row
    us: dict[str, float] = field(default_factory=dict)  # time by call name
    absent: dict[str, str] = field(default_factory=dict)
    baselines: list[str] = field(default_factory=list)  # names of calls that are not ours
    distance: dict[str, float] = field(default_factory=dict)
    plan_us: float | None = None
    run_cpu_us: float | None = None  # on a GPU: time of the calling thread
    error_ratio: float | None = None  # of preflash: largest error divided by its bound
    failure: str = ""

    def speed(self, name: str) -> float:
        """The speed of a call in the row's metric."""
        seconds = self.us[name] * 1e-6
        if self.row.metric is Metric.GBPS:
            return self.row.bytes() / seconds / 1e9
        return flops(self.row.case) / seconds / 1e12


class WrongResultError(RuntimeError):
    """A call computed something else than attention."""


def measured(
    calls_of: Callable[[Result, Place, int], Calls], row: BenchRow, place: Place, repeats: int
) -> Result:
    """Times what `calls_of` has checked: the medians of interleaved kernel times on a GPU, of wall
    times on the CPU."""
    result = Result(row)
    with _noted(result):
        _time(result, place, repeats, calls_of(result, place, repeats))
    return result


@contextlib.contextmanager
def _noted(result: Result) -> Iterator[None]:
    """Notes preflash's errors in the result, so that baselines and other rows still count."""
    try:
        yield
    except NotImplementedError as error:
        result.absent[OURS] = str(error)
    except RuntimeError as error:
        result.failure = str(error)


def _time(result: Result, place: Place, repeats: int, calls: Calls) -> None:
    replays = {}
    for name, rotated in calls.items():
        turns = itertools.cycle(rotated)
        call = functools.partial(lambda turns: next(turns)(), turns)
        if place.device.type == "cpu":
            result.us[name] = timing.cpu_wall_time(call, min_samples=repeats)
            continue
        try:
            replays[name] = timing.GraphReplay(call, max(result.row.calls_per_graph, len(rotated)))
        except RuntimeError as error:
            if name in result.baselines:
                result.absent[name] = str(error).splitlines()[0]
            else:
                result.failure = str(error)
    result.us |= timing.interleaved(replays, repeats)


class Trial:
    """Sets of inputs of one case, and the oracle's answer for sampled rows of the first one."""

    def __init__(self, case: Case, place: Place, num_sets: int = 1) -> None:
        self.place = place
        self.sets = list(itertools.islice(batches(case, place.device), num_sets))
        self._sample = Sample(case.qo_lens, _ROWS_PER_REQUEST)
        self._expected = self._sample.expected(self.sets[0])

    def report(self, out: torch.Tensor, lse: torch.Tensor | None = None) -> Report:
        """Compares a result for the first set of inputs with the oracle's."""
        lse = None if lse is None else self._sample.of(lse)
        return runner.compare(self.sets[0], self._sample.of(out), lse, self._expected)

    def check(self, out: torch.Tensor, lse: torch.Tensor) -> float:
        """The largest error divided by its bound."""
        report = self.report(out, lse)
        if not report.ok:
            raise WrongResultError(f"{self.sets[0].case.name}: {report}")
        return report.worst

    def planned(self, result: Result):
        """Plans our wrapper, and checks its first result."""
        wrapper = runner.planned(self.sets[0], backend=self.place.backend, size=WORKSPACE_BYTES)
        result.variant = wrapper.variant
        result.error_ratio = self.check(*runner.run(wrapper, self.sets[0]))
        return wrapper

    def launchers(self, wrapper) -> list[Call]:
        return [runner.launcher(wrapper, inputs) for inputs in self.sets]


def row_calls(result: Result, place: Place, repeats: int) -> Calls:
    """preflash and every baseline on the same inputs. Where ours fails, baselines count."""
    row, calls = result.row, {}
    num_sets = min(_MAX_SETS, -(-_ROTATION_BYTES // row.bytes()))
    trial = Trial(row.case, place, num_sets)
    with _noted(result):
        wrapper = trial.planned(result)
        calls[OURS] = trial.launchers(wrapper)
        plan = functools.partial(runner.plan, wrapper, trial.sets[0], non_blocking=True)
        device = place.device.type
        result.plan_us = timing.cpu_call_time(plan, calls=5, samples=repeats, device=device)
        if device == "cuda":
            run = runner.launcher(wrapper, trial.sets[0])
            result.run_cpu_us = timing.cpu_call_time(run, calls=20, samples=repeats)
        if row.relative_to is not None:
            base = Trial(row.relative_to, place, num_sets)
            calls[BASE] = base.launchers(base.planned(Result(row)))
    for name, prepare in baselines_of(row, place.device).items():
        result.baselines.append(name)
        try:
            calls[name] = [prepare(inputs) for inputs in trial.sets]
            out = calls[name][0]()
            report = Report() if name == READ else trial.report(out)
            if not bool(out.isfinite().all()) or report.worst_ratio > _BASELINE_SLACK:
                raise WrongResultError(f"differs from the oracle: {report}")
        except RuntimeError as error:
            calls.pop(name, None)
            result.absent[name] = str(error).splitlines()[0]
    return calls


def row_table(results: list[Result]) -> str:
    # In the order in which they first appear.
    baselines = list(dict.fromkeys(name for result in results for name in result.baselines))
    text = dict.fromkeys(["row", "dtype", "unit"], "")
    speeds = dict.fromkeys([OURS, *baselines], ".4g")
    times = {"of base": ".2f", "us": ".1f", "plan us": ".0f", "run CPU us": ".1f"}
    table = Table({**text, **speeds, **times, "error / allowed": ".2f"})
    for result in results:
        us, row = result.us.get(OURS), result.row
        of_base = result.us[BASE] / us if us and BASE in result.us else None
        ours = "WRONG" if result.failure else result.speed(OURS) if us else "not compiled"
        speeds = (ours, *(_baseline_cell(result, name) for name in baselines))
        about = (row.name, row.dtype_name, row.metric.value)
        times = (of_base, us, result.plan_us, result.run_cpu_us)
        table.add(*about, *speeds, *times, result.error_ratio)
    notes = {f"not timed: {name}: {why}" for one in results for name, why in one.absent.items()}
    return "\n".join([f"{table}\n", _LEGEND, *sorted(notes)])


def _baseline_cell(result: Result, name: str) -> str | None:
    """A baseline's speed and, in brackets, how many times as fast preflash is."""
    if name not in result.us:
        return None
    speed = result.speed(name)
    ratio = f" ({result.speed(OURS) / speed:.2f}x)" if OURS in result.us else ""
    return f"{speed:.4g}{ratio}"
