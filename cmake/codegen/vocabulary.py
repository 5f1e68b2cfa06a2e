"""The words of cpp/variants/forward.toml: families, types and axes, and how they spell an id."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

SIZES = "sizes"  # the type of an axis of integers: "128", or "192x128" for two of them
MATCHES = ("equal", "covers", "preferred", "library")
OPERANDS = {"stored": "kStored", "computed": "kComputed"}
OPTION_CHOICES = {"compiled": "kCompiled", "run_time": "kRunTime"}
DEQUANTIZATION = {"to_queries": "kToQueries", "to_float16": "kToFloat16"}
SHORT_TILES = {"same_bits": "kSameBits", "own": "kOwn"}
TILE_ROWS = {"full": "kFull", "token_aligned": "kTokenAligned"}
SCHEDULES = {"one_per_item": "kOnePerItem", "persistent": "kPersistent"}


class SpecError(ValueError):
    """A contradiction in cpp/variants/*.toml."""


@dataclass(frozen=True)
class Conversion:
    """A row of a family's conversions: preflash::Conversion."""

    key: float
    gathered_key: float | None = None  # None: as key
    queries: float = 0.0
    rotates: bool = False
    products: bool = False
    most_head_dim: int | None = None  # None: any
    most_vo: int | None = None
    of_columns: bool = False


@dataclass(frozen=True)
class Family:
    """A [family.*] table: preflash::FamilyTraits, and what the build knows besides."""

    name: str
    cpp: str
    about: str
    backend: str
    lowest_capability: int
    operands: str
    tile_rows: str
    schedule: str
    highest_capability: int | None = None  # None: all later ones
    options: str = "compiled"
    segments: str = "compiled"
    dequantization: str = "to_queries"
    short_tiles: str = "same_bits"
    short_rows: int = 64
    item_keys: int = 0
    flops_per_byte: int = 0
    most_prefill: int = 0
    most_decode: int = 0
    joint_head_dim: int = 0
    head_dim_step: int = 8  # compiled head_dims are multiples of it
    architecture: str = ""  # code of this one alone; "": of every architecture that is asked for
    compiled_for: str = ""  # its full name
    conversions: Sequence[Conversion] = ()

    @property
    def on_cpu(self) -> bool:
        return self.lowest_capability == 0


@dataclass(frozen=True)
class Value:
    """One enumerator."""

    name: str
    cpp: str
    about: str
    python: str = ""  # in the binding; "": the same name
    bytes: int = 0  # of an element, where the values are dtypes

    @property
    def python_name(self) -> str:
        return self.python or self.name


@dataclass(frozen=True)
class Enum:
    """An enum class of C++ and of the binding; values by name, in the order of C++."""

    name: str
    about: str
    values: Mapping[str, Value]

    @property
    def renamed(self) -> bool:
        """True if a value has another name in the binding."""
        return any(value.python for value in self.values.values())

    def cpp(self, value: str) -> str:
        return f"{self.name}::{self.values[value].cpp}"


@dataclass(frozen=True)
class Axis:
    """One decision that is taken when a kernel is compiled."""

    name: str
    about: str
    type: str  # an Enum's name, or SIZES
    values: Sequence[str]
    fields: Sequence[str]  # of struct Variant: one of the enum, or one int for each size
    default: str | None = None  # None: always part of the id
    same_as: str | None = None  # the axis whose value "same" stands for
    id: str = "{}"
    match: str = "equal"
    option: bool = False  # whether its values but the default are options of a call
    title: str = ""  # in messages; "": its name

    @property
    def in_messages(self) -> str:
        return self.title or self.name

    def part_of_id(self, value: str) -> str:
        return "" if value == self.default else self.id.format(value)


@dataclass(frozen=True)
class Vocabulary:
    """All of forward.toml but the matrix that it spans."""

    families: Mapping[str, Family]
    preference: Sequence[str]  # family names, what backend="auto" tries first at the front
    enums: Mapping[str, Enum]
    axes: Mapping[str, Axis]

    @property
    def option_axes(self) -> Sequence[Axis]:
        return [axis for axis in self.axes.values() if axis.option]

    def options_of(self, values: Mapping[str, str]) -> frozenset[str]:
        """The axes on which it has an option."""
        axes = self.option_axes
        return frozenset(axis.name for axis in axes if values[axis.name] != axis.default)

    def num_options(self, values: Mapping[str, str]) -> int:
        return len(self.options_of(values))

    def id_of(self, values: Mapping[str, str]) -> str:
        parts = [axis.part_of_id(values[axis.name]) for axis in self.axes.values()]
        return "_".join(part for part in parts if part)


def read_vocabulary(document: Mapping) -> Vocabulary:
    """Reads a parsed forward.toml. Raises SpecError if the file contradicts itself."""
    families = {
        name: _checked_family(_table(Family, f"[family.{name}]", {"name": name, **row}))
        for name, row in document.get("family", {}).items()
    }
    preference = list(document.get("preference", []))
    if sorted(preference) != sorted(families):
        raise SpecError(
            f"forward.toml: preference must name each family once: {', '.join(families)}"
        )
    enums = {name: _enum(name, row) for name, row in document.get("types", {}).items()}
    members = {f.name: Value(f.name, f.cpp, f.about) for f in families.values()}
    enums["Family"] = Enum("Family", "A set of kernel sources.", members)
    axes: dict[str, Axis] = {}
    for name, row in document.get("axes", {}).items():
        axes[name] = _axis(name, row, enums, axes)
    if next(iter(axes), None) != "family":
        raise SpecError("forward.toml: the first of [axes] must be family")
    return Vocabulary(families, preference, enums, axes)


def _table(kind: type, where: str, row: Mapping[str, object]):
    """The row as a dataclass; its fields are the keys that the row may and must have."""
    known = [field.name for field in fields(kind)]
    for key in row:
        if key not in known:
            raise SpecError(f"forward.toml: {where}: {key!r} is not one of {', '.join(known)}")
    try:
        return kind(**row)
    except TypeError as error:
        raise SpecError(f"forward.toml: {where}: {error}") from error


def _one_of(where: str, value: object, known: Sequence[str]) -> None:
    if value not in known:
        raise SpecError(f"forward.toml: {where} = {value!r} is not one of {', '.join(known)}")


def _checked_family(family: Family) -> Family:
    where = f"[family.{family.name}]"
    rows = [_table(Conversion, f"{where} conversions", row) for row in family.conversions]
    family = replace(family, conversions=rows)
    _one_of(f"{where} operands", family.operands, list(OPERANDS))
    _one_of(f"{where} options", family.options, list(OPTION_CHOICES))
    _one_of(f"{where} segments", family.segments, list(OPTION_CHOICES))
    _one_of(f"{where} dequantization", family.dequantization, list(DEQUANTIZATION))
    _one_of(f"{where} short_tiles", family.short_tiles, list(SHORT_TILES))
    _one_of(f"{where} tile_rows", family.tile_rows, list(TILE_ROWS))
    _one_of(f"{where} schedule", family.schedule, list(SCHEDULES))
    apart = (family.flops_per_byte, family.most_prefill, family.most_decode)
    if any(apart) and not all(apart):
        raise SpecError(
            f"forward.toml: {where}: flops_per_byte, most_prefill and most_decode go together"
        )
    if bool(family.architecture) != bool(family.compiled_for):
        raise SpecError(f"forward.toml: {where}: architecture and compiled_for go together")
    return family


def _enum(name: str, row: Mapping) -> Enum:
    values = {
        key: _table(Value, f"[types.{name}] {key}", {"name": key, **value})
        for key, value in row.get("values", {}).items()
    }
    if not values or not row.get("about"):
        raise SpecError(f"forward.toml: [types.{name}] needs values and a line `about` it")
    return Enum(name, row["about"], values)


def _axis(name: str, row: Mapping, enums: Mapping[str, Enum], before: Mapping[str, Axis]) -> Axis:
    where = f"[axes.{name}]"
    kind = row.get("type")
    _one_of(f"{where} type", kind, [*enums, SIZES])
    known = list(enums[kind].values) if kind in enums else list(row.get("values", []))
    axis = _table(Axis, where, {"name": name, "values": known, "fields": [name], **row})
    if axis.same_as is not None:
        _one_of(f"{where} same_as", axis.same_as, list(before))
        known.append("same")
    for value in axis.values:
        _one_of(f"{where} values", value, known)
    if len(set(axis.values)) != len(axis.values):
        raise SpecError(f"forward.toml: {where}: a value is written twice, so ids are shared")
    if axis.default is not None:
        _one_of(f"{where} default", axis.default, axis.values)
    _one_of(f"{where} match", axis.match, MATCHES)
    if axis.option and (axis.default is None or axis.type == SIZES):
        raise SpecError(f"forward.toml: {where}: an option needs a default, the value without it")
    return axis
