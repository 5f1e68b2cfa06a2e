"""Tables and progress: by rich where that is installed, else plain lines."""

from __future__ import annotations

import contextlib
import io
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping

_ABSENT = "-"


class Table:
    """Rows under headers, printed as a Markdown table; rich lines its columns up. A column has a
    format: "" of text, which is on the left, or that of its numbers. Columns without any value are
    left out."""

    def __init__(self, columns: Mapping[str, str]) -> None:
        self._columns = dict(columns)
        self._rows: list[list[str]] = []

    def add(self, *cells: object) -> None:
        """Appends one row; None prints as a dash, text as it is."""
        formats = zip(cells, self._columns.values(), strict=True)
        self._rows.append([_text(cell, spec) for cell, spec in formats])

    def __str__(self) -> str:
        columns = zip(self._columns.items(), *self._rows, strict=True)
        used = [column for column in columns if any(cell != _ABSENT for cell in column[1:])]
        formats, *rows = zip(*used, strict=True)
        try:
            from rich import box, console, table
        except ImportError:
            grid = [[header for header, _ in formats], ["---"] * len(formats), *rows]
            return "\n".join(f"| {' | '.join(row)} |" for row in grid)
        drawn = table.Table(box=box.MARKDOWN)
        for header, spec in formats:
            drawn.add_column(header, justify="right" if spec else "left")
        for row in rows:
            drawn.add_row(*row)
        # So wide that no cell is broken: a line is for programs, too.
        plain = {"color_system": None, "markup": False, "emoji": False}
        page = console.Console(file=io.StringIO(), width=10_000, **plain)
        page.print(drawn)
        return page.file.getvalue().strip()


def _text(cell: object, spec: str) -> str:
    if cell is None:
        return _ABSENT
    return cell if isinstance(cell, str) else format(cell, spec)


@contextlib.contextmanager
def progress(total: int, title: str) -> Iterator[Callable[[str], None]]:
    """A function to call after each of `total` steps, with what was done. It moves a bar of rich on
    a terminal, and prints a line per quarter elsewhere, both on stderr."""
    try:
        from rich import console, progress
    except ImportError:
        progress = None
    if progress is None or not sys.stderr.isatty():
        yield _lines(total, title)
        return
    columns = (progress.BarColumn(), progress.MofNCompleteColumn(), progress.TimeElapsedColumn())
    note = progress.TextColumn("{task.description}", markup=False)
    with progress.Progress(title, *columns, note, console=console.Console(stderr=True)) as bar:
        task = bar.add_task("", total=total)
        yield lambda what: bar.update(task, advance=1, description=what)


def _lines(total: int, title: str) -> Callable[[str], None]:
    steps = itertools.count(1)

    def step(_: str) -> None:
        done = next(steps)
        if 4 * done // total > 4 * (done - 1) // total:
            with contextlib.suppress(OSError):  # a line nobody can see ends no work
                print(f"{title}: {done}/{total}", file=sys.stderr, flush=True)

    return step
