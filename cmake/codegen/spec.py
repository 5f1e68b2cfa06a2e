"""The variant matrix of cpp/variants, read and expanded: which kernels exist, their ids and tiles.

Everything that lists variants (CMake, the registry, variants.json, the docs table, the tests) goes
through `load_matrix()`. Bad data raises SpecError naming the file, the row and the rule.
"""

from __future__ import annotations

import fnmatch
import itertools
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

VARIANTS_DIR = Path(__file__).resolve().parents[2] / "cpp" / "variants"

AXES = ("family", "q_dtype", "kv_dtype", "head_dim", "tile_class", "logits", "mask")
BACKENDS = {"cpu": "cpu", "sm80": "fa2", "sm90": "fa3"}


class SpecError(ValueError):
    """A contradiction in cpp/variants/*.toml."""


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

    family: str
    q_dtype: str
    kv_dtype: str
    head_dim_qk: int
    head_dim_vo: int
    tile_class: str
    logits: str
    mask: str
    tile: Tile

    @property
    def head_dim(self) -> str:
        """The axis value: "128", or "192x128" where keys and values differ."""
        if self.head_dim_qk == self.head_dim_vo:
            return str(self.head_dim_qk)
        return f"{self.head_dim_qk}x{self.head_dim_vo}"

    @property
    def id(self) -> str:
        kv = "" if self.kv_dtype == self.q_dtype else f"_kv{self.kv_dtype}"
        dtypes = f"{self.q_dtype}{kv}"
        return (
            f"{self.family}_{dtypes}_d{self.head_dim}_{self.tile_class}_{self.logits}_{self.mask}"
        )

    @property
    def backend(self) -> str:
        return BACKENDS[self.family]


@dataclass(frozen=True)
class Exclusion:
    """Combinations that are not compiled: `match` maps axes to the values concerned."""

    match: Mapping[str, Sequence[str]]
    reason: str

    def covers(self, row: Mapping[str, str]) -> bool:
        return all(row[axis] in values for axis, values in self.match.items())


@dataclass(frozen=True)
class Preset:
    """A named choice of variants."""

    name: str
    about: str
    take: Sequence[str]


@dataclass(frozen=True)
class Matrix:
    """All variants in a stable order, and what the data files say about them."""

    axes: Mapping[str, Sequence[str]]
    exclusions: Sequence[Exclusion]
    presets: Mapping[str, Preset]
    variants: Sequence[Variant]

    def select(self, preset: str, families: Iterable[str] | None = None) -> list[Variant]:
        """The variants of a preset, of the given families only if any are given."""
        if preset not in self.presets:
            raise SpecError(f"preset {preset!r} is unknown; there are {', '.join(self.presets)}")
        wanted = set(self.axes["family"] if families is None else families)
        unknown = wanted - set(self.axes["family"])
        if unknown:
            known = ", ".join(self.axes["family"])
            raise SpecError(f"family {sorted(unknown)[0]!r} is unknown; there are {known}")
        take = self.presets[preset].take
        return [
            variant
            for variant in self.variants
            if variant.family in wanted and any(fnmatch.fnmatchcase(variant.id, p) for p in take)
        ]


def load_matrix(directory: Path = VARIANTS_DIR) -> Matrix:
    """Reads forward.toml, tiles.toml and presets.toml.

    Raises:
        SpecError: an unknown axis or value, an exclusion without a reason or without effect, a
            variant with no tile or more than one, a tile without use, a preset without match.
    """
    forward = _read(directory / "forward.toml")
    axes = _checked_axes(forward.get("axes", {}))
    exclusions = [_exclusion(row, axes) for row in forward.get("exclude", [])]
    rows = _expand(axes, exclusions)
    variants = _with_tiles(rows, _read(directory / "tiles.toml").get("tile", []), axes)
    ids = [variant.id for variant in variants]
    if len(set(ids)) != len(ids):
        raise SpecError("forward.toml: two variants share an id; an axis value is written twice")
    presets = {
        name: _preset(name, row, ids) for name, row in _read(directory / "presets.toml").items()
    }
    return Matrix(axes, exclusions, presets, variants)


def _read(path: Path) -> dict:
    with path.open("rb") as file:
        return tomllib.load(file)


def _checked_axes(axes: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    if tuple(axes) != AXES:
        raise SpecError(f"forward.toml: [axes] must be {', '.join(AXES)}, not {', '.join(axes)}")
    return {axis: list(values) for axis, values in axes.items()}


def _checked_match(
    row: Mapping[str, object], axes: Mapping[str, Sequence[str]], where: str
) -> dict[str, list[str]]:
    match = {}
    for axis, value in row.items():
        if axis not in axes:
            raise SpecError(f"{where}: {axis!r} is no axis; there are {', '.join(axes)}")
        values = value if isinstance(value, list) else [value]
        for one in values:
            if one not in axes[axis]:
                raise SpecError(f"{where}: {axis} = {one!r} is not one of {', '.join(axes[axis])}")
        match[axis] = values
    return match


def _exclusion(row: Mapping[str, object], axes: Mapping[str, Sequence[str]]) -> Exclusion:
    match = {key: value for key, value in row.items() if key != "reason"}
    reason = str(row.get("reason", "")).strip()
    if not reason:
        raise SpecError(f"forward.toml: the exclusion of {match} gives no reason")
    return Exclusion(_checked_match(match, axes, "forward.toml: [[exclude]]"), reason)


def _expand(
    axes: Mapping[str, Sequence[str]], exclusions: Sequence[Exclusion]
) -> list[dict[str, str]]:
    rows = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    for exclusion in exclusions:
        if not any(exclusion.covers(row) for row in rows):
            raise SpecError(f"forward.toml: the exclusion of {exclusion.match} excludes nothing")
    return [row for row in rows if not any(exclusion.covers(row) for exclusion in exclusions)]


def _with_tiles(
    rows: Sequence[Mapping[str, str]],
    tile_rows: Sequence[Mapping[str, object]],
    axes: Mapping[str, Sequence[str]],
) -> list[Variant]:
    shape = [field.name for field in fields(Tile)]
    tiles = []
    for tile_row in tile_rows:
        match = {k: v for k, v in tile_row.items() if k not in shape and k != "why"}
        where = f"tiles.toml: the row of {match}"
        missing = [name for name in [*shape, "why"] if not tile_row.get(name)]
        if missing:
            raise SpecError(f"{where} lacks {', '.join(missing)}")
        tile = Tile(**{name: int(tile_row[name]) for name in shape})
        tiles.append((Exclusion(_checked_match(match, axes, where), ""), tile))

    used = set()
    variants = []
    for row in rows:
        matching = [i for i, (match, _) in enumerate(tiles) if match.covers(row)]
        if len(matching) != 1:
            raise SpecError(f"tiles.toml: {len(matching)} rows match {dict(row)}; one must")
        used.add(matching[0])
        variants.append(_variant(row, tiles[matching[0]][1]))
    for i, (match, _) in enumerate(tiles):
        if i not in used:
            raise SpecError(f"tiles.toml: the row of {match.match} matches no variant")
    return variants


def _variant(row: Mapping[str, str], tile: Tile) -> Variant:
    qk, _, vo = row["head_dim"].partition("x")
    return Variant(
        family=row["family"],
        q_dtype=row["q_dtype"],
        kv_dtype=row["q_dtype"] if row["kv_dtype"] == "same" else row["kv_dtype"],
        head_dim_qk=int(qk),
        head_dim_vo=int(vo or qk),
        tile_class=row["tile_class"],
        logits=row["logits"],
        mask=row["mask"],
        tile=tile,
    )


def _preset(name: str, row: Mapping[str, object], ids: Sequence[str]) -> Preset:
    preset = Preset(name, str(row.get("about", "")), list(row.get("take", [])))
    for pattern in preset.take:
        if not fnmatch.filter(ids, pattern):
            raise SpecError(f"presets.toml: [{name}] takes {pattern!r}, which matches no variant")
    return preset
