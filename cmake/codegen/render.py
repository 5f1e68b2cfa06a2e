"""The vocabulary in each language that speaks it: C++, the binding, its stub, and the docs."""

from __future__ import annotations

from collections.abc import Sequence

from vocabulary import (
    DEQUANTIZATION,
    OPERANDS,
    OPTION_CHOICES,
    SCHEDULES,
    SHORT_TILES,
    SIZES,
    TILE_ROWS,
    Axis,
    Conversion,
    Enum,
    Family,
    Vocabulary,
)


def enum_definitions(vocabulary: Vocabulary) -> str:
    return "\n\n".join(_enum_definition(enum) for enum in vocabulary.enums.values())


def _enum_definition(enum: Enum) -> str:
    values = "\n".join(f"  {v.cpp},  // {v.about}" for v in enum.values.values())
    parts = [
        f"// {enum.about}\nenum class {enum.name} : std::uint8_t {{\n{values}\n}};",
        _switch(enum, "std::string_view name_of", {v.cpp: f'"{v.name}"' for v in _values(enum)}),
    ]
    if enum.renamed:
        names = {v.cpp: f'"{v.python_name}"' for v in _values(enum)}
        parts.append(_switch(enum, "std::string_view python_name_of", names))
    if all(value.bytes for value in _values(enum)):
        parts.append(
            _switch(enum, "int size_of", {v.cpp: str(v.bytes) for v in _values(enum)}, "0")
        )
    return "\n\n".join(parts)


def _values(enum: Enum):
    return enum.values.values()


def _switch(enum: Enum, function: str, results: dict[str, str], otherwise: str = '"?"') -> str:
    cases = "\n".join(
        f"    case {enum.name}::{value}: return {result};" for value, result in results.items()
    )
    return (
        f"constexpr {function}({enum.name} value) {{\n  switch (value) {{\n{cases}\n  }}\n"
        f"  return {otherwise};\n}}"
    )


def family_list(vocabulary: Vocabulary, names: Sequence[str]) -> str:
    return ", ".join(vocabulary.enums["Family"].cpp(name) for name in names)


def family_cases(vocabulary: Vocabulary) -> str:
    return "\n".join(
        f"    case Family::{family.cpp}:\n      return {{{_traits(family)}}};"
        for family in vocabulary.families.values()
    )


def _traits(family: Family) -> str:
    highest = family.highest_capability
    values = {
        "backend": f'"{family.backend}"',
        "lowest_capability": family.lowest_capability,
        "highest_capability": "FamilyTraits::kAnyLater" if highest is None else highest,
        "architecture": f'"{family.architecture}"',
        "operands": f"Operands::{OPERANDS[family.operands]}",
        "options": f"OptionChoice::{OPTION_CHOICES[family.options]}",
        "segments": f"OptionChoice::{OPTION_CHOICES[family.segments]}",
        "dequantization": f"Dequantization::{DEQUANTIZATION[family.dequantization]}",
        "tile_rows": f"TileRows::{TILE_ROWS[family.tile_rows]}",
        "short_tiles": f"ShortTiles::{SHORT_TILES[family.short_tiles]}",
        "short_rows": family.short_rows,
        "schedule": f"Schedule::{SCHEDULES[family.schedule]}",
        "joint_head_dim": family.joint_head_dim,
        "item_keys": family.item_keys,
        "flops_per_byte": family.flops_per_byte,
        "most_prefill": family.most_prefill,
        "most_decode": family.most_decode,
    }
    return ",\n              ".join(f".{name} = {value}" for name, value in values.items())


def conversions(vocabulary: Vocabulary) -> str:
    """The arrays of the families' conversions, and the cases of conversions_of()."""
    families = [family for family in vocabulary.families.values() if family.conversions]
    arrays, cases = [], []
    for family in families:
        rows = ",\n    ".join(_conversion(row) for row in family.conversions)
        name = f"kConversionsOf{family.cpp.removeprefix('k')}"
        arrays.append(f"inline constexpr Conversion {name}[] = {{\n    {rows}}};\n")
        cases.append(f"    case Family::{family.cpp}:\n      return {name};")
    function = "constexpr std::span<const Conversion> conversions_of(Family family)"
    cases = "\n".join([*cases, "    default:", "      return {};"])
    return "\n".join([*arrays, f"{function} {{\n  switch (family) {{\n{cases}\n  }}\n}}"])


def _conversion(row: Conversion) -> str:
    values = {
        "rotates": str(row.rotates).lower(),
        "products_of_8_bits": str(row.products).lower(),
        "most_head_dim": row.most_head_dim,
        "most_vo": row.most_vo,
        "key": row.key,
        "gathered_key": row.key if row.gathered_key is None else row.gathered_key,
        "queries": float(row.queries),
        "of_columns": str(row.of_columns).lower(),
    }
    given = (f".{name} = {value}" for name, value in values.items() if value is not None)
    return f"{{{', '.join(given)}}}"


def _typed_fields(vocabulary: Vocabulary) -> list[tuple[str, str, Axis]]:
    """Type and name of each field of struct Variant, and the axis that it belongs to."""
    return [
        ("int" if axis.type == SIZES else axis.type, field, axis)
        for axis in vocabulary.axes.values()
        for field in axis.fields
    ]


def _default(vocabulary: Vocabulary, kind: str, axis: Axis) -> str:
    """Initial value of a field of the axis: the axis's default, or its type's first value."""
    if kind == "int":
        return "0"
    enum = vocabulary.enums[kind]
    known = axis.default in enum.values
    return enum.cpp(axis.default if known else next(iter(enum.values)))


def variant_fields(vocabulary: Vocabulary) -> str:
    return "\n".join(
        f"  {kind} {field} = {_default(vocabulary, kind, axis)};"
        + (f"  // {axis.about}" if field == axis.fields[0] else "")
        for kind, field, axis in _typed_fields(vocabulary)
    )


def option_count(vocabulary: Vocabulary) -> str:
    """The expression that counts a variant's options: Vocabulary.num_options(), in C++."""
    return " + ".join(
        f"(variant.{axis.fields[0]} != {vocabulary.enums[axis.type].cpp(axis.default)})"
        for axis in vocabulary.option_axes
    )


def hash_steps(vocabulary: Vocabulary) -> str:
    return "\n".join(
        f"    add(static_cast<std::size_t>(variant.{field}));"
        for _, field, _ in _typed_fields(vocabulary)
    )


def id_steps(vocabulary: Vocabulary) -> str:
    """The body of id_of(variant): what Vocabulary.id_of() says, in C++."""
    return "\n".join(_id_step(vocabulary, axis) for axis in vocabulary.axes.values())


def _id_step(vocabulary: Vocabulary, axis: Axis) -> str:
    before, after = axis.id.split("{}")
    if axis.type == SIZES:
        value = f'sizes_of({", ".join(f"variant.{field}" for field in axis.fields)}, "x")'
    else:
        value = f"std::string(name_of(variant.{axis.fields[0]}))"
    text = " + ".join(part for part in (_quoted(before), value, _quoted(after)) if part)
    step = f"parts.push_back({text});"
    if axis.same_as is not None:
        return f"  if (variant.{axis.name} != variant.{axis.same_as}) {step}"
    if axis.default is not None:
        default = vocabulary.enums[axis.type].cpp(axis.default)
        return f"  if (variant.{axis.name} != {default}) {step}"
    return f"  {step}"


def _quoted(text: str) -> str:
    return f'"{text}"' if text else ""


def axis_rows(vocabulary: Vocabulary) -> str:
    """The axes that decide whether a kernel serves a request."""
    return "\n".join(
        _axis_row(vocabulary, axis)
        for axis in vocabulary.axes.values()
        if axis.match in ("equal", "covers")
    )


def _axis_row(vocabulary: Vocabulary, axis: Axis) -> str:
    operator = ">=" if axis.match == "covers" else "=="
    serves = " && ".join(f"c.{field} {operator} w.{field}" for field in axis.fields)
    if axis.option:
        default = vocabulary.enums[axis.type].cpp(axis.default)
        serves = f"serves_option(c, c.{axis.fields[0]}, w.{axis.fields[0]}, {default})"
    if axis.type == SIZES:
        value = f"sizes_text({', '.join(f'v.{field}' for field in axis.fields)})"
    else:
        function = "python_name_of" if vocabulary.enums[axis.type].renamed else "name_of"
        value = f"std::string({function}(v.{axis.fields[0]}))"
    return (
        f'      {{"{axis.in_messages}", {str(axis.option).lower()}, '
        f"[](const Variant& v) {{ return {value}; }},\n"
        f"       [](const Variant& c, const Variant& w) {{ return {serves}; }}}},"
    )


def enum_bindings(vocabulary: Vocabulary) -> str:
    return "\n".join(
        f'  py::enum_<{enum.name}>(m, "{enum.name}")'
        + "".join(f'\n      .value("{v.python_name}", {enum.name}::{v.cpp})' for v in _values(enum))
        + ";"
        for enum in vocabulary.enums.values()
    )


def variant_binding(vocabulary: Vocabulary) -> str:
    typed = _typed_fields(vocabulary)
    parameters = ", ".join(f"{kind} {field}" for kind, field, _ in typed)
    values = ", ".join(f".{field} = {field}" for _, field, _ in typed)
    arguments = ", ".join(
        f'py::arg("{field}")'
        + (f" = {_default(vocabulary, kind, axis)}" if _optional(axis) else "")
        for kind, field, axis in typed
    )
    return (
        f"      .def(py::init([]({parameters}) {{\n"
        f"             return Variant{{{values}}};\n           }}),\n           {arguments})"
    )


def _optional(axis: Axis) -> bool:
    return axis.default is not None and axis.same_as is None


def row_steps(vocabulary: Vocabulary) -> str:
    return "\n".join(
        f'  row["{field}"] = '
        + (f"variant.{field};" if kind == "int" else f"std::string(name_of(variant.{field}));")
        for kind, field, _ in _typed_fields(vocabulary)
    )


def stub(vocabulary: Vocabulary) -> str:
    """The vocabulary's part of python/preflash/_core.pyi."""
    lines = []
    for enum in vocabulary.enums.values():
        names = [value.python_name for value in _values(enum)]
        lines += [f"class {enum.name}:", *(f"    {name}: {enum.name}" for name in names), ""]
    lines += ["class Variant:", "    def __init__(", "        self,"]
    lines += [
        f"        {field}: {kind}{' = ...' if _optional(axis) else ''},"
        for kind, field, axis in _typed_fields(vocabulary)
    ]
    lines += ["    ) -> None: ...", "    @property", "    def id(self) -> str: ..."]
    lines += ["    def __hash__(self) -> int: ...", ""]
    return "\n".join(lines) + "\n"


def docs(vocabulary: Vocabulary) -> str:
    """The axes and the families as Markdown."""
    lines = ["| axis | value | in an id | means |", "|---|---|---|---|"]
    for axis in vocabulary.axes.values():
        enum = vocabulary.enums.get(axis.type)
        for i, value in enumerate(axis.values):
            known = enum.values.get(value) if enum else None
            title = f"`{axis.name}`: {axis.about}" if i == 0 else ""
            part = axis.part_of_id(value)
            means = known.about if known else f"{axis.same_as}'s" if axis.same_as else ""
            lines.append(f"| {title} | {value} | {f'`{part}`' if part else ''} | {means} |")
    return "\n".join(lines) + "\n"
