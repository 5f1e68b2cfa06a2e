"""`bench --trace FILE`: when and where each work item of one launch ran, read from the records that
the launch wrote, as a picture, and as a trace that ui.perfetto.dev opens."""

from __future__ import annotations

import dataclasses
import enum
import json
import pathlib
from collections.abc import Iterable, Sequence

import torch

from ... import _core
from ..._check import extras
from .. import CommandError, check_writable
from ..machine import Place
from .measure import Result, Trial, WrongResultError
from .pod import PodRow, checked_call
from .rows import BenchRow


class Kind(enum.Enum):
    PREFILL = "prefill"
    DECODE = "decode"  # of a request with one token


PICTURES = (".png", ".svg", ".pdf")
_MAX_ITEMS = 1 << 20
_RECORD_WORDS = 4
# Told apart by every kind of eye, and in grey.
_COLOURS = {Kind.PREFILL: "#1f6fb4", Kind.DECODE: "#f5a623"}


@dataclasses.dataclass(frozen=True)
class Span:
    """One work item as it ran; microseconds from the start of the first one."""

    begin_us: float
    end_us: float
    processor: int  # the SM; on the CPU the thread
    launch: int
    kind: Kind
    cta: int
    request: int  # of the launch
    kv_head: int
    chunk: int


@dataclasses.dataclass(frozen=True)
class Timeline:
    title: str
    processor_name: str  # "SM", "thread"
    processors: tuple[int, ...]  # also those that ran nothing
    launches: tuple[str, ...]  # ids of their kernels
    spans: tuple[Span, ...]

    @property
    def end_us(self) -> float:
        return max((span.end_us for span in self.spans), default=0.0)

    def lanes(self) -> list[list[list[Span]]]:
        """The lanes of each processor."""
        held: dict[int, list[Span]] = {processor: [] for processor in self.processors}
        for span in self.spans:
            held[span.processor].append(span)
        return [lanes(spans) for spans in held.values()]

    def summary(self) -> str:
        """Sentence on how the processors spent their time."""
        if not self.spans:
            return "no work item ran"
        by_processor = [[span for lane in held for span in lane] for held in self.lanes()]
        ends = sorted(max((span.end_us for span in spans), default=0.0) for spans in by_processor)
        room, name = self.end_us * len(ends), self.processor_name

        def share(*kinds: Kind) -> float:
            busy = sum(_covered(s for s in spans if s.kind in kinds) for spans in by_processor)
            return 100.0 * busy / room if room else 0.0

        shares = [f"{kind.value} {share(kind):.1f} %" for kind in Kind]
        return (
            f"{len(self.spans)} items in {self.end_us:.1f} us on {len(ends)} {name}s: "
            f"{', '.join(shares)}, idle {100.0 - share(*Kind):.1f} %; the first {name} is done at "
            f"{ends[0]:.1f} us, half of them at {ends[len(ends) // 2]:.1f} us"
        )


@dataclasses.dataclass(frozen=True)
class Launch:
    """The range of a launch's records, and the query tokens of each of its requests."""

    kernel_id: str
    first: int
    count: int
    qo_lens: tuple[int, ...]


def read_spans(records: torch.Tensor, launches: Sequence[Launch]) -> tuple[Span, ...]:
    """records: int64 [n, 4] on the CPU, ItemRecord of cpp/include/preflash/item_record.h."""
    spans: list[Span] = []
    ran = [records[launch.first : launch.first + launch.count] for launch in launches]
    ran = [rows[rows[:, 1] > 0] for rows in ran]  # the others did not run
    first = min((int(rows[:, 0].min()) for rows in ran if len(rows)), default=0)
    for number, (launch, rows) in enumerate(zip(launches, ran, strict=True)):
        words, halves = rows.view(torch.int32)[:, 4:7], rows.view(torch.int16)[:, 14:]
        columns = zip(rows[:, :2].tolist(), words.tolist(), halves.tolist(), strict=True)
        for times, (processor, cta, request), (kv_head, chunk) in columns:
            kind = Kind.DECODE if launch.qo_lens[request] == 1 else Kind.PREFILL
            times = [(time - first) / 1e3 for time in times]
            spans.append(Span(*times, processor, number, kind, cta, request, kv_head, chunk))
    return tuple(sorted(spans, key=lambda span: (span.begin_us, span.end_us)))


def lanes(spans: Iterable[Span]) -> list[list[Span]]:
    """The spans of one processor, so that those of a lane follow one another: an SM may hold more
    than one CTA."""
    taken: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: span.begin_us):
        free = next((lane for lane in taken if lane[-1].end_us <= span.begin_us), None)
        if free is None:
            taken.append([span])
        else:
            free.append(span)
    return taken


def _covered(spans: Iterable[Span]) -> float:
    """The time that at least one of them covers."""
    covered, until = 0.0, 0.0
    for begin, end in sorted((span.begin_us, span.end_us) for span in spans):
        covered += max(end - max(begin, until), 0.0)
        until = max(until, end)
    return covered


def chrome_trace(timeline: Timeline) -> dict:
    """The Chrome trace event format: one thread for each processor, and further ones where it holds
    several CTAs. Times are in microseconds, as the format wants them."""
    events = [_metadata("process_name", 0, name=timeline.title)]
    threads: list[tuple[str, list[Span]]] = []
    for processor, held in zip(timeline.processors, timeline.lanes(), strict=True):
        name = f"{timeline.processor_name} {processor:03}"
        several = len(held) > 1
        threads += [
            (f"{name} CTA {number}" if several else name, lane)
            for number, lane in enumerate(held or [[]])
        ]
    for thread, (name, lane) in enumerate(threads):
        events.append(_metadata("thread_name", thread, name=name))
        events.append(_metadata("thread_sort_index", thread, sort_index=thread))
        for span in lane:
            places = ("launch", "cta", "request", "kv_head", "chunk")
            args = {place: getattr(span, place) for place in places}
            args["kernel"] = timeline.launches[span.launch]
            event = {"ph": "X", "pid": 1, "tid": thread, "args": args}
            times = {"ts": round(span.begin_us, 3), "dur": round(span.end_us - span.begin_us, 3)}
            events.append({**event, **times, "name": span.kind.value, "cat": span.kind.value})
    return {
        "traceEvents": events,
        "displayTimeUnit": "ns",
        "otherData": {"title": timeline.title, "summary": timeline.summary()},
    }


def _metadata(what: str, thread: int, **args: object) -> dict:
    return {"ph": "M", "name": what, "pid": 1, "tid": thread, "args": args}


def why_no_picture() -> str:
    """Returns why no picture can be drawn; "" if one can."""
    if extras.is_installed("matplotlib"):
        return ""
    return f"a picture takes matplotlib, which is not installed: {extras.pip_line('matplotlib')}"


def draw(timeline: Timeline, path: pathlib.Path) -> None:
    """One row for each processor, in the format that the file's name ends with."""
    from matplotlib.figure import Figure  # an extra, and slow to import
    from matplotlib.patches import Patch

    rows = len(timeline.processors)
    figure = Figure(figsize=(12.0, min(max(1.6 + 0.055 * rows, 3.0), 12.0)), layout="constrained")
    axes = figure.subplots()
    for row, held in enumerate(timeline.lanes()):
        for number, lane in enumerate(held):
            height = 0.9 / len(held)
            for kind, colour in _COLOURS.items():
                bars = [(s.begin_us, s.end_us - s.begin_us) for s in lane if s.kind is kind]
                place = (row - 0.45 + number * height, height)
                axes.broken_barh(bars, place, facecolor=colour, edgecolor="white", linewidth=0.25)
    kinds = {span.kind for span in timeline.spans}
    handles = [Patch(color=_COLOURS[kind], label=kind.value) for kind in Kind if kind in kinds]
    above = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0)}
    axes.legend(handles=handles, ncols=2, frameon=False, **above)
    ticks = list(range(0, rows, max(rows // 12, 1)))
    axes.set_yticks(ticks, [str(timeline.processors[tick]) for tick in ticks])
    below = "microseconds since the first work item began"
    axes.set(xlabel=below, ylabel=timeline.processor_name)
    axes.set(xlim=(0.0, timeline.end_us or 1.0), ylim=(rows - 0.5, -0.5))
    axes.set_title(timeline.title, fontsize=10, loc="left")
    axes.margins(0)
    figure.savefig(path, dpi=100)


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
    """Files to write: for a name without an ending, .json and .png. Raises CommandError before the
    work for a file that could not be written after it."""
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
    if _core.item_record_bytes != _RECORD_WORDS * 8:
        raise AssertionError("ItemRecord has changed: change read_spans with it")
    result = Result(row)
    try:
        if isinstance(row, PodRow):
            trials = [Trial(case, place) for case in (row.case, row.decode)]
            call = checked_call(result, trials)
        else:
            trials = [Trial(row.case, place)]
            [call] = trials[0].launchers(trials[0].planned(result))
    except (NotImplementedError, WrongResultError) as error:
        raise CommandError(f"--trace, {row.name}: {error}") from error
    call()
    records = torch.zeros(_MAX_ITEMS, _RECORD_WORDS, dtype=torch.int64, device=place.device)
    device = place.device.index if place.device.type == "cuda" else -1
    recorder = _core.Trace(records.data_ptr(), _MAX_ITEMS, device)
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
    # A launch has the requests of one side of the row, or of all of them.
    qo_lens = [trial.sets[0].case.qo_lens for trial in trials]
    if len(found) != len(qo_lens):
        qo_lens = [sum(qo_lens, ())] * len(found)
    launches = [Launch(*launch, lens) for launch, lens in zip(found, qo_lens, strict=True)]
    spans = read_spans(records.cpu(), launches)
    ids = tuple(launch.kernel_id for launch in launches)
    processors = {span.processor for span in spans}
    if device >= 0:
        processors |= set(range(_core.device_facts(device)["num_sms"]))
    title = f"{row.name}, {row.dtype_name}: {' then '.join(ids)}, {place.device_name}"
    return Timeline(title, "SM" if device >= 0 else "thread", tuple(sorted(processors)), ids, spans)
