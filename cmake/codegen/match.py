"""Rows of the data files: the axis values that they name, and how an error spells them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from vocabulary import Axis, SpecError


@dataclass(frozen=True)
class Match:
    """Maps axes to the values concerned; an axis that is not named may have any."""

    axes: Mapping[str, Sequence[str]]

    def covers(self, row: Mapping[str, str]) -> bool:
        # A loop takes a third of the time of all(), in a million calls for the whole matrix.
        for axis, values in self.axes.items():  # noqa: SIM110
            if row[axis] not in values:
                return False
        return True


def match_of(row: Mapping[str, object], axes: Mapping[str, Axis], where: str) -> Match:
    """Reads a row of axis = value or axis = [values] of a data file or a test."""
    match = {}
    for name, value in row.items():
        if name not in axes:
            raise SpecError(f"{where}: {name!r} is no axis; there are {', '.join(axes)}")
        values = value if isinstance(value, list) else [value]
        for one in values:
            if one not in axes[name].values:
                known = ", ".join(axes[name].values)
                raise SpecError(f"{where}: {name} = {one!r} is not one of {known}")
        match[name] = values
    return Match(match)


def named_axes(matches: Iterable[Match], axes: Mapping[str, Axis]) -> list[str]:
    """Returns the axes that any of the rows names, in their order."""
    named = {name for match in matches for name in match.axes}
    return [name for name in axes if name in named]


def as_toml(values: Mapping[str, Sequence[str]]) -> str:
    """Spells axis values as a row of a data file does."""
    return ", ".join(f"{axis} = {_value(list(those))}" for axis, those in values.items())


def _value(values: Sequence[str]) -> str:
    quoted = [f'"{value}"' for value in values]
    return quoted[0] if len(quoted) == 1 else f"[{', '.join(quoted)}]"


def grouped(rows: Iterable[Mapping[str, str]], axes: Sequence[str]) -> list[str]:
    """Describes rows of the matrix by some of their axes, in few rows of a data file.

    Boxes of values that differ in one axis alone become one box; each family has boxes of its own.
    """
    boxes = list(dict.fromkeys(tuple((row[axis],) for axis in axes) for row in rows))
    for i, axis in enumerate(axes):
        if axis == "family":
            continue
        merged: dict[tuple, dict[str, None]] = {}
        for box in boxes:
            merged.setdefault((box[:i], box[i + 1 :]), {}).update(dict.fromkeys(box[i]))
        boxes = [(*before, tuple(values), *after) for (before, after), values in merged.items()]
    return [as_toml(dict(zip(axes, box, strict=True))) for box in boxes]
