"""What is made of reports of `bench --json`: a picture, and a comparison of two."""

from __future__ import annotations

import functools
import json
import pathlib
import re
import statistics
from typing import Any

import torch

from ...testing import timing
from .. import CommandError
from ..console import Table
from ..machine import Place, long_name
from .measure import OURS

_DENSE = re.compile(r"dense (d\d+) s(\d+) (\w+)")


def roof(place: Place, dtype: torch.dtype) -> float:
    """TFLOP/s of a large matrix product, which no attention exceeds."""
    size = 8192 if place.device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, device=place.device).to(dtype) for _ in range(2))
    product = functools.partial(torch.mm, a, b, out=torch.empty_like(a))
    if place.device.type == "cuda":
        us = timing.interleaved({"roof": timing.GraphReplay(product, 10)}, 5)["roof"]
    else:
        us = timing.cpu_wall_time(product)
    return 2 * size**3 / us / 1e6


def draw(document: dict[str, Any], path: pathlib.Path) -> None:
    """TFLOP/s against length for each head_dim and mask, and GB/s of decode, by call."""
    from matplotlib.figure import Figure  # an extra, and slow to import

    timed = [row for row in document["rows"] if row["speed"]]
    dense: dict[tuple[str, str], dict[str, dict[int, float]]] = {}
    for row in timed:
        if found := _DENSE.fullmatch(row["name"]):
            head_dim, length, mask = found.groups()
            lines = dense.setdefault((mask, f"{row['dtype']} {head_dim}"), {})
            for name, speed in row["speed"].items():
                lines.setdefault(name, {})[int(length)] = speed
    decode = [row for row in timed if row["name"].startswith("decode ")]
    calls = sorted({n for row in timed for n in row["speed"]} - {"base"}, key=lambda n: n != OURS)
    colour = {name: f"C{i}" for i, name in enumerate(calls)}
    masks, dims = (list(dict.fromkeys(key[i] for key in dense)) for i in range(2))
    columns, height = max(len(dims), 2 if decode else 1), max(len(masks) + bool(decode), 1)
    figure = Figure(figsize=(4.2 * columns, 3.2 * height), layout="constrained")
    grid = figure.add_gridspec(height, columns)
    for (mask, dim), lines in dense.items():
        axes = figure.add_subplot(grid[masks.index(mask), dims.index(dim)])
        for name in (name for name in calls if name in lines):
            points = sorted(lines[name].items())
            axes.plot(*zip(*points, strict=True), "o-", color=colour[name], label=name)
        axes.axhline(document["machine"]["roof"], color="grey", linestyle="--", label="product")
        axes.set(title=f"{dim} {mask}", xlabel="length", ylabel="TFLOP/s", ylim=(0, None))
        axes.set_xscale("log", base=2)
        axes.legend(fontsize="x-small")
    if decode:
        axes = figure.add_subplot(grid[-1, :])
        for place, row in enumerate(decode):
            shown = [name for name in calls if name in row["speed"]]
            for i, name in enumerate(shown):
                width = 0.8 / len(shown)
                axes.bar(place + (i + 0.5) * width, row["speed"][name], width, color=colour[name])
        names = [f"{row['name'].removeprefix('decode ')}\n{row['dtype']}" for row in decode]
        axes.set_xticks([place + 0.4 for place in range(len(decode))], names)
        axes.set(title="decode", ylabel="GB/s")
        handles = [axes.bar(0.4, 0, color=colour[name], label=name) for name in calls]
        axes.margins(y=0.2)
        axes.legend(handles=handles, fontsize="x-small", loc="upper center", ncols=len(calls))
    machine = document["machine"]
    figure.suptitle(f"preflash {machine['preflash']} {machine['backend']}, {machine['name']}")
    figure.savefig(path, dpi=120)


def compare(paths: list[pathlib.Path]) -> str:
    """A table of two reports: microseconds of our calls, and how much faster the second is."""
    documents = [_read(path) for path in paths]
    table = Table({"row": "", "dtype": "", "A us": ".1f", "B us": ".1f", "B is": ".3f"})
    ratios = []
    a, b = (_times_by_row(document) for document in documents)
    for title, dtype in (key for key in a if key in b):
        us = a[title, dtype], b[title, dtype]
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
    return "\n".join([*lines, "", str(table), "", f"B is {mean:.3f}x as fast (geometric mean)"])


def _read(path: pathlib.Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text())
        document["machine"]["preflash"]
    except OSError as error:
        raise CommandError(f"--compare {path}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise CommandError(f"--compare {path}: is no report of bench --json") from None
    return document


def _times_by_row(document: dict[str, Any]) -> dict[tuple[str, str], dict[str, float]]:
    rows = (row for kind in ("rows", "pod", "fmha") for row in document.get(kind, []))
    return {(row["name"], long_name(row["dtype"])): row["us"] for row in rows}
