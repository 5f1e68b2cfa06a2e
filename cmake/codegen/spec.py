"""The variant matrix of cpp/variants, read and expanded: which kernels exist, their ids and tiles.

Everything that lists variants (CMake, the registry, variants.json, the docs table, the tests) goes
through `load_matrix()`. Bad data raises one SpecError, with a line for each fault that names the
file, the row and the rule.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from match import Match, as_toml, grouped, match_of, named_axes
from misses import Misses
from options import Table, read_table
from presets import Preset, check_preset, read_preset
from vocabulary import SIZES, Axis, Family, SpecError, Vocabulary, read_vocabulary

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

VARIANTS_DIR = Path(__file__).resolve().parents[2] / "cpp" / "variants"

# A kernel of two segments has a tile for each: that of its row, and of the row with these values.
TWO_SEGMENTS = {"segments": "two"}
SECOND_SEGMENT = {"tile_class": "decode"}
# What a row of [[options]] may name beside the kernel of all options, by how many each has.
BESIDE = {"none": 0, "single": 1}
# Kernels with so many options have them at run time (options_at_run_time() in variant.h).
AT_RUN_TIME = 2


@dataclass(frozen=True)
class Tile:
    """The shape of one CTA's work; the fields of preflash::TileShape, in its order."""

    m: int
    n: int
    stages: int
    warps: int
    ctas_per_sm: int


@dataclass(frozen=True)
class Variant:
    """One kernel: a value of each axis, and the tile it is compiled with."""

    values: Mapping[str, str]  # axis -> value, as forward.toml spells it
    tile: Tile
    vocabulary: Vocabulary
    second_tile: Tile | None = None  # of the second segment, where it has two

    def __getattr__(self, name: str) -> str | int:
        """The value of an axis, or of a field of struct Variant."""
        found = self.fields.get(name, self.values.get(name)) if "values" in self.__dict__ else None
        if found is None:
            raise AttributeError(name)
        return found

    @property
    def fields(self) -> dict[str, str | int]:
        """The fields of struct Variant, in its order: names of enum values, and sizes."""
        result: dict[str, str | int] = {}
        for axis in self.vocabulary.axes.values():
            value = self.values[axis.name]
            if axis.type == SIZES:
                sizes = [int(size) for size in value.split("x")]
                result |= dict(zip(axis.fields, sizes * len(axis.fields), strict=False))
            else:
                same = axis.same_as is not None and value == "same"
                result[axis.fields[0]] = result[axis.same_as] if same else value
        return result

    @property
    def id(self) -> str:
        return self.vocabulary.id_of(self.values)

    @property
    def options_at_run_time(self) -> bool:
        """True where preflash::options_at_run_time() is."""
        every = self.family_facts.options == "run_time"
        return every or self.vocabulary.num_options(self.values) >= AT_RUN_TIME

    @property
    def family_facts(self) -> Family:
        return self.vocabulary.families[self.values["family"]]

    @property
    def backend(self) -> str:
        return self.family_facts.backend


@dataclass(frozen=True)
class Exclusion:
    """Combinations that are not compiled."""

    match: Match
    reason: str


@dataclass(frozen=True)
class Options:
    """A row of [[options]]: which kernels the one of all options stands beside."""

    match: Match
    beside: Sequence[int | frozenset[str]]  # how many options they have, or the axes of these


@dataclass(frozen=True)
class Matrix:
    """All variants in a stable order, and what the data files say about them."""

    vocabulary: Vocabulary
    exclusions: Sequence[Exclusion]
    presets: Mapping[str, Preset]
    variants: Sequence[Variant]

    @property
    def families(self) -> Mapping[str, Family]:
        return self.vocabulary.families

    def select(self, preset: str, families: Iterable[str] | None = None) -> list[Variant]:
        """The variants of a preset, of the given families only if any are given."""
        if preset not in self.presets:
            raise SpecError(f"preset {preset!r} is unknown; there are {', '.join(self.presets)}")
        wanted = set(self.families if families is None else families)
        unknown = wanted - set(self.families)
        if unknown:
            known = ", ".join(self.families)
            raise SpecError(f"family {sorted(unknown)[0]!r} is unknown; there are {known}")
        takes = self.presets[preset].takes
        return [v for v in self.variants if v.values["family"] in wanted and takes(v.values)]


@functools.cache
def load_matrix(directory: Path = VARIANTS_DIR) -> Matrix:
    """Reads forward.toml, tiles.toml and presets.toml, once for each directory.

    Raises:
        SpecError: first what stops the reading: a contradiction in the vocabulary, an unknown axis
            or value, a row without a reason. Then every contradiction of the rows: an exclusion or
            a row without effect, a variant with no tile or more than one, a preset that lacks
            values.
    """
    forward = _read(directory / "forward.toml")
    vocabulary = read_vocabulary(forward)
    axes = vocabulary.axes
    misses = Misses()

    def read_each(rows: Iterable, read: Callable) -> list:
        result = []
        for row in rows:
            with misses.collect():
                result.append(read(row))
        return result

    exclusions = read_each(forward.get("exclude", []), lambda row: _exclusion(row, axes))
    options = read_each(forward.get("options", []), lambda row: _options(row, axes))
    tile_rows = _read(directory / "tiles.toml").get("tile", [])
    tiles = read_each(tile_rows, lambda row: _tile_row(row, vocabulary))
    preset_rows = _read(directory / "presets.toml")
    presets = read_each(preset_rows.items(), lambda item: read_preset(*item, axes))
    misses.raise_any()

    exclusions += _served_at_run_time(vocabulary)
    rows = _expand(axes, exclusions, misses)
    rows = _with_whole_blocks(rows, vocabulary, misses)
    _check_sizes_of_cpu(rows, vocabulary, misses)
    rows = _with_options(rows, options, vocabulary, misses)
    variants = _with_tiles(rows, tiles, vocabulary, misses)
    ids = [vocabulary.id_of(row) for row in rows]
    if len(set(ids)) != len(ids):
        misses.add("forward.toml: two variants share an id; two axes have a value in common")
    for preset in presets:
        check_preset(preset, rows, misses)
    misses.raise_any()
    return Matrix(vocabulary, exclusions, {preset.name: preset for preset in presets}, variants)


def load_options(directory: Path = VARIANTS_DIR) -> Table:
    """Reads options.toml. Raises SpecError for a name that it does not explain."""
    return read_table(_read(directory / "options.toml"))


def _read(path: Path) -> dict:
    with path.open("rb") as file:
        return tomllib.load(file)


def _exclusion(row: Mapping[str, object], axes: Mapping[str, Axis]) -> Exclusion:
    match = {key: value for key, value in row.items() if key != "reason"}
    reason = str(row.get("reason", "")).strip()
    if not reason:
        raise SpecError(f"forward.toml: the exclusion of {match} gives no reason")
    return Exclusion(match_of(match, axes, "forward.toml: [[exclude]]"), reason)


def _served_at_run_time(vocabulary: Vocabulary) -> list[Exclusion]:
    """Every option, in families whose kernels take any."""
    return [
        Exclusion(
            match_of(
                {
                    "family": family.name,
                    axis.name: [value for value in axis.values if value != axis.default],
                },
                vocabulary.axes,
                f"forward.toml: [family.{family.name}]",
            ),
            "a kernel of this family takes every option at run time",
        )
        for family in vocabulary.families.values()
        if family.options == "run_time"
        for axis in vocabulary.option_axes
    ]


def _options(row: Mapping[str, object], axes: Mapping[str, Axis]) -> Options:
    match = {key: value for key, value in row.items() if key not in ("beside", "reason")}
    where = f"forward.toml: [[options]] of {match}"
    if not str(row.get("reason", "")).strip():
        raise SpecError(f"{where} gives no reason")
    option_axes = {name for name, axis in axes.items() if axis.option}
    beside: list[int | frozenset[str]] = []
    for name in row.get("beside", [None]):
        if isinstance(name, list) and option_axes.issuperset(name):
            beside.append(frozenset(name))
        elif isinstance(name, str) and name in BESIDE:
            beside.append(BESIDE[name])
        else:
            expected = f"{', '.join(BESIDE)} or a list of axes with `option`"
            raise SpecError(f"{where}: beside: {name!r} is not one of {expected}")
    return Options(match_of(match, axes, where), beside)


def _with_options(
    rows: Sequence[dict[str, str]],
    options: Sequence[Options],
    vocabulary: Vocabulary,
    misses: Misses,
) -> list[dict[str, str]]:
    """Leaves out the combinations of options that the kernel of all serves at run time."""
    names = {axis.name for axis in vocabulary.option_axes}

    def kind(row: Mapping[str, str]) -> tuple[str, ...]:
        return tuple(value for name, value in row.items() if name not in names)

    most: dict[tuple[str, ...], list[int]] = {}  # options of the kernels of a kind, fewest first
    for row in rows:
        most.setdefault(kind(row), []).append(vocabulary.num_options(row))
    for counts in most.values():
        counts.sort()
    used = set()
    unmatched: dict[str, list[Mapping[str, str]]] = {}
    contested: list[Mapping[str, str]] = []

    def compiled(row: Mapping[str, str]) -> bool:
        found = [i for i, one in enumerate(options) if one.match.covers(row)]
        used.update(found)
        in_row = vocabulary.families[row["family"]].options == "compiled"
        if len(found) != in_row:
            rule = "one must" if in_row else "none must"
            unmatched.setdefault(f"{len(found)} rows of [[options]] match {{}}; {rule}", []).append(
                row
            )
            return True
        if not in_row:
            return True
        counts = most[kind(row)]
        if counts[-1] >= AT_RUN_TIME and counts.count(counts[-1]) > 1:
            contested.append(row)
        has = vocabulary.options_of(row)
        beside = options[found[0]].beside
        return has in beside or len(has) in beside or len(has) == max(counts[-1], AT_RUN_TIME)

    result = [row for row in rows if compiled(row)]
    named = named_axes((one.match for one in options), vocabulary.axes)
    for sentence, those in unmatched.items():
        for text in grouped(those, named):
            misses.add(f"forward.toml: {sentence.format(text)}")
    for text in grouped(contested, [name for name in vocabulary.axes if name not in names]):
        misses.add(f"forward.toml: [[options]]: no kernel of {text} has all the options")
    for i, one in enumerate(options):
        if i not in used:
            misses.add(f"forward.toml: [[options]] of {as_toml(one.match.axes)} matches no variant")
    return result


def _expand(
    axes: Mapping[str, Axis], exclusions: Sequence[Exclusion], misses: Misses
) -> list[dict[str, str]]:
    values = [axis.values for axis in axes.values()]
    rows = [dict(zip(axes, row, strict=True)) for row in itertools.product(*values)]
    for exclusion in exclusions:
        if not any(exclusion.match.covers(row) for row in rows):
            text = as_toml(exclusion.match.axes)
            misses.add(f"forward.toml: the exclusion of {text} excludes nothing")
    return [row for row in rows if not any(e.match.covers(row) for e in exclusions)]


def _with_whole_blocks(
    rows: Sequence[dict[str, str]], vocabulary: Vocabulary, misses: Misses
) -> list[dict[str, str]]:
    """Leaves out head_dims that their family's kernels cannot be compiled for."""
    sizes = [axis.name for axis in vocabulary.axes.values() if axis.type == SIZES]

    def fits(row: Mapping[str, str]) -> bool:
        step = vocabulary.families[row["family"]].head_dim_step
        return not any(int(size) % step for name in sizes for size in row[name].split("x"))

    for text in grouped((row for row in rows if not fits(row)), ["family", *sizes]):
        misses.add(
            f"forward.toml: {text} is no multiple of the family's head_dim_step: leave the value "
            "out, or change the kernels first (CONTRIBUTING.md, Add a variant)"
        )
    return [row for row in rows if fits(row)]


def _check_sizes_of_cpu(
    rows: Sequence[Mapping[str, str]], vocabulary: Vocabulary, misses: Misses
) -> None:
    """Reports head_dims beside the largest one on the CPU, whose loops take them at run time."""
    of_cpu = [row for row in rows if vocabulary.families[row["family"]].on_cpu]
    for axis in (axis for axis in vocabulary.axes.values() if axis.type == SIZES):
        width = {value: max(map(int, value.split("x"))) for value in axis.values}
        largest = max((width[row[axis.name]] for row in of_cpu), default=0)
        surplus = (row for row in of_cpu if width[row[axis.name]] < largest)
        for text in grouped(surplus, ["family", axis.name]):
            misses.add(
                f"forward.toml: {text} is served by the largest size of the family: add it to the "
                "[[exclude]] of the smaller ones"
            )


@dataclass(frozen=True)
class _TileRow:
    match: Match
    tile: Tile


def _tile_row(row: Mapping[str, object], vocabulary: Vocabulary) -> _TileRow:
    shape = [field.name for field in fields(Tile)]
    match = {k: v for k, v in row.items() if k not in (*shape, "why")}
    where = f"tiles.toml: the row of {match}"
    missing = [name for name in [*shape, "why"] if not row.get(name)]
    if missing:
        raise SpecError(f"{where} lacks {', '.join(missing)}")
    tile = Tile(**{name: int(row[name]) for name in shape})
    return _TileRow(match_of(match, vocabulary.axes, where), tile)


def _with_tiles(
    rows: Sequence[Mapping[str, str]],
    tiles: Sequence[_TileRow],
    vocabulary: Vocabulary,
    misses: Misses,
) -> list[Variant]:
    used = set()
    unmatched: dict[int, list[Mapping[str, str]]] = {}  # by the number of rows that match

    def matching(row: Mapping[str, str]) -> _TileRow | None:
        found = [i for i, tile in enumerate(tiles) if tile.match.covers(row)]
        used.update(found)
        if len(found) != 1:
            unmatched.setdefault(len(found), []).append(row)
            return None
        return tiles[found[0]]

    variants = []
    for row in rows:
        found = matching(row)
        two = TWO_SEGMENTS.items() <= row.items()
        second = matching({**row, **SECOND_SEGMENT}) if two else None
        if found is not None and (second is not None or not two):
            second_tile = second.tile if two else None
            variants.append(Variant(row, found.tile, vocabulary, second_tile))
    named = named_axes((tile.match for tile in tiles), vocabulary.axes)
    for count, those in unmatched.items():
        for text in grouped(those, named):
            rule = "one must, or an [[exclude]] of forward.toml" if count == 0 else "one must"
            misses.add(f"tiles.toml: {count} rows match {text}; {rule}")
    for i, tile in enumerate(tiles):
        if i not in used:
            misses.add(f"tiles.toml: the row of {as_toml(tile.match.axes)} matches no variant")
    return variants
