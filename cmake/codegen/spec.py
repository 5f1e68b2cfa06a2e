"""The variant matrix of cpp/variants, read and expanded: which kernels exist, their ids and tiles.

Everything that lists variants (CMake, the registry, variants.json, the docs table, the tests) goes
through `load_matrix()`. Bad data raises SpecError naming the file, the row and the rule.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from options import Table, read_table
from vocabulary import SIZES, Axis, Family, SpecError, Vocabulary, read_vocabulary

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

VARIANTS_DIR = Path(__file__).resolve().parents[2] / "cpp" / "variants"

ANY = "any"

# A kernel of two segments has a tile for each: that of its row, and of the row with these values.
TWO_SEGMENTS = {"segments": "two"}
SECOND_SEGMENT = {"tile_class": "decode"}
# The rows of tiles.toml that may say most_keys.
OF_SHORT_TILES = {"tile_class": "decode"}
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
    most_keys: int = 0  # of its requests on average: batches of longer ones have tall tiles

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
        """As preflash::options_at_run_time() says it."""
        every = self.family_facts.options == "run_time"
        return every or self.vocabulary.num_options(self.values) >= AT_RUN_TIME

    @property
    def family_facts(self) -> Family:
        return self.vocabulary.families[self.values["family"]]

    @property
    def backend(self) -> str:
        return self.family_facts.backend


@dataclass(frozen=True)
class Match:
    """Maps axes to the values concerned; an axis that is not named may have any."""

    axes: Mapping[str, Sequence[str]]

    def covers(self, row: Mapping[str, str]) -> bool:
        return all(row[axis] in values for axis, values in self.axes.items())


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
class Preset:
    """A named choice of variants."""

    name: str
    about: str
    take: Sequence[Match]

    def takes(self, row: Mapping[str, str]) -> bool:
        return any(match.covers(row) for match in self.take)


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


def load_matrix(directory: Path = VARIANTS_DIR) -> Matrix:
    """Reads forward.toml, tiles.toml and presets.toml.

    Raises:
        SpecError: a contradiction in the vocabulary, an unknown axis or value, an exclusion without
            a reason or without effect, a variant with no tile or more than one, a tile without use,
            a row of a preset without match.
    """
    forward = _read(directory / "forward.toml")
    vocabulary = read_vocabulary(forward)
    exclusions = [_exclusion(row, vocabulary.axes) for row in forward.get("exclude", [])]
    exclusions += _served_at_run_time(vocabulary)
    rows = _expand(vocabulary.axes, exclusions)
    options = [_options(row, vocabulary.axes) for row in forward.get("options", [])]
    rows = _with_options(rows, options, vocabulary)
    variants = _with_tiles(rows, _read(directory / "tiles.toml").get("tile", []), vocabulary)
    ids = [variant.id for variant in variants]
    if len(set(ids)) != len(ids):
        raise SpecError("forward.toml: two variants share an id; two axes have a value in common")
    presets = {
        name: _preset(name, row, vocabulary.axes, rows)
        for name, row in _read(directory / "presets.toml").items()
    }
    return Matrix(vocabulary, exclusions, presets, variants)


def load_options(directory: Path = VARIANTS_DIR) -> Table:
    """Reads options.toml. Raises SpecError for a name that it does not explain."""
    return read_table(_read(directory / "options.toml"))


def match_of(row: Mapping[str, object], axes: Mapping[str, Axis], where: str) -> Match:
    """A row of axis = value or axis = [values], as a data file or a test writes it."""
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
    rows: Sequence[dict[str, str]], options: Sequence[Options], vocabulary: Vocabulary
) -> list[dict[str, str]]:
    """Without the combinations of options that the kernel of all serves at run time."""
    names = {axis.name for axis in vocabulary.option_axes}

    def kind(row: Mapping[str, str]) -> tuple[str, ...]:
        return tuple(value for name, value in row.items() if name not in names)

    most: dict[tuple[str, ...], list[int]] = {}  # options of the kernels of a kind, fewest first
    for row in rows:
        most.setdefault(kind(row), []).append(vocabulary.num_options(row))
    for counts in most.values():
        counts.sort()
    used = set()

    def compiled(row: Mapping[str, str]) -> bool:
        found = [i for i, one in enumerate(options) if one.match.covers(row)]
        in_row = vocabulary.families[row["family"]].options == "compiled"
        if len(found) != in_row:
            raise SpecError(
                f"forward.toml: {len(found)} rows of [[options]] match {row}; "
                f"{'one' if in_row else 'none'} must"
            )
        if not in_row:
            return True
        used.add(found[0])
        counts = most[kind(row)]
        if counts[-1] >= AT_RUN_TIME and counts.count(counts[-1]) > 1:
            raise SpecError(f"forward.toml: [[options]]: no kernel like {row} has all the options")
        has = vocabulary.options_of(row)
        beside = options[found[0]].beside
        return has in beside or len(has) in beside or len(has) == max(counts[-1], AT_RUN_TIME)

    result = [row for row in rows if compiled(row)]
    for i, one in enumerate(options):
        if i not in used:
            raise SpecError(f"forward.toml: [[options]] of {one.match.axes} matches no variant")
    return result


def _expand(axes: Mapping[str, Axis], exclusions: Sequence[Exclusion]) -> list[dict[str, str]]:
    values = [axis.values for axis in axes.values()]
    rows = [dict(zip(axes, row, strict=True)) for row in itertools.product(*values)]
    for exclusion in exclusions:
        if not any(exclusion.match.covers(row) for row in rows):
            raise SpecError(
                f"forward.toml: the exclusion of {exclusion.match.axes} excludes nothing"
            )
    return [row for row in rows if not any(e.match.covers(row) for e in exclusions)]


@dataclass(frozen=True)
class _TileRow:
    match: Match
    tile: Tile
    most_keys: int


def _tile_row(row: Mapping[str, object], vocabulary: Vocabulary) -> _TileRow:
    shape = [field.name for field in fields(Tile)]
    match = {k: v for k, v in row.items() if k not in (*shape, "most_keys", "why")}
    where = f"tiles.toml: the row of {match}"
    missing = [name for name in [*shape, "why"] if not row.get(name)]
    if missing:
        raise SpecError(f"{where} lacks {', '.join(missing)}")
    most_keys = int(row.get("most_keys", 0))
    if most_keys < 0 or (most_keys > 0 and not OF_SHORT_TILES.items() <= match.items()):
        raise SpecError(f"{where}: most_keys is a positive number, of short tiles")
    tile = Tile(**{name: int(row[name]) for name in shape})
    return _TileRow(match_of(match, vocabulary.axes, where), tile, most_keys)


def _with_tiles(
    rows: Sequence[Mapping[str, str]],
    tile_rows: Sequence[Mapping[str, object]],
    vocabulary: Vocabulary,
) -> list[Variant]:
    tiles = [_tile_row(row, vocabulary) for row in tile_rows]
    used = set()

    def matching(row: Mapping[str, str]) -> _TileRow:
        found = [i for i, tile in enumerate(tiles) if tile.match.covers(row)]
        if len(found) != 1:
            raise SpecError(f"tiles.toml: {len(found)} rows match {dict(row)}; one must")
        used.add(found[0])
        return tiles[found[0]]

    variants = []
    for row in rows:
        two = TWO_SEGMENTS.items() <= row.items()
        second = matching({**row, **SECOND_SEGMENT}).tile if two else None
        found = matching(row)
        variants.append(Variant(row, found.tile, vocabulary, second, found.most_keys))
    for i, tile in enumerate(tiles):
        if i not in used:
            raise SpecError(f"tiles.toml: the row of {tile.match.axes} matches no variant")
    return variants


def _preset(
    name: str,
    row: Mapping[str, object],
    axes: Mapping[str, Axis],
    rows: Sequence[Mapping[str, str]],
) -> Preset:
    take = [_taken(name, wanted, axes) for wanted in row.get("take", [])]
    for match, wanted in zip(take, row.get("take", []), strict=True):
        if not any(match.covers(one) for one in rows):
            raise SpecError(f"presets.toml: [{name}] takes {wanted}, which matches no variant")
    return Preset(name, str(row.get("about", "")), take)


def _taken(name: str, row: Mapping[str, object], axes: Mapping[str, Axis]) -> Match:
    """A row of a preset. Axes that it does not name are at their defaults, or any if it says so."""
    wanted = {key: value for key, value in row.items() if key != "others"}
    where = f"presets.toml: [{name}]"
    if "others" not in row:
        defaults = {a.name: a.default for a in axes.values() if a.default is not None}
        wanted = defaults | wanted
    elif row["others"] != ANY:
        raise SpecError(f'{where}: others = {row["others"]!r} must be "any", or left out')
    return match_of({k: v for k, v in wanted.items() if v != ANY}, axes, where)
