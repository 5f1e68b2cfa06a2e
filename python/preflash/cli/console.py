"""What the commands print with: aligned tables and a progress bar."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

_ABSENT = "-"


def number(value: float | None, spec: str) -> str | None:
    """A cell of a table."""
    return None if value is None else format(value, spec)


@dataclass
class Table:
    """Rows of text under headers. Columns named in `right` are right-aligned, the others left."""

    headers: Sequence[str]
    right: frozenset[str] = frozenset()
    rows: list[list[str]] = field(default_factory=list)

    def add(self, *cells: object) -> None:
        """Appends one row; None prints as a dash."""
        if len(cells) != len(self.headers):
            raise ValueError(f"a row of {len(cells)} cells under {len(self.headers)} headers")
        self.rows.append([_ABSENT if cell is None else str(cell) for cell in cells])

    def without_empty_columns(self) -> Table:
        """The same table less the columns that hold dashes alone."""
        used = [c for c in range(len(self.headers)) if any(row[c] != _ABSENT for row in self.rows)]
        headers = [self.headers[c] for c in used]
        return Table(headers, self.right, [[row[c] for c in used] for row in self.rows])

    def __str__(self) -> str:
        grid = [list(self.headers), *self.rows]
        widths = [max(len(row[c]) for row in grid) for c in range(len(self.headers))]
        lines = [self._line(row, widths) for row in grid]
        lines.insert(1, "  ".join("-" * width for width in widths))
        return "\n".join(lines)

    def _line(self, row: Sequence[str], widths: Sequence[int]) -> str:
        cells = (
            cell.rjust(width) if header in self.right else cell.ljust(width)
            for header, cell, width in zip(self.headers, row, widths, strict=True)
        )
        return "  ".join(cells).rstrip()


class Progress:
    """A progress bar over a known number of steps. On a terminal it redraws one line, by rich where
    that is installed; elsewhere (a pipe, a log) it prints a line per quarter, so that logs stay
    short."""

    _WIDTH = 28
    _REDRAW_SECONDS = 0.1

    def __init__(self, total: int, title: str, stream: TextIO | None = None) -> None:
        self._total = max(total, 1)
        self._title = title
        self._stream = sys.stderr if stream is None else stream
        self._live = self._stream.isatty()
        self._done = 0
        self._quarter = 0
        self._start = time.monotonic()
        self._drawn = -1.0
        self._rich = _rich_bar(title, self._total, self._stream) if self._live else None

    def __enter__(self) -> Progress:
        if self._rich is not None:
            self._rich.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._rich is not None:
            self._rich.stop()
        elif self._live:
            self._draw()
            self._write("\n")

    def step(self, note: str = "") -> None:
        """One more step is done; `note` says which one is under way."""
        self._done = min(self._done + 1, self._total)
        if self._rich is not None:
            self._rich.update(self._rich.task_ids[0], completed=self._done, note=note[:40])
            return
        if self._live:
            now = time.monotonic()
            if now - self._drawn >= self._REDRAW_SECONDS:
                self._drawn = now
                self._draw(note)
            return
        quarter = 4 * self._done // self._total
        if quarter > self._quarter:
            self._quarter = quarter
            self._write(f"{self._title}: {self._done}/{self._total} ({self._elapsed()})\n")

    def _draw(self, note: str = "") -> None:
        filled = self._WIDTH * self._done // self._total
        bar = "#" * filled + "." * (self._WIDTH - filled)
        text = f"{self._title} [{bar}] {self._done}/{self._total} {self._elapsed()} {note}"
        # \033[K clears what a longer note left behind.
        self._write(f"\r{text[:110].rstrip()}\033[K")

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError):  # a progress bar nobody can see ends no work
            self._stream.write(text)
            self._stream.flush()

    def _elapsed(self) -> str:
        return f"{time.monotonic() - self._start:.1f} s"


def _rich_bar(title: str, total: int, stream: TextIO) -> Any:
    """A bar of rich, not started; None where rich is not installed."""
    try:
        from rich import console, progress
    except ImportError:
        return None
    columns = (
        progress.TextColumn(title),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        progress.TextColumn("{task.fields[note]}", markup=False),
    )
    bar = progress.Progress(*columns, console=console.Console(file=stream))
    bar.add_task(title, total=total, note="")
    return bar
