"""Checks a wheel: size, tags, contents, NEEDED libraries, and import on a machine without a GPU.

python wheels/check.py dist/preflash-*.whl
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import elf

MAX_BYTES = 100_000_000
FORBIDDEN = ("libcuda.", "libcudart.", "libtorch", "libc10", "libpython")

# Runs against the unpacked wheel with every GPU hidden; prints what variants.json should list.
IMPORT = """
import json
from preflash import _core
print(json.dumps(sorted(kernel["id"] for kernel in _core.kernels())))
assert _core.cuda_device_count() == 0
"""


def problems(wheel: Path, python: str = sys.executable) -> list[str]:
    """What is wrong with the wheel, one sentence each; empty when it may be published.

    Args:
        wheel: the file; its name tells the tags.
        python: an interpreter that the wheel's tag fits.
    """
    found = _size_and_tags(wheel)
    with tempfile.TemporaryDirectory() as scratch, zipfile.ZipFile(wheel) as archive:
        archive.extractall(scratch)
        package = Path(scratch) / "preflash"
        found += _contents(package)
        found += _needed(package)
        if not found:
            found += _import(package, python)
    return found


def report(wheel: Path, python: str = sys.executable) -> int:
    """Prints the verdict; the number of problems."""
    found = problems(wheel, python)
    verdict = "ok" if not found else "; ".join(found)
    print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB: {verdict}")
    return len(found)


def _size_and_tags(wheel: Path) -> list[str]:
    found = []
    if wheel.stat().st_size > MAX_BYTES:
        found.append(f"{wheel.stat().st_size} bytes, more than PyPI's {MAX_BYTES}")
    python, abi, platform = wheel.stem.split("-")[-3:]
    if not (python.startswith("cp3") and abi.startswith(python)):
        found.append(f"tag {python}-{abi} is not that of one CPython")
    if "linux" not in platform:
        found.append(f"platform {platform} is not Linux")
    return found


def _contents(package: Path) -> list[str]:
    expected = ["__init__.py", "py.typed", "variants.json", "lib/libpreflash_kernels_common.so"]
    found = [f"lacks preflash/{name}" for name in expected if not (package / name).is_file()]
    if len(list(package.glob("_core.*.so"))) != 1:
        found.append("does not hold exactly one preflash/_core")
    if list(package.rglob("*.cu*")) or list(package.rglob("*.h")):
        found.append("carries sources")
    return found


def _needed(package: Path) -> list[str]:
    return [
        f"{path.name} needs {library}"
        for path in sorted(package.rglob("*.so"))
        for library in elf.needed(path)
        if library.startswith(FORBIDDEN)
    ]


def _import(package: Path, python: str) -> list[str]:
    environment = {**os.environ, "PYTHONPATH": str(package.parent), "CUDA_VISIBLE_DEVICES": ""}
    # Not through preflash/__init__.py, which wants torch: the interpreter may have none.
    stub = "import sys, types; p = types.ModuleType('preflash'); p.__path__ = [sys.argv[1]]\n"
    stub += "sys.modules['preflash'] = p\n"
    command = [python, "-c", stub + IMPORT, str(package)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    if run.returncode != 0:
        return [f"import fails: {run.stderr.strip().splitlines()[-1]}"]
    rows = json.loads((package / "variants.json").read_text())["variants"]
    if json.loads(run.stdout) != sorted(row["id"] for row in rows):
        return ["the loaded kernels are not those of variants.json"]
    return []


if __name__ == "__main__":
    sys.exit(1 if sum(report(Path(name)) for name in sys.argv[1:]) else 0)
