"""`bench --trace FILE`: one launch of one row, work item by work item."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence

import torch

from ... import _core
from .. import CommandError, check_writable
from ..machine import Place
from .measure import Result, Trial, WrongResultError
from .pod import PodRow, checked_call
from .rows import BenchRow
from .timeline import PICTURES, Launch, Timeline, chrome_trace, draw, read_spans, why_no_picture

_MAX_ITEMS = 1 << 20
_RECORD_WORDS = 4


def trace(name: str, place: Place, rows: Sequence[BenchRow]) -> None:
    """Records the first of the rows; name: what --trace was given."""
    paths = _paths(name)
    if not rows:
        raise CommandError(f"--trace {name}: --rows names none of the wrappers or of pod")
    if len(rows) > 1:
        print(f"{rows[0].name}, the first of {len(rows)} rows")
    timeline = _record(rows[0], place)
    print(f"{timeline.title}\n{timeline.summary()}")
    for path in paths:
        if path.suffix == ".json":
            path.write_text(json.dumps(chrome_trace(timeline)) + "\n")
        else:
            draw(timeline, path)
        print(f"wrote {path}")


def _paths(name: str) -> list[pathlib.Path]:
    """What to write: without one of the known endings, both. Refuses what could not be written once
    the work is done."""
    path = pathlib.Path(name)
    if path.suffix not in ("", ".json", *PICTURES):
        raise CommandError(
            f"--trace {name}: {path.suffix} is neither .json nor a picture "
            f"({', '.join(PICTURES)}); a name without an ending writes NAME.json and NAME.png"
        )
    paths = [path] if path.suffix else [path.with_suffix(".json"), path.with_suffix(".png")]
    if paths[-1].suffix in PICTURES and (missing := why_no_picture()):
        instead = path.with_suffix(".json")
        raise CommandError(f"--trace {name}: {missing}, or write --trace {instead}")
    for written in paths:
        check_writable("--trace", written)
    return paths


def _record(row: BenchRow, place: Place) -> Timeline:
    """The second run of the row: the first has been checked and has warmed the machine up."""
    # A launch has the requests of one side of the row, or of all of them.
    cases = [row.case, row.decode] if isinstance(row, PodRow) else [row.case]
    sides, result = [case.qo_lens for case in cases], Result(row)
    try:
        trials = [Trial.of(case, place) for case in cases]
        if isinstance(row, PodRow):
            call = checked_call(result, trials)
        else:
            [call] = trials[0].launchers(trials[0].planned(result))
    except (NotImplementedError, WrongResultError) as error:
        raise CommandError(f"--trace, {row.name}: {error}") from error
    call()
    if _core.item_record_bytes != _RECORD_WORDS * 8:
        raise AssertionError("ItemRecord has changed: change read_spans with it")
    records = torch.zeros(_MAX_ITEMS, _RECORD_WORDS, dtype=torch.int64, device=place.device)
    on_gpu = place.device.type == "cuda"
    recorder = _core.Trace(records.data_ptr(), _MAX_ITEMS, place.device.index if on_gpu else -1)
    place.synchronize()  # the zeros are there before any record
    recorder.start()
    try:
        call()
        place.synchronize()
        found = recorder.launches
    except ValueError as error:
        raise CommandError(f"--trace: {error}") from error
    finally:
        recorder.stop()
    qo_lens = sides if len(found) == len(sides) else [sum(sides, ())] * len(found)
    launches = [Launch(*launch, lens) for launch, lens in zip(found, qo_lens, strict=True)]
    spans = read_spans(records.cpu(), launches)
    ids = tuple(launch.kernel_id for launch in launches)
    processors = {span.processor for span in spans}
    if on_gpu:
        processors |= set(range(_core.device_facts(place.device.index)["num_sms"]))
    return Timeline(
        title=f"{row.name}, {row.dtype_name}: {' then '.join(ids)}, {place.device_name}",
        processor_name="SM" if on_gpu else "thread",
        processors=tuple(sorted(processors)),
        launches=ids,
        spans=spans,
    )
