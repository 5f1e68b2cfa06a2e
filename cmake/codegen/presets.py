"""presets.toml: named choices of variants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from match import Match, as_toml, grouped, match_of
from misses import Misses
from vocabulary import Axis, SpecError

ANY = "any"


@dataclass(frozen=True)
class Preset:
    """A named choice of variants."""

    name: str
    about: str
    take: Sequence[Match]
    covers: Sequence[str]  # axes: of each family it takes every value that full has

    def takes(self, row: Mapping[str, str]) -> bool:
        return any(match.covers(row) for match in self.take)


def read_preset(name: str, row: Mapping[str, object], axes: Mapping[str, Axis]) -> Preset:
    """Reads a table of presets.toml."""
    take = [_taken(name, wanted, axes) for wanted in row.get("take", [])]
    covers = list(row.get("covers", []))
    for axis in covers:
        if axis not in axes:
            raise SpecError(f"presets.toml: [{name}] covers {axis!r}, which is no axis")
    return Preset(name, str(row.get("about", "")), take, covers)


def check_preset(preset: Preset, rows: Sequence[Mapping[str, str]], misses: Misses) -> None:
    """Adds rows of `take` without a variant, and values of axes in `covers` that are not taken."""
    where = f"presets.toml: [{preset.name}]"
    for match in preset.take:
        if not any(match.covers(row) for row in rows):
            misses.add(f"{where} takes {as_toml(match.axes)}, which matches no variant")
    taken = [row for row in rows if preset.takes(row)]
    for axis in preset.covers:
        have = {(row["family"], row[axis]) for row in taken}
        lacks = [row for row in rows if (row["family"], row[axis]) not in have]
        for text in grouped(lacks, ["family", axis]):
            misses.add(f"{where} lacks {text}: add a row that takes a kernel of it")


def _taken(name: str, row: Mapping[str, object], axes: Mapping[str, Axis]) -> Match:
    """Reads a row of `take`; axes that it leaves out have their default, or any if it says so."""
    wanted = {key: value for key, value in row.items() if key != "others"}
    where = f"presets.toml: [{name}]"
    if "others" not in row:
        defaults = {a.name: a.default for a in axes.values() if a.default is not None}
        wanted = defaults | wanted
    elif row["others"] != ANY:
        raise SpecError(f'{where}: others = {row["others"]!r} must be "any", or left out')
    return match_of({k: v for k, v in wanted.items() if v != ANY}, axes, where)
