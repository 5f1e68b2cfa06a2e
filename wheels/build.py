"""Builds the wheels of matrix.toml that this machine can build, and checks each.

    python wheels/build.py [--python 3.11 ...] [--kernels DIR] [--preset ci] [--archs "90"]

Needs the toolkit (nvcc) of the row's CUDA version, or --kernels with libraries that `make kernels`
wrote, and an interpreter `python3.x` with pip for each Python. Kernels are compiled once. They need
the build machine's glibc or a newer one: build in the image that matrix.toml's platform names.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import check

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Row:
    """One CUDA version of matrix.toml."""

    version: str
    local: str
    archs: str
    preset: str


def nvcc_version() -> str:
    """Major and minor, as in "13.0"; empty without nvcc."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return ""
    text = subprocess.run([nvcc, "--version"], check=True, capture_output=True, text=True).stdout
    found = re.search(r"release (\d+\.\d+)", text)
    return found[1] if found else ""


def build_kernels(row: Row, directory: Path) -> Path:
    """Compiles the kernel libraries; the directory that PREFLASH_KERNELS takes."""
    options = [
        "-DPREFLASH_BINDINGS=OFF",
        f"-DPREFLASH_PRESET={row.preset}",
        f"-DPREFLASH_ARCHS={row.archs}",
        f"-DPython_EXECUTABLE={sys.executable}",
    ]
    command = ["cmake", "-G", "Ninja", "-S", str(ROOT), "-B", str(directory), *options]
    subprocess.run(command, check=True)
    subprocess.run(["cmake", "--build", str(directory)], check=True)
    return directory / "lib"


def build_wheel(python: str, kernels: Path, source: Path, out: Path) -> Path:
    """One wheel for one interpreter, with prebuilt kernel libraries inside."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [
            *(python, "-m", "pip", "wheel", "-q", "--no-deps", str(source), "-w", scratch),
            f"--config-settings=cmake.define.PREFLASH_KERNELS={kernels.resolve()}",
        ]
        subprocess.run(command, check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        out.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy(wheel, out / wheel.name))


def source_with_version(row: Row, directory: Path) -> Path:
    """A copy of the sources whose version names the CUDA version, if the row asks for that."""
    ignore = shutil.ignore_patterns(".git", ".venv", "build", "dist", "__pycache__")
    shutil.copytree(ROOT, directory, ignore=ignore)
    if row.local:
        path = directory / "pyproject.toml"
        text = re.sub(
            r'^version = "([^"+]+)"', rf'version = "\1+{row.local}"', path.read_text(), flags=re.M
        )
        path.write_text(text)
    return directory


def retag(wheel: Path, platform: str) -> Path:
    """Renames linux_x86_64 to the manylinux tag, which the image of the build must justify."""
    command = [sys.executable, "-m", "wheel", "tags", "--remove", "--platform-tag", platform]
    name = subprocess.run(
        [*command, str(wheel)], check=True, capture_output=True, text=True
    ).stdout.strip()
    return wheel.parent / name.splitlines()[-1]


def interpreter(version: str) -> str | None:
    """A working interpreter of that version, or None: a launcher on PATH may lead nowhere."""
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    for python in (sys.executable, f"python{version}"):
        if shutil.which(python) is None:
            continue
        answer = subprocess.run([python, "-c", code], capture_output=True, text=True)
        if answer.stdout.strip() == version:
            return python
    return None


def main() -> int:
    matrix = tomllib.loads((ROOT / "wheels" / "matrix.toml").read_text())
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", action="append", choices=matrix["python"])
    parser.add_argument("--cuda", default=nvcc_version(), help="a version of matrix.toml")
    parser.add_argument("--kernels", type=Path, help="prebuilt kernel libraries")
    parser.add_argument("--preset", help="instead of the row's")
    parser.add_argument("--archs", help="instead of the row's")
    parser.add_argument("--manylinux", action="store_true", help="tag wheels with the platform")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    arguments = parser.parse_args()

    rows = {row["version"]: Row(**row) for row in matrix["cuda"]}
    if arguments.cuda not in rows:
        known = ", ".join(rows)
        parser.error(f"CUDA {arguments.cuda or '(no nvcc)'} is no row of matrix.toml: {known}")
    row = rows[arguments.cuda]
    row = Row(row.version, row.local, arguments.archs or row.archs, arguments.preset or row.preset)

    kernels = arguments.kernels or build_kernels(row, ROOT / "build" / f"wheel-cuda{row.version}")
    failures = 0
    with tempfile.TemporaryDirectory() as scratch:
        source = source_with_version(row, Path(scratch) / "preflash")
        for version in arguments.python or matrix["python"]:
            python = interpreter(version)
            if python is None:
                print(f"python{version}: not on this machine, skipped")
                continue
            wheel = build_wheel(python, kernels, source, arguments.out)
            if arguments.manylinux:
                wheel = retag(wheel, matrix["platform"])
            failures += check.report(wheel, python)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
