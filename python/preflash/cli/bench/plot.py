"""`bench --plot FILE`: TFLOP/s of the dense rows against length, and GB/s of the decode rows."""

from __future__ import annotations

import functools
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..._check import validate
from ...testing import timing
from .. import CommandError
from ..machine import Place, long_name
from .measure import BASE, OURS

# A row of a report of bench --json.
Row = Mapping[str, Any]

_DENSE = re.compile(r"dense (d\d+) s(\d+) (\w+)")
_DECODE = re.compile(r"decode (.+)")
DRAWN = "rows named dense or decode"
# A product of the CPU that takes this long is large enough, as is one of this size.
_LONG_US, _LARGEST = 20_000.0, 4096


def can_draw(name: str) -> bool:
    """Returns true for the name of a row that has a place in the picture."""
    return bool(_DENSE.fullmatch(name) or _DECODE.fullmatch(name))


def timed(rows: Sequence[Row]) -> list[Row]:
    """Returns the rows that have a place in the picture and a speed."""
    return [row for row in rows if can_draw(row["name"]) and row.get("speed")]


def roof(place: Place, dtype: torch.dtype) -> float:
    """Measures TFLOP/s of a large matrix product, which attention does not exceed where torch has
    a fast product of this dtype."""

    def product(size: int):
        a, b = (torch.randn(size, size, device=place.device).to(dtype) for _ in range(2))
        return functools.partial(torch.mm, a, b, out=torch.empty_like(a))

    if place.device.type == "cuda":
        size = 8192
        us = timing.interleaved({"roof": timing.GraphReplay(product(size), 10)}, 5)["roof"]
    else:
        size = 256
        while (us := timing.cpu_wall_time(product(size))) < _LONG_US and size < _LARGEST:
            size *= 2
    return 2 * size**3 / us / 1e6


def roofs(place: Place, rows: Sequence[Row]) -> dict[str, float]:
    """Measures the roof of each dtype of dense rows. One that lies below a speed of its dtype is no
    roof: it is left out, and a line of output says so."""
    found = {}
    fastest: dict[str, float] = {}
    for row in rows:
        if _DENSE.fullmatch(row["name"]):
            dtype = long_name(row["dtype"])
            fastest[dtype] = max(fastest.get(dtype, 0.0), *row["speed"].values())
    for dtype, speed in fastest.items():
        product = roof(place, validate.dtype("dtype", dtype))
        if product >= speed:
            found[dtype] = product
        else:
            print(
                f"no roof for {dtype}: a matrix product of torch has {product:.2g} TFLOP/s here, "
                f"attention up to {speed:.2g}"
            )
    return found


def draw(
    rows: Sequence[Row], title: str, path: pathlib.Path, roofs: Mapping[str, float] | None = None
) -> None:
    """Draws rows that timed() returned. roofs: by dtype.

    Raises CommandError: there is no row.
    """
    if not rows:
        raise CommandError(f"--plot {path}: none of the {DRAWN} has been timed; nothing is written")
    from matplotlib.figure import Figure  # an extra, and slow to import

    # By panel, call and length.
    dense: dict[tuple[str, str], dict[str, dict[int, float]]] = {}
    decode: dict[str, dict[str, float]] = {}
    for row in rows:
        dtype = long_name(row["dtype"])
        speeds = {name: speed for name, speed in row["speed"].items() if name != BASE}
        if found := _DENSE.fullmatch(row["name"]):
            head_dim, length, mask = found.groups()
            lines = dense.setdefault((f"{dtype} {mask}", head_dim), {})
            for name, speed in speeds.items():
                lines.setdefault(name, {})[int(length)] = speed
        elif found := _DECODE.fullmatch(row["name"]):
            decode[f"{found[1]}\n{dtype}"] = speeds
    calls = {name for row in rows for name in row["speed"]} - {BASE}
    colours = {name: f"C{i}" for i, name in enumerate(sorted(calls, key=lambda n: (n != OURS, n)))}
    places, columns, height = _grid(list(dense))
    width, height = max(columns, 2 if decode else 1), height + bool(decode)
    figure = Figure(figsize=(4.2 * width, 3.2 * height), layout="constrained")
    grid = figure.add_gridspec(height, width)
    for (group, head_dim), lines in dense.items():
        axes = figure.add_subplot(grid[places[group, head_dim]])
        axes.set_title(f"{group} {head_dim}")
        _draw_dense(axes, lines, colours, (roofs or {}).get(group.split()[0]))
    if decode:
        _draw_decode(figure.add_subplot(grid[-1, :]), decode, colours)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def _grid(panels: Sequence[tuple[str, str]]) -> tuple[dict, int, int]:
    """Returns (row, column) of each panel, the columns and the rows: one row for each dtype and
    mask, a column for each head_dim; where that leaves holes, three panels in a row."""
    groups, dims = (list(dict.fromkeys(panel[i] for panel in panels)) for i in range(2))
    if len(panels) == len(groups) * len(dims):
        places = {(group, dim): (groups.index(group), dims.index(dim)) for group, dim in panels}
        return places, len(dims), len(groups)
    columns = min(len(panels), 3)
    places = {panel: divmod(i, columns) for i, panel in enumerate(panels)}
    return places, columns, -(-len(panels) // columns)


def _draw_dense(
    axes: Any, lines: Mapping[str, Mapping[int, float]], colours: Mapping[str, str], roof: Any
) -> None:
    for name in (name for name in colours if name in lines):
        points = sorted(lines[name].items())
        axes.plot(*zip(*points, strict=True), "o-", color=colours[name], label=name)
    if roof is not None:
        axes.axhline(roof, color="grey", linestyle="--", label="matrix product")
    highest = max(roof or 0.0, *(speed for points in lines.values() for speed in points.values()))
    axes.set(xlabel="length", ylabel="TFLOP/s", ylim=(0, 1.15 * highest))
    axes.set_xscale("log", base=2)
    lengths = sorted({length for points in lines.values() for length in points})
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.legend(fontsize="x-small")


def _draw_decode(
    axes: Any, rows: Mapping[str, Mapping[str, float]], colours: Mapping[str, str]
) -> None:
    labelled: set[str] = set()
    for place, speeds in enumerate(rows.values()):
        shown = [name for name in colours if name in speeds]
        width = 0.8 / len(shown)
        for i, name in enumerate(shown):
            label = None if name in labelled else name
            middle = place - 0.4 + (i + 0.5) * width
            axes.bar(middle, speeds[name], width, color=colours[name], label=label)
            labelled.add(name)
    axes.set_xticks(range(len(rows)), list(rows))
    axes.set_xlim(-0.6, max(len(rows), 4) - 0.4)  # a bar alone does not fill the width
    axes.set(title="decode", ylabel="GB/s")
    axes.margins(y=0.2)
    axes.legend(fontsize="x-small", loc="upper center", ncols=len(labelled))
