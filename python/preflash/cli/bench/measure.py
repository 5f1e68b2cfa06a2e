"""One row: make inputs, check every contender's result, then time it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from ...testing import Expected, Inputs, runner, timing
from ...testing.cases import Case, flops
from ..batches import BatchMaker, Sample
from ..machine import Place
from .rivals import RivalCall, rivals_of
from .rows import Metric, Row

Call = Callable[[], torch.Tensor]

OURS = "preflash"
RAGGED = "ragged"  # ours, on the same K/V without pages

_WORKSPACE_BYTES = 256 * 1024 * 1024
# Inputs are rotated over until they are larger than any last-level cache.
_ROTATION_BYTES = 192 * 1024 * 1024
_MOST_SETS = 16
_ROWS_PER_REQUEST = 3
# A rival may round where we do not; what is outside four times our bound is another computation.
_RIVAL_SLACK = 4.0


@dataclass
class Result:
    """What was measured of one row; `absent` tells why a contender was not timed."""

    row: Row
    variant: str = ""
    us: dict[str, float] = field(default_factory=dict)  # by contender, OURS among them
    absent: dict[str, str] = field(default_factory=dict)
    plan_us: float | None = None
    run_cpu_us: float | None = None  # on a GPU: what the calling thread spends
    error_ratio: float | None = None  # of ours: largest error as a part of what is allowed
    failure: str = ""

    def speed(self, contender: str) -> float:
        """In the row's metric."""
        seconds = self.us[contender] * 1e-6
        if self.row.metric is Metric.GBPS:
            return self.row.bytes() / seconds / 1e9
        return flops(self.row.case) / seconds / 1e12


@dataclass(frozen=True)
class _Trial:
    """What every contender of a row gets: the same inputs, the same judge, the same clock."""

    row: Row
    place: Place
    repeats: int
    sets: list[Inputs]
    sample: Sample
    want: Expected  # of the sampled rows of the first set

    @classmethod
    def prepare(cls, row: Row, place: Place, repeats: int) -> _Trial:
        maker = BatchMaker(row.case, place.device)
        num_sets = min(_MOST_SETS, max(1, -(-_ROTATION_BYTES // row.bytes())))
        sets = [maker.make() for _ in range(num_sets)]
        sample = Sample(row.case.qo_lens, _ROWS_PER_REQUEST)
        return cls(row, place, repeats, sets, sample, sample.expected(sets[0]))

    def rotation(self, calls: Sequence[Call]) -> Callable[[], None]:
        """Each call in its turn."""
        turns = itertools.cycle(calls)

        def call() -> None:
            next(turns)()

        return call


def measure_row(row: Row, place: Place, repeats: int) -> Result:
    """Checks ours and every rival on the same inputs, then times them: medians, of kernel times
    taken in turns on a GPU and of wall times on the CPU."""
    result = Result(row)
    trial = _Trial.prepare(row, place, repeats)
    contenders: dict[str, list[Call]] = {}
    try:
        contenders[OURS] = _our_calls(result, trial)
        if row.relative_to is not None:
            contenders[RAGGED] = _ragged_calls(row.relative_to, place, repeats)
    except NotImplementedError as error:
        result.absent[OURS] = str(error)
    except (RuntimeError, _WrongResultError) as error:  # must not hide the rows that follow
        result.failure = str(error)
    for rival in rivals_of(row, place.device):
        try:
            contenders[rival.name] = _rival_calls(rival, trial)
        except (RuntimeError, _WrongResultError) as error:
            result.absent[rival.name] = str(error).splitlines()[0]
    _time(result, trial, contenders)
    return result


class _WrongResultError(Exception):
    """What a contender computed is not attention."""


def _time(result: Result, trial: _Trial, contenders: dict[str, list[Call]]) -> None:
    if trial.place.device.type == "cpu":
        for name, calls in contenders.items():
            call = trial.rotation(calls)
            result.us[name] = timing.cpu_wall_time(call, min_samples=trial.repeats).median_us
        return
    replays = {}
    for name, calls in contenders.items():
        try:
            replays[name] = timing.GraphReplay(trial.rotation(calls), max(10, len(calls)))
        except RuntimeError as error:
            if name in (OURS, RAGGED):
                result.failure = str(error)
            else:
                result.absent[name] = str(error).splitlines()[0]
    for name, taken in timing.in_turns(replays, trial.repeats).items():
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


def _ragged_calls(case: Case, place: Place, repeats: int) -> list[Call]:
    row = Row(case)
    trial = _Trial.prepare(row, place, repeats)
    wrapper = _planned(Result(row), trial)
    return [_our_call(wrapper, inputs) for inputs in trial.sets]


def _planned(result: Result, trial: _Trial):
    """Our wrapper, planned, its first result compared with the oracle's."""
    first, place = trial.sets[0], trial.place
    buffer = runner.workspace(place.device, _WORKSPACE_BYTES)
    wrapper = runner.make_wrapper(
        first.case, backend=place.backend, device=place.device, buffer=buffer
    )
    runner.plan(wrapper, first)
    result.variant = wrapper.variant
    out, lse = runner.run(wrapper, first)
    report = runner.judge(first, trial.sample.of(out), trial.sample.of(lse), trial.want)
    result.error_ratio = max(report.worst_ratio, report.frobenius_ratio, report.lse_ratio)
    if not report.ok:
        raise _WrongResultError(f"{first.case.name}: {report}")
    return wrapper


def _our_call(wrapper, inputs: Inputs) -> Call:
    case = inputs.case
    out = inputs.q.new_empty(inputs.q.shape[0], case.num_qo_heads, case.dim_vo)
    if case.paged:
        return lambda: wrapper.run(inputs.q, inputs.cache, out=out)
    return lambda: wrapper.run(inputs.q, inputs.k, inputs.v, out=out)


def _rival_calls(rival: RivalCall, trial: _Trial) -> list[Call]:
    calls = [rival.prepare(inputs) for inputs in trial.sets]
    out = calls[0]()
    if rival.checked:
        out = trial.sample.of(out)
        report = runner.judge(trial.sets[0], out, None, trial.want)
        if not bool(out.isfinite().all()) or report.worst_ratio > _RIVAL_SLACK:
            raise _WrongResultError(f"another result than the oracle's: {report}")
    return calls
