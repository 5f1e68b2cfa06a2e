"""One row: make inputs, check the results of preflash and of every baseline, then time them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from ...testing import Expected, Inputs, runner, timing
from ...testing.case import Case, flops
from ..batches import BatchMaker, Sample
from ..machine import Place
from .baselines import BaselineCall, baselines_of
from .rows import Metric, Row

Call = Callable[[], torch.Tensor]

OURS = "preflash"
BASE = "base"  # ours, on the case that the row is relative to

_WORKSPACE_BYTES = 256 * 1024 * 1024
# The calls rotate over sets of inputs that together exceed every last-level cache.
_ROTATION_BYTES = 192 * 1024 * 1024
_MAX_SETS = 16
_ROWS_PER_REQUEST = 3
# A baseline may round where preflash does not; beyond four times the bound it is another function.
_BASELINE_SLACK = 4.0


@dataclass
class Result:
    """The measurements of one row; `absent` says why a call was not timed."""

    row: Row
    variant: str = ""
    us: dict[str, float] = field(default_factory=dict)  # by name: OURS, BASE and the baselines
    absent: dict[str, str] = field(default_factory=dict)
    plan_us: float | None = None
    run_cpu_us: float | None = None  # on a GPU: time of the calling thread
    error_ratio: float | None = None  # of ours: largest error divided by its bound
    failure: str = ""

    def speed(self, name: str) -> float:
        """The speed of a call in the row's metric."""
        seconds = self.us[name] * 1e-6
        if self.row.metric is Metric.GBPS:
            return self.row.bytes() / seconds / 1e9
        return flops(self.row.case) / seconds / 1e12


@dataclass(frozen=True)
class _Trial:
    """What all calls of a row share: inputs, expected results and the way they are timed."""

    row: Row
    place: Place
    repeats: int
    sets: list[Inputs]
    sample: Sample
    expected: Expected  # of the sampled rows of the first set

    @classmethod
    def prepare(cls, row: Row, place: Place, repeats: int) -> _Trial:
        maker = BatchMaker(row.case, place.device)
        num_sets = min(_MAX_SETS, max(1, -(-_ROTATION_BYTES // row.bytes())))
        sets = [maker.make() for _ in range(num_sets)]
        sample = Sample(row.case.qo_lens, _ROWS_PER_REQUEST)
        return cls(row, place, repeats, sets, sample, sample.expected(sets[0]))

    def rotation(self, calls: Sequence[Call]) -> Callable[[], None]:
        """A call that runs the given ones one after another, again and again."""
        rotated = itertools.cycle(calls)

        def call() -> None:
            next(rotated)()

        return call


def measure_row(row: Row, place: Place, repeats: int) -> Result:
    """Checks preflash and every baseline on the same inputs, then times them: the median of
    interleaved kernel times on a GPU, of wall times on the CPU."""
    result = Result(row)
    trial = _Trial.prepare(row, place, repeats)
    calls: dict[str, list[Call]] = {}
    try:
        calls[OURS] = _our_calls(result, trial)
        if row.relative_to is not None:
            calls[BASE] = _base_calls(row.relative_to, place, repeats)
    except NotImplementedError as error:
        result.absent[OURS] = str(error)
    except (RuntimeError, WrongResultError) as error:  # the rows that follow still count
        result.failure = str(error)
    for baseline in baselines_of(row, place.device):
        try:
            calls[baseline.name] = _baseline_calls(baseline, trial)
        except (RuntimeError, WrongResultError) as error:
            result.absent[baseline.name] = str(error).splitlines()[0]
    _time(result, trial, calls)
    return result


class WrongResultError(Exception):
    """A call computed something else than attention."""


def _time(result: Result, trial: _Trial, calls: dict[str, list[Call]]) -> None:
    if trial.place.device.type == "cpu":
        for name, rotated in calls.items():
            call = trial.rotation(rotated)
            result.us[name] = timing.cpu_wall_time(call, min_samples=trial.repeats).median_us
        return
    replays = {}
    for name, rotated in calls.items():
        try:
            replays[name] = timing.GraphReplay(trial.rotation(rotated), max(10, len(rotated)))
        except RuntimeError as error:
            if name in (OURS, BASE):
                result.failure = str(error)
            else:
                result.absent[name] = str(error).splitlines()[0]
    for name, taken in timing.interleaved(replays, trial.repeats).items():
        result.us[name] = taken.median_us


def _our_calls(result: Result, trial: _Trial) -> list[Call]:
    wrapper = _planned(result, trial)
    calls = [_our_call(wrapper, inputs) for inputs in trial.sets]
    plan = timing.cpu_call_time(
        lambda: runner.plan(wrapper, trial.sets[0], non_blocking=True),
        calls=5,
        samples=trial.repeats,
        device=trial.place.device.type,
    )
    result.plan_us = plan.median_us
    if trial.place.device.type == "cuda":
        run = timing.cpu_call_time(calls[0], calls=20, samples=trial.repeats)
        result.run_cpu_us = run.median_us
    return calls


def checked_call(row: Row, place: Place) -> Call:
    """Our run of the row, planned; its first result has been compared with the oracle's."""
    trial = _Trial.prepare(row, place, repeats=1)
    return _our_call(_planned(Result(row), trial), trial.sets[0])


def _base_calls(case: Case, place: Place, repeats: int) -> list[Call]:
    row = Row(case)
    trial = _Trial.prepare(row, place, repeats)
    wrapper = _planned(Result(row), trial)
    return [_our_call(wrapper, inputs) for inputs in trial.sets]


def _planned(result: Result, trial: _Trial):
    """Our wrapper, planned; its first result has been compared with the oracle's."""
    first, place = trial.sets[0], trial.place
    make = functools.partial(
        runner.make_wrapper, first.case, backend=place.backend, device=place.device
    )
    size = _WORKSPACE_BYTES
    if first.case.fixed_split_size is not None:  # may need gigabytes
        probe = make(buffer=runner.workspace(place.device, 0))
        positional, options = runner.plan_arguments(first)
        size = max(size, probe.workspace_size(*positional, **options)[0])
    wrapper = make(buffer=runner.workspace(place.device, size))
    runner.plan(wrapper, first)
    result.variant = wrapper.variant
    out, lse = runner.run(wrapper, first)
    report = runner.compare(first, trial.sample.of(out), trial.sample.of(lse), trial.expected)
    result.error_ratio = report.worst
    if not report.ok:
        raise WrongResultError(f"{first.case.name}: {report}")
    return wrapper


def _our_call(wrapper, inputs: Inputs) -> Call:
    case = inputs.case
    out = inputs.q.new_empty(inputs.q.shape[0], case.num_qo_heads, case.dim_vo)
    if case.paged:
        return lambda: wrapper.run(inputs.q, inputs.cache, out=out)
    return lambda: wrapper.run(inputs.q, inputs.k, inputs.v, out=out)


def _baseline_calls(baseline: BaselineCall, trial: _Trial) -> list[Call]:
    calls = [baseline.prepare(inputs) for inputs in trial.sets]
    out = calls[0]()
    if baseline.checked:
        out = trial.sample.of(out)
        report = runner.compare(trial.sets[0], out, None, trial.expected)
        if not bool(out.isfinite().all()) or report.worst_ratio > _BASELINE_SLACK:
            raise WrongResultError(f"differs from the oracle: {report}")
    return calls
