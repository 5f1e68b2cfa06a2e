"""Turns the variant matrix into sources, a kernel table per family, variants.json and a docs table.

generate.py --list       one line per kernel source: family, its architectures, file, ids
generate.py --write DIR  writes them; files that are already right are not touched
generate.py --table      the matrix as a Markdown table
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from string import Template

from spec import Matrix, SpecError, Variant, load_matrix

TEMPLATES = Path(__file__).resolve().parent / "templates"

# Fewer kernels per file waste the seconds that the headers cost, more make rebuilds slow.
MAX_KERNELS_PER_FILE = 4

DTYPES = {
    "f16": "kFloat16",
    "bf16": "kBFloat16",
    "f32": "kFloat32",
    "e4m3": "kFloat8E4M3",
    "e5m2": "kFloat8E5M2",
}
FAMILIES = {"cpu": "kCpu", "sm80": "kSm80", "sm90": "kSm90"}
# Families whose code uses the features of one architecture and runs nowhere else: what asks for
# them in PREFLASH_ARCHS, and what they are then compiled for.
ONE_ARCHITECTURE = {"sm90": ("90", "90a")}
TILE_CLASSES = {"prefill": "kPrefill", "decode": "kDecode"}
LOGITS = {"plain": "kPlain", "softcap": "kSoftCap"}
MASKS = {"bounds": "kBounds", "custom": "kCustom"}


@dataclass(frozen=True)
class Build:
    """What one build compiles."""

    preset: str
    architectures: Sequence[str]
    variants: Sequence[Variant]

    @property
    def families(self) -> list[str]:
        return list(dict.fromkeys(variant.family for variant in self.variants))

    def architectures_of(self, family: str) -> list[str]:
        return architectures_of(family, self.architectures)


@dataclass(frozen=True)
class Source:
    """One generated file of kernels. `name` is relative to the output directory."""

    family: str
    name: str
    variants: Sequence[Variant]


def architectures_of(family: str, architectures: Sequence[str]) -> list[str]:
    """What a family is compiled for, of the entries of PREFLASH_ARCHS; nothing: it is left out."""
    if family == "cpu":
        return []
    if family not in ONE_ARCHITECTURE:
        return list(architectures)
    wanted, compiled = ONE_ARCHITECTURE[family]
    named = {architecture.removesuffix("+PTX").removesuffix("a") for architecture in architectures}
    return [compiled] if wanted in named else []


def sources(variants: Sequence[Variant]) -> list[Source]:
    """One file per family, dtypes and head_dim, split by tile class where it would be long."""
    groups: dict[str, list[Variant]] = {}
    for variant in variants:
        groups.setdefault(_group_name(variant), []).append(variant)

    result = []
    for name, members in groups.items():
        parts = {name: members}
        if len(members) > MAX_KERNELS_PER_FILE:
            parts = {}
            for variant in members:
                parts.setdefault(f"{name}_{variant.tile_class}", []).append(variant)
        for part, of_part in parts.items():
            family = of_part[0].family
            suffix = "cpp" if family == "cpu" else "cu"
            result.append(Source(family, f"{family}/{part}.{suffix}", of_part))
    return result


def source_text(source: Source) -> str:
    return _template("kernels.in").substitute(
        launch_header=_launch_header(source.family),
        types="\n\n".join(variant_type(variant) for variant in source.variants),
        entries="\n".join(
            f"ForwardKernel {entry(v)}() {{\n"
            f"  return {source.family}::forward_kernel_entry<variants::{v.id}>();\n}}"
            for v in source.variants
        ),
    )


def variant_type(variant: Variant) -> str:
    """The named C++ type that is a kernel's one template parameter."""
    return (
        _template("variant.in")
        .substitute(id=variant.id, variant=_initialiser(variant), **asdict(variant.tile))
        .rstrip("\n")
    )


def entry(variant: Variant) -> str:
    return f"preflash_entry_{variant.id}"


def library_text(family: str, build: Build) -> str:
    """The table that a family's library exports."""
    members = [variant for variant in build.variants if variant.family == family]
    template = "library_cpu.in" if family == "cpu" else "library_cuda.in"
    return _template(template).substitute(
        family=FAMILIES[family],
        architectures=";".join(build.architectures_of(family)),
        declarations="\n".join(f"ForwardKernel {entry(v)}();" for v in members),
        entries="\n".join(f"      {entry(v)}()," for v in members),
    )


def matrix_text(matrix: Matrix) -> str:
    """every_variant(): the whole matrix, so that a miss can say what a fuller build would serve."""
    return _template("matrix.in").substitute(
        rows="\n".join(f"    {_initialiser(variant)}," for variant in matrix.variants)
    )


def variants_json(build: Build) -> str:
    """What `python -m preflash variants` shows."""
    rows = [
        {
            "id": v.id,
            "family": v.family,
            "backend": v.backend,
            "q_dtype": v.q_dtype,
            "kv_dtype": v.kv_dtype,
            "head_dim_qk": v.head_dim_qk,
            "head_dim_vo": v.head_dim_vo,
            "tile_class": v.tile_class,
            "logits": v.logits,
            "mask": v.mask,
            "tile": asdict(v.tile),
        }
        for v in build.variants
    ]
    document = {
        "preset": build.preset,
        "architectures": list(build.architectures),
        "variants": rows,
    }
    return json.dumps(document, indent=1) + "\n"


def table(variants: Sequence[Variant]) -> str:
    """The matrix as Markdown, one row per variant."""
    lines = [
        "| id | backend | q | kv | head_dim | tile m x n | stages | warps | CTAs/SM |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| `{v.id}` | {v.backend} | {v.q_dtype} | {v.kv_dtype} | {v.head_dim} "
        f"| {v.tile.m} x {v.tile.n} | {v.tile.stages} | {v.tile.warps} | {v.tile.ctas_per_sm} |"
        for v in variants
    ]
    return "\n".join(lines) + "\n"


def outputs(build: Build, matrix: Matrix) -> dict[str, str]:
    """Every generated file: name relative to the output directory -> text."""
    files = {source.name: source_text(source) for source in sources(build.variants)}
    for family in build.families:
        files[f"{family}/library.cpp"] = library_text(family, build)
    files["matrix.cpp"] = matrix_text(matrix)
    files["variants.json"] = variants_json(build)
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
    for family in FAMILIES:
        for path in (directory / family).glob("*.c*"):
            if path.relative_to(directory).as_posix() not in files:
                path.unlink()


def _initialiser(variant: Variant) -> str:
    values = {
        "family": f"Family::{FAMILIES[variant.family]}",
        "q_dtype": f"DType::{DTYPES[variant.q_dtype]}",
        "kv_dtype": f"DType::{DTYPES[variant.kv_dtype]}",
        "head_dim_qk": variant.head_dim_qk,
        "head_dim_vo": variant.head_dim_vo,
        "tile_class": f"TileClass::{TILE_CLASSES[variant.tile_class]}",
        "logits": f"Logits::{LOGITS[variant.logits]}",
        "mask": f"Mask::{MASKS[variant.mask]}",
    }
    return "{" + ", ".join(f".{name} = {value}" for name, value in values.items()) + "}"


def _group_name(variant: Variant) -> str:
    return variant.id[: variant.id.index(f"_{variant.tile_class}_")]


def _launch_header(family: str) -> str:
    return "cpu/forward_launch.h" if family == "cpu" else f"kernels/{family}/forward_launch.cuh"


def _template(name: str) -> Template:
    return Template((TEMPLATES / name).read_text())


def _build(matrix: Matrix, arguments: argparse.Namespace) -> Build:
    families = arguments.families.split(",") if arguments.families else None
    architectures = [a for a in arguments.archs.replace(",", ";").split(";") if a]
    variants = matrix.select(arguments.preset, families)
    if architectures:
        needless = {f for f in ONE_ARCHITECTURE if not architectures_of(f, architectures)}
        variants = [variant for variant in variants if variant.family not in needless]
    return Build(arguments.preset, architectures, variants)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--list", action="store_true", help="one line per kernel source")
    action.add_argument("--write", metavar="DIR", type=Path, help="write the generated files")
    action.add_argument("--table", action="store_true", help="the matrix in Markdown")
    parser.add_argument("--preset", default="full", help="a table of presets.toml")
    parser.add_argument("--families", default="", help="comma-separated; default: all")
    parser.add_argument(
        "--archs",
        default="",
        help='as in PREFLASH_ARCHS, e.g. "80;90"; default: every family, for none',
    )
    arguments = parser.parse_args()

    try:
        matrix = load_matrix()
        build = _build(matrix, arguments)
    except SpecError as error:
        print(f"generate.py: {error}", file=sys.stderr)
        return 1
    if arguments.list:
        for source in sources(build.variants):
            architectures = ",".join(build.architectures_of(source.family))
            ids = ",".join(variant.id for variant in source.variants)
            print(source.family, architectures, source.name, ids, sep="\t")
    elif arguments.table:
        print(table(build.variants), end="")
    else:
        write(build, matrix, arguments.write)
    return 0


if __name__ == "__main__":
    sys.exit(main())
