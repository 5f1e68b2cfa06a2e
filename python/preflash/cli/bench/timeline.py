"""When and where each work item of a launch ran, read from the records that the launch wrote."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Sequence

import torch


class Kind(enum.Enum):
    PREFILL = "prefill"
    DECODE = "decode"  # of a request with one token


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

    def of_processor(self, processor: int) -> list[Span]:
        return [span for span in self.spans if span.processor == processor]

    def summary(self) -> str:
        """How the time of the processors was spent."""
        if not self.spans:
            return "no work item ran"
        room = self.end_us * len(self.processors)
        by_processor = [self.of_processor(one) for one in self.processors]

        def share(kinds: Iterable[Kind]) -> float:
            wanted = frozenset(kinds)
            busy = sum(_covered(s for s in spans if s.kind in wanted) for spans in by_processor)
            return 100.0 * busy / room if room else 0.0

        shares = [f"{kind.value} {share([kind]):.1f} %" for kind in Kind]
        ends = [max((span.end_us for span in spans), default=0.0) for spans in by_processor]
        return (
            f"{len(self.spans)} items in {self.end_us:.1f} us on {len(self.processors)} "
            f"{self.processor_name}s: {', '.join(shares)}, idle {100.0 - share(Kind):.1f} %; "
            f"the first {self.processor_name} is done at {min(ends):.1f} us, "
            f"half of them at {sorted(ends)[len(ends) // 2]:.1f} us"
        )


@dataclasses.dataclass(frozen=True)
class Launch:
    """Where a launch put its records, and the tokens of each of its requests."""

    kernel_id: str
    first: int
    count: int
    qo_lens: tuple[int, ...]


def read_spans(records: torch.Tensor, launches: Sequence[Launch]) -> tuple[Span, ...]:
    """records: int64 [n, 4] on the CPU, ItemRecord of cpp/include/preflash/item_record.h."""
    spans: list[Span] = []
    for number, launch in enumerate(launches):
        rows = records[launch.first : launch.first + launch.count]
        rows = rows[rows[:, 1] > 0]  # the others did not run
        words, halves = rows.view(torch.int32), rows.view(torch.int16)
        columns = (rows[:, 0], rows[:, 1], words[:, 4], words[:, 5], words[:, 6])
        columns = [column.tolist() for column in (*columns, halves[:, 14], halves[:, 15])]
        for begin, end, processor, cta, request, kv_head, chunk in zip(*columns, strict=True):
            kind = Kind.DECODE if launch.qo_lens[request] == 1 else Kind.PREFILL
            spans.append(Span(begin, end, processor, number, kind, cta, request, kv_head, chunk))
    first = min((span.begin_us for span in spans), default=0)
    return tuple(
        dataclasses.replace(
            span, begin_us=(span.begin_us - first) / 1e3, end_us=(span.end_us - first) / 1e3
        )
        for span in sorted(spans, key=lambda span: (span.begin_us, span.end_us))
    )


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
