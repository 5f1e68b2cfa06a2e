"""A timeline as a picture: one row for each processor, prefill and decode in two colours."""

from __future__ import annotations

import importlib.util
import pathlib

from .timeline import Kind, Timeline, lanes

# Told apart by every kind of eye, and in grey.
_COLOURS = {Kind.PREFILL: "#1f6fb4", Kind.DECODE: "#f5a623"}


def missing() -> str:
    """Why no picture can be drawn here; empty where it can."""
    if importlib.util.find_spec("matplotlib") is None:
        return "a picture takes matplotlib, which is not installed: pip install 'preflash[trace]'"
    return ""


def draw(timeline: Timeline, path: pathlib.Path) -> None:
    """Writes a picture in the format that the file's name ends with."""
    from matplotlib.figure import Figure  # an extra, and slow to import
    from matplotlib.patches import Patch

    rows = len(timeline.processors)
    figure = Figure(figsize=(12.0, min(max(1.6 + 0.055 * rows, 3.0), 12.0)), layout="constrained")
    axes = figure.subplots()
    for row, processor in enumerate(timeline.processors):
        of_processor = lanes(timeline.of_processor(processor))
        height = 0.9 / max(len(of_processor), 1)
        for number, lane in enumerate(of_processor):
            for kind, colour in _COLOURS.items():
                bars = [(s.begin_us, s.end_us - s.begin_us) for s in lane if s.kind is kind]
                place = (row - 0.45 + number * height, height)
                axes.broken_barh(bars, place, facecolor=colour, edgecolor="white", linewidth=0.25)
    kinds = {span.kind for span in timeline.spans}
    handles = [Patch(color=_COLOURS[kind], label=kind.value) for kind in Kind if kind in kinds]
    axes.legend(
        handles=handles, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, frameon=False
    )
    axes.set_xlim(0.0, timeline.end_us or 1.0)
    axes.set_ylim(rows - 0.5, -0.5)
    ticks = range(0, rows, max(rows // 12, 1))
    axes.set_yticks(list(ticks), [str(timeline.processors[tick]) for tick in ticks])
    axes.set_ylabel(timeline.processor_name)
    axes.set_xlabel("microseconds since the first work item began")
    axes.set_title(timeline.title, fontsize=10, loc="left")
    axes.margins(0)
    figure.savefig(path, dpi=100)
