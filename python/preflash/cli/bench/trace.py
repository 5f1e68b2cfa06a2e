"""`bench --trace FILE`: one launch of one row, work item by work item, as a picture and as a trace
that ui.perfetto.dev opens."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from ... import _core
from .. import CommandError, check_writable
from ..batches import BatchMaker
from ..machine import Place
from . import gantt, measure
from .chrome_trace import chrome_trace
from .pod import PodResult, PodRow, checked_call
from .rows import Row
from .timeline import Launch, Timeline, read_spans

_MAX_ITEMS = 1 << 20
_RECORD_WORDS = 4
_PICTURES = (".png", ".svg", ".pdf")


@dataclasses.dataclass(frozen=True)
class TraceFiles:
    """What --trace FILE asks for; FILE without one of the known endings is both."""

    trace: pathlib.Path | None
    picture: pathlib.Path | None

    @classmethod
    def of(cls, name: str) -> TraceFiles:
        """Refuses what could not be written once the work is done."""
        path = pathlib.Path(name)
        if path.suffix == ".json":
            files = cls(path, None)
        elif path.suffix in _PICTURES:
            files = cls(None, path)
        elif path.suffix:
            raise CommandError(
                f"--trace {name}: {path.suffix} is neither .json nor a picture "
                f"({', '.join(_PICTURES)}); a name without an ending writes NAME.json and NAME.png"
            )
        else:
            files = cls(path.with_suffix(".json"), path.with_suffix(".png"))
        if files.picture is not None and (missing := gantt.missing()):
            instead = path.with_suffix(".json")
            raise CommandError(f"--trace {name}: {missing}, or write --trace {instead}")
        if not path.parent.is_dir():
            raise CommandError(f"--trace {name}: there is no directory {path.parent}")
        for written in files.paths:
            check_writable("--trace", written)
        return files

    @property
    def paths(self) -> list[pathlib.Path]:
        return [path for path in (self.trace, self.picture) if path is not None]

    def write(self, timeline: Timeline) -> list[pathlib.Path]:
        if self.trace is not None:
            self.trace.write_text(json.dumps(chrome_trace(timeline)) + "\n")
        if self.picture is not None:
            gantt.draw(timeline, self.picture)
        return self.paths


def trace_row(row: Row | PodRow, place: Place) -> Timeline:
    """The second run of the row: the first has been checked and has warmed the machine up."""
    call, sides = _call_of(row, place)
    call()
    _synchronize(place)
    with _recording(place) as recorder:
        call()
        _synchronize(place)
    launches = recorder.launches(sides)
    spans = read_spans(recorder.records.cpu(), launches)
    ids = tuple(launch.kernel_id for launch in launches)
    return Timeline(
        title=f"{row.name}, {_dtype_name(row)}: {' then '.join(ids)}, {place.device_name}",
        processor_name="SM" if place.device.type == "cuda" else "thread",
        processors=_processors(place, {span.processor for span in spans}),
        launches=ids,
        spans=spans,
    )


@dataclasses.dataclass(frozen=True)
class _Recorder:
    records: torch.Tensor  # int64 [_MAX_ITEMS, _RECORD_WORDS]
    trace: _core.Trace

    def launches(self, sides: Sequence[tuple[int, ...]]) -> list[Launch]:
        """sides: the tokens of each request, of each side of the row. A launch has the requests of
        one side, or of all of them."""
        found = self.trace.launches
        of_all = sum(sides, ())
        qo_lens = sides if len(found) == len(sides) else (of_all,) * len(found)
        return [Launch(*launch, lens) for launch, lens in zip(found, qo_lens, strict=True)]


@contextmanager
def _recording(place: Place) -> Iterator[_Recorder]:
    if _core.item_record_bytes != _RECORD_WORDS * 8:
        raise AssertionError("ItemRecord has changed: change read_spans with it")
    records = torch.zeros(_MAX_ITEMS, _RECORD_WORDS, dtype=torch.int64, device=place.device)
    device = place.device.index if place.device.type == "cuda" else -1
    trace = _core.Trace(records.data_ptr(), _MAX_ITEMS, device)
    _synchronize(place)  # the zeros are there before any record
    trace.start()
    try:
        yield _Recorder(records, trace)
    except ValueError as error:
        raise CommandError(f"--trace: {error}") from error
    finally:
        trace.stop()


def _call_of(row: Row | PodRow, place: Place) -> tuple[Callable[[], object], list[tuple[int, ...]]]:
    try:
        if isinstance(row, Row):
            return measure.checked_call(row, place), [row.case.qo_lens]
        result = PodResult(row)
        made = [BatchMaker(case, place.device).make() for case in (row.prefill, row.decode)]
        call = checked_call(result, place, *made)
        if result.failure:
            raise CommandError(f"--trace, {row.name}: {result.failure}")
        return call, [row.prefill.qo_lens, row.decode.qo_lens]
    except (NotImplementedError, measure.WrongResultError) as error:
        raise CommandError(f"--trace, {row.name}: {error}") from error


def _dtype_name(row: Row | PodRow) -> str:
    case = row.case if isinstance(row, Row) else row.prefill
    return str(case.dtype).removeprefix("torch.")


def _processors(place: Place, seen: set[int]) -> tuple[int, ...]:
    if place.device.type == "cuda":
        seen |= set(range(torch.cuda.get_device_properties(place.device).multi_processor_count))
    return tuple(sorted(seen))


def _synchronize(place: Place) -> None:
    if place.device.type == "cuda":
        torch.cuda.synchronize(place.device)
