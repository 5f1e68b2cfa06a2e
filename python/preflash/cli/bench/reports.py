"""`bench --compare A.json B.json`: how much faster one report of `bench --json` is than another."""

from __future__ import annotations

import json
import pathlib
import statistics
from typing import Any

from .. import CommandError
from ..console import Table
from ..machine import long_name
from . import plot
from .measure import OURS


def compare(paths: list[pathlib.Path], picture: pathlib.Path | None) -> str:
    """Returns a table of two reports: microseconds of our calls, and how much faster the second
    is. picture: where to draw the rows of both; None for none."""
    documents = [_read(path) for path in paths]
    table = Table({"row": "", "dtype": "", "A us": ".1f", "B us": ".1f", "B is": ".3f"})
    ratios = []
    a, b = (_by_row(document) for document in documents)
    common = [key for key in a if key in b]
    for title, dtype in common:
        us = a[title, dtype]["us"], b[title, dtype]["us"]
        # preflash where a row has baselines, else every call of the row.
        for name in (n for n in us[0] if n in us[1] and (n == OURS or OURS not in us[0])):
            times = [one[name] for one in us]
            ratios.append(times[0] / times[1])
            about = title if name == OURS else f"{title}: {name}"
            table.add(about, dtype, *times, f"{ratios[-1]:.3f}x")
    if not ratios:
        raise CommandError("--compare: the two reports have no row in common")
    lines = []
    for name, path, document in zip("AB", paths, documents, strict=True):
        machine = document["machine"]
        about = f"preflash {machine['preflash']} {machine['backend']} on {machine['name']}"
        lines.append(f"{name}: {path}, {about}")
    mean = statistics.geometric_mean(ratios)
    text = [*lines, "", str(table), "", f"B is {mean:.3f}x as fast (geometric mean)"]
    if picture is not None:
        rows = plot.timed([_of_both(a[key], b[key]) for key in common])
        plot.draw(rows, "\n".join(lines), picture)
        text.append(f"wrote {picture}: {len(rows)} of {len(common)} rows, the {plot.DRAWN}")
    return "\n".join(text)


def _of_both(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """A row of two reports, whose calls are ours in A and in B."""
    speeds = {name: row.get("speed", {}).get(OURS) for name, row in (("A", a), ("B", b))}
    return {**a, "speed": speeds if all(speeds.values()) else {}}


def _read(path: pathlib.Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text())
        document["machine"]["preflash"]
    except OSError as error:
        raise CommandError(f"--compare {path}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise CommandError(f"--compare {path}: is no report of bench --json") from None
    return document


def _by_row(document: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    rows = (row for kind in ("rows", "pod", "fmha") for row in document.get(kind, []))
    return {(row["name"], long_name(row["dtype"])): row for row in rows}
