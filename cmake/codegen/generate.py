"""Turns cpp/variants into the vocabulary, kernels, arguments of calls, variants.json and docs.

generate.py --list       one line per kernel source: family, its architectures, file, ids
generate.py --write DIR  writes them; files that are already right are not touched
generate.py --refresh    rewrites what the repository holds of it: docs/variants.md and the
                         vocabulary and AttentionOptions in python/preflash/_core.pyi
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import ceil
from pathlib import Path
from string import Template

import options
import render
from spec import Matrix, SpecError, Tile, Variant, load_matrix, load_options
from vocabulary import SIZES, Family, Vocabulary

ROOT = Path(__file__).resolve().parents[2]
TEMPLATES = Path(__file__).resolve().parent / "templates"
DOCS = ROOT / "docs" / "variants.md"
STUB = ROOT / "python" / "preflash" / "_core.pyi"
STUB_END = "# End of what {} says.\n"
STUB_BEGIN = "# From cpp/variants/{}, by cmake/codegen/generate.py --refresh:\n"
CALLS = "python/preflash/_check/calls.py"
RULES = "python/preflash/_check/rules.py"

# Headers and the templates that kernels share cost a file as much as two to five kernels do; above
# six the longest file holds up a build on 16 cores.
MAX_KERNELS_PER_FILE = 6
# NOTE: the machine code of sm90's kernels depends on their neighbours in a file, in a few scalar
# instructions; sm80's does not. Other files for sm90 are other kernels, to be measured again.
MAX_HOPPER_KERNELS_PER_FILE = 4
# A family of at most so many kernels, as in the preset ci, compiles fastest on two cores if kernels
# of all head_dims share files.
FEW_KERNELS = 12
_SPLITTING_AXES = (
    "segments",
    "load",
    "tile_class",
    "position",
    "logits",
    "mask",
    "sparsity",
)


@dataclass(frozen=True)
class Build:
    """Contents of one build."""

    preset: str
    architectures: Sequence[str]
    variants: Sequence[Variant]

    @property
    def families(self) -> list[Family]:
        """Families with a variant in this build."""
        return list({v.family: v.family_facts for v in self.variants}.values())

    def architectures_of(self, family: Family) -> list[str]:
        return architectures_of(family, self.architectures)


@dataclass(frozen=True)
class Source:
    """One generated file of kernels. `name` is relative to the output directory."""

    family: Family
    name: str
    variants: Sequence[Variant]


def architectures_of(family: Family, architectures: Sequence[str]) -> list[str]:
    """PREFLASH_ARCHS entries that a family is compiled for; if none, the build omits it. An entry
    like 90a names a family of that architecture alone."""
    if family.on_cpu:
        return []
    if not family.architecture:
        return [name for name in architectures if not name.removesuffix("+PTX").endswith("a")]
    named = {architecture.removesuffix("+PTX").removesuffix("a") for architecture in architectures}
    return [family.compiled_for] if family.architecture in named else []


def sources(variants: Sequence[Variant]) -> list[Source]:
    """Returns the sources. Kernels of one family, dtypes and, unless there are few, head_dim share
    a file, or several if it would be long. A CPU variant is a line of the registry without code:
    one file has them all."""
    result = []
    groups: dict[str, list[Variant]] = {}
    of_cpu = [variant for variant in variants if variant.family_facts.on_cpu]
    if of_cpu:
        family = of_cpu[0].family_facts
        result.append(Source(family, f"{family.name}/variants.cpp", of_cpu))
    counts = Counter(variant.family for variant in variants)
    for variant in variants:
        if not variant.family_facts.on_cpu:
            last = "kv_dtype" if counts[variant.family] <= FEW_KERNELS else "head_dim"
            groups.setdefault(_id_up_to(last, variant), []).append(variant)

    for name, members in groups.items():
        family = members[0].family_facts
        by_axes = family.short_tiles == "own" and counts[family.name] > FEW_KERNELS
        split = _parts_by_axes if by_axes else _even_parts
        for part, of_part in split(name, members).items():
            result.append(Source(family, f"{family.name}/{part}.cu", of_part))
    return result


def _even_parts(name: str, members: Sequence[Variant]) -> dict[str, Sequence[Variant]]:
    """Splits the members into equal runs of at most MAX_KERNELS_PER_FILE."""
    count = ceil(len(members) / MAX_KERNELS_PER_FILE)
    ends = [len(members) * i // count for i in range(count + 1)]
    return {
        f"{name}_{i + 1}of{count}": members[begin:end]
        for i, (begin, end) in enumerate(pairwise(ends))
    }


def _parts_by_axes(name: str, members: Sequence[Variant]) -> dict[str, list[Variant]]:
    """Splits into at most MAX_HOPPER_KERNELS_PER_FILE each, named by the axes that differ."""
    parts = {name: list(members)}
    for axis in _SPLITTING_AXES:
        if max(map(len, parts.values())) <= MAX_HOPPER_KERNELS_PER_FILE:
            break
        finer: dict[str, list[Variant]] = {}
        for part, of_part in parts.items():
            if len(of_part) <= MAX_HOPPER_KERNELS_PER_FILE:
                finer[part] = of_part
                continue
            for variant in of_part:
                finer.setdefault(f"{part}_{variant.values[axis]}", []).append(variant)
        if len(finer) > len(parts):
            parts = finer
    return parts


def source_text(source: Source) -> str:
    return _template("kernels.in").substitute(
        launch_header=_launch_header(source.family),
        types="\n\n".join(variant_type(variant) for variant in source.variants),
        entries="\n".join(
            f"ForwardKernel {entry(v)}() {{\n"
            f"  return {source.family.name}::forward_kernel_entry<variants::{v.id}>();\n}}"
            for v in source.variants
        ),
    )


def variant_type(variant: Variant) -> str:
    """The named C++ type that is a kernel's one template parameter."""
    second = variant.second_tile
    return (
        _template("variant.in")
        .substitute(
            id=variant.id,
            variant=_initialiser(variant),
            tile=_tile(variant.tile),
            second_tile=""
            if second is None
            else f"\n  static constexpr TileShape kSecondTile = {_tile(second)};",
        )
        .rstrip("\n")
    )


def _tile(tile: Tile) -> str:
    return "{" + ", ".join(f".{name} = {value}" for name, value in asdict(tile).items()) + "}"


def entry(variant: Variant) -> str:
    return f"preflash_entry_{variant.id}"


def library_text(family: Family, build: Build) -> str:
    """The table that a family's library exports."""
    members = [variant for variant in build.variants if variant.family == family.name]
    template = "library_cpu.in" if family.on_cpu else "library_cuda.in"
    return _template(template).substitute(
        family=family.cpp,
        architectures=";".join(build.architectures_of(family)),
        declarations="\n".join(f"ForwardKernel {entry(v)}();" for v in members),
        entries="\n".join(f"      {entry(v)}()," for v in members),
    )


def vocabulary_text(vocabulary: Vocabulary) -> str:
    """preflash/vocabulary.h: enums, the facts of the families, struct Variant."""
    return _template("vocabulary.in").substitute(
        enums=render.enum_definitions(vocabulary),
        families=render.family_list(vocabulary, list(vocabulary.families)),
        preference=render.family_list(vocabulary, vocabulary.preference),
        traits=render.family_cases(vocabulary),
        conversions=render.conversions(vocabulary),
        fields=render.variant_fields(vocabulary),
        option_count=render.option_count(vocabulary),
        hash_steps=render.hash_steps(vocabulary),
    )


def matrix_text(matrix: Matrix) -> str:
    """registry/matrix.h: the whole matrix, so that a miss can say what a fuller build would serve;
    its axes, which serve a request or do not; and ids."""
    return _template("matrix.in").substitute(
        rows="\n".join(f"    {_initialiser(variant)}," for variant in matrix.variants),
        axes=render.axis_rows(matrix.vocabulary),
        id_steps=render.id_steps(matrix.vocabulary),
    )


def bind_vocabulary_text(vocabulary: Vocabulary) -> str:
    return _template("bind_vocabulary.in").substitute(
        enums=render.enum_bindings(vocabulary),
        variant=render.variant_binding(vocabulary),
        row_steps=render.row_steps(vocabulary),
    )


def variants_json(build: Build) -> str:
    """Returns the JSON that `python -m preflash variants` shows."""
    rows = [
        {"id": v.id, "backend": v.backend, **v.fields, "tile": asdict(v.tile), **_second(v)}
        for v in build.variants
    ]
    document = {
        "preset": build.preset,
        "architectures": list(build.architectures),
        "variants": rows,
    }
    return json.dumps(document, indent=1) + "\n"


def _second(variant: Variant) -> dict[str, object]:
    tile = variant.second_tile
    return {} if tile is None else {"second_tile": asdict(tile)}


def docs_text(matrix: Matrix) -> str:
    """docs/variants.md: what the parts of an id mean, and one row per variant."""
    lines = [
        "| id | backend | q | kv | head_dim | tile m x n | stages | warps | CTAs/SM |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| `{v.id}` | {v.backend} | {v.q_dtype} | {v.fields['kv_dtype']} | {v.head_dim} "
        f"| {_of_segments(v, '{0.m} x {0.n}')} | {_of_segments(v, '{0.stages}')} "
        f"| {v.tile.warps} | {v.tile.ctas_per_sm} |"
        for v in matrix.variants
    ]
    return _template("variants.md.in").substitute(
        axes=render.docs(matrix.vocabulary), matrix="\n".join(lines)
    )


def _of_segments(variant: Variant, text: str) -> str:
    tiles = [tile for tile in (variant.tile, variant.second_tile) if tile is not None]
    return " + ".join(text.format(tile) for tile in tiles)


def stub_text(vocabulary: Vocabulary, table: options.Table) -> str:
    """_core.pyi with the vocabulary that forward.toml has, and the fields that options.toml has."""
    text = _replaced(STUB.read_text(), "forward.toml", render.stub(vocabulary))
    return _replaced(text, "options.toml", options.stub(table))


def _replaced(text: str, source: str, part: str) -> str:
    """The text with another part between the lines that name its source."""
    end = STUB_END.format(source)
    before, begin, rest = text.partition(STUB_BEGIN.format(source))
    margin = before[before.rindex("\n") + 1 :]  # of the line that begins it
    _, _, after = rest.partition(margin + end)
    return f"{before}{begin}{part}{margin}{end}{after}"


def refresh(matrix: Matrix) -> None:
    DOCS.write_text(docs_text(matrix))
    STUB.write_text(stub_text(matrix.vocabulary, load_options()))


def calls_text(table: options.Table) -> str:
    """preflash/_check/calls.py."""
    return _template("calls.py.in").substitute(
        deciding=options.deciding(table),
        classes=options.classes(table),
        checked_alone=options.checked_alone(table),
        neutral=options.neutral(table),
        aliases=options.aliases(table),
    )


def rules_text(table: options.Table) -> str:
    """preflash/_check/rules.py."""
    return _template("rules.py.in").substitute(
        tensors=options.tensors(table), ranges=options.ranges(table)
    )


def bind_options_text(table: options.Table) -> str:
    return _template("bind_options.in").substitute(visits=options.visits(table))


def outputs(build: Build, matrix: Matrix) -> dict[str, str]:
    """Every generated file: name relative to the output directory -> text."""
    files = {source.name: source_text(source) for source in sources(build.variants)}
    for family in build.families:
        files[f"{family.name}/library.cpp"] = library_text(family, build)
    files["preflash/vocabulary.h"] = vocabulary_text(matrix.vocabulary)
    files["bindings/bind_vocabulary.inl"] = bind_vocabulary_text(matrix.vocabulary)
    files["matrix.cpp"] = matrix_text(matrix)
    files["variants.json"] = variants_json(build)
    table = load_options()
    files["bindings/bind_options.inl"] = bind_options_text(table)
    files[CALLS] = calls_text(table)
    files[RULES] = rules_text(table)
    return files


def write(build: Build, matrix: Matrix, directory: Path) -> None:
    """Writes what changed and removes sources that no longer belong to the build."""
    files = outputs(build, matrix)
    for name, text in files.items():
        path = directory / name
        if path.is_file() and path.read_text() == text:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for family in matrix.families:
        for path in (directory / family).glob("*.c*"):
            if path.relative_to(directory).as_posix() not in files:
                path.unlink()


def _initialiser(variant: Variant) -> str:
    enums = {
        field: variant.vocabulary.enums[axis.type]
        for axis in variant.vocabulary.axes.values()
        if axis.type != SIZES
        for field in axis.fields
    }
    values = {
        name: enums[name].cpp(value) if name in enums else value
        for name, value in variant.fields.items()
    }
    return "{" + ", ".join(f".{name} = {value}" for name, value in values.items()) + "}"


def _id_up_to(last: str, variant: Variant) -> str:
    """Returns the variant's id as far as the axis `last`."""
    axes = variant.vocabulary.axes
    names = list(axes)[: list(axes).index(last) + 1]
    parts = [axes[name].part_of_id(variant.values[name]) for name in names]
    return "_".join(part for part in parts if part)


def _launch_header(family: Family) -> str:
    if family.on_cpu:
        return f"{family.name}/forward_launch.h"
    return f"kernels/{family.name}/forward_launch.cuh"


def _template(name: str) -> Template:
    return Template((TEMPLATES / name).read_text())


def _build(matrix: Matrix, arguments: argparse.Namespace) -> Build:
    families = arguments.families.split(",") if arguments.families else None
    architectures = [a for a in arguments.archs.replace(",", ";").split(";") if a]
    variants = matrix.select(arguments.preset, families)
    if architectures:
        variants = [
            variant
            for variant in variants
            if variant.family_facts.on_cpu or architectures_of(variant.family_facts, architectures)
        ]
    return Build(arguments.preset, architectures, variants)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--list", action="store_true", help="one line per kernel source")
    action.add_argument("--write", metavar="DIR", type=Path, help="write the generated files")
    action.add_argument("--refresh", action="store_true", help="rewrite docs and _core.pyi")
    parser.add_argument("--preset", default="full", help="a table of presets.toml")
    parser.add_argument("--families", default="", help="comma-separated; default: all")
    parser.add_argument(
        "--archs",
        default="",
        help='as in PREFLASH_ARCHS, e.g. "80;90"; default: every family, for none',
    )
    arguments = parser.parse_args(argv)

    try:
        matrix = load_matrix()
        build = _build(matrix, arguments)
    except SpecError as error:
        for line in str(error).splitlines():
            print(f"generate.py: {line}", file=sys.stderr)
        return 1
    if arguments.list:
        for source in sources(build.variants):
            architectures = ",".join(build.architectures_of(source.family))
            ids = ",".join(variant.id for variant in source.variants)
            print(source.family.name, architectures, source.name, ids, sep="\t")
    elif arguments.refresh:
        refresh(matrix)
    else:
        write(build, matrix, arguments.write)
    return 0


if __name__ == "__main__":
    sys.exit(main())
