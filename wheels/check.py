"""Checks wheels: size, tags, contents, needed libraries, and the package on a bare machine.

    python wheels/check.py [--python INTERPRETER] [--torch torch==2.13.0] dist/preflash-*.whl
    python wheels/check.py --python "qemu-aarch64 -L ROOT ROOT/usr/bin/python3.13" dist/*aarch64.whl

On a bare machine means: in an empty virtual environment, with no compiler on PATH and no GPU. With
--torch the commands of the package run there, too, and its import is timed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from elftools.elf.elffile import ELFFile

MAX_BYTES = 25_000_000
MAX_IMPORT_SECONDS = 0.15  # beside torch's
FORBIDDEN = ("libcuda.", "libcudart.", "libtorch", "libc10", "libpython")
LICENSES = ("LICENSE", "NOTICE", "LICENSE.cutlass")
EXAMPLE_IN_C = Path(__file__).parents[1] / "docs" / "examples" / "c" / "prefill.c"

# Loads the binding without preflash/__init__.py, which wants torch; prints what it lists.
BINDING = """
import importlib.util, json, pathlib, sys, sysconfig, types
(found,) = importlib.util.find_spec("preflash").submodule_search_locations
package = types.ModuleType("preflash")
package.__path__ = [found]
sys.modules["preflash"] = package
from preflash import _core
_core.set_library_dir(str(pathlib.Path(found) / "lib"))
assert _core.cuda_device_count() == 0
if sysconfig.get_config_var("Py_GIL_DISABLED"):
    assert not sys._is_gil_enabled(), "the module takes the interpreter's lock"
print(json.dumps(sorted(kernel["id"] for kernel in _core.kernels())))
"""

# Seconds that the package takes behind torch's own, of a processor: other work on this machine
# changes those least.
IMPORT = """
import time, torch
start = time.process_time()
import preflash
print(time.process_time() - start)
"""

# A head_dim that no kernel serves: an error that says so, not a compiler that starts.
MISS = """
import preflash, torch
q = torch.zeros(1, 1, 1024)
try:
    preflash.single_prefill_with_kv_cache(q, q, q)
except (NotImplementedError, ValueError) as error:
    print(error)
"""


def problems(
    wheel: Path, python: str | None = sys.executable, torch: str | None = None
) -> list[str]:
    """Returns what is wrong with the wheel, one sentence each; empty if it may be published.

    Args:
        wheel: the file; its name tells the tags.
        python: an interpreter that the wheel's tag fits, or, of a wheel for other machines, the
            command that starts one here. None: nothing is imported.
        torch: a requirement to install beside it, as "torch==2.13.0"; None: without torch. Not for
            other machines.
    """
    found = _size_and_tags(wheel)
    with tempfile.TemporaryDirectory() as scratch, zipfile.ZipFile(wheel) as archive:
        archive.extractall(scratch)
        package = Path(scratch) / "preflash"
        found += _contents(package)
        found += _libraries(package)
    if found or python is None:
        return found
    if wheel.stem.endswith(platform.machine()):
        return _on_a_bare_machine(wheel, python, torch)
    return _emulated(wheel, shlex.split(python))


def _size_and_tags(wheel: Path) -> list[str]:
    found = []
    if wheel.stat().st_size > MAX_BYTES:
        found.append(f"{wheel.stat().st_size} bytes, more than {MAX_BYTES}")
    python, abi, tag = wheel.stem.split("-")[-3:]
    if not (python.startswith("cp3") and abi.startswith(python)):
        found.append(f"tag {python}-{abi} is not that of one CPython")
    if "linux" not in tag:
        found.append(f"platform {tag} is not Linux")
    return found


def _contents(package: Path) -> list[str]:
    expected = ["__init__.py", "py.typed", "prefill.pyi", "variants.json"]
    expected += ["lib/libpreflash_kernels_common.so", "lib/libpreflash.so"]
    expected += ["include/preflash/preflash.h", "lib/pkgconfig/preflash.pc"]
    expected += [f"lib/cmake/preflash/preflash-config{part}.cmake" for part in ("", "-version")]
    found = [f"lacks preflash/{name}" for name in expected if not (package / name).is_file()]
    if len(list(package.glob("_core.*.so"))) != 1:
        found.append("does not hold exactly one preflash/_core")
    interface = package / "include"
    if list(package.rglob("*.cu*")) or any(
        interface not in header.parents for header in package.rglob("*.h")
    ):
        found.append("carries sources")
    licensed = {path.name for path in package.parent.glob("preflash-*.dist-info/**/*")}
    found += [f"lacks the licence {name}" for name in LICENSES if licensed and name not in licensed]
    return found


def needed(path: Path) -> tuple[list[str], list[str]]:
    """The libraries that `path` NEEDs and the folders that it names to look for them in."""
    with path.open("rb") as file:
        dynamic = ELFFile(file).get_section_by_name(".dynamic")
        tags = list(dynamic.iter_tags())
    paths = [tag.runpath for tag in tags if tag.entry.d_tag == "DT_RUNPATH"]
    paths += [tag.rpath for tag in tags if tag.entry.d_tag == "DT_RPATH"]
    return [tag.needed for tag in tags if tag.entry.d_tag == "DT_NEEDED"], paths


def _libraries(package: Path) -> list[str]:
    found = []
    for path in sorted(package.rglob("*.so")):
        libraries, paths = needed(path)
        found += [f"{path.name} needs {name}" for name in libraries if name.startswith(FORBIDDEN)]
        found += [f"{path.name} looks for libraries in {folder}" for folder in paths]
    return found


def _on_a_bare_machine(wheel: Path, python: str, torch: str | None) -> list[str]:
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) / "env"
        subprocess.run([python, "-m", "venv", "--without-pip", directory], check=True)
        inside = directory / "bin" / "python"
        pip = [sys.executable, "-m", "pip", "--python", str(inside), "install", "-q"]
        pip.append("--disable-pip-version-check")
        if torch is not None:
            subprocess.run([*pip, torch], check=True)
        installed = subprocess.run([*pip, "--no-deps", str(wheel)], capture_output=True, text=True)
        if installed.returncode != 0:
            return [f"pip refuses it: {_last_line(installed.stderr)}"]
        (package,) = directory.glob("lib/python*/site-packages/preflash")
        library = package / "lib"
        flags = [f"-I{package / 'include'}", f"-L{library}", "-lpreflash", f"-Wl,-rpath,{library}"]
        in_c = [] if shutil.which("cc") is None else program_in_c(flags)
        bare = {"PATH": str(directory / "bin"), "CUDA_VISIBLE_DEVICES": "", "HOME": scratch}
        bare |= {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}

        def told(*command: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                [str(inside), *command], env=bare, cwd=scratch, capture_output=True, text=True
            )

        return in_c + _binding(told, wheel) + ([] if torch is None else _commands(told))


def program_in_c(flags: list[str]) -> list[str]:
    """Compiles the example in C with flags as `python -m preflash config` prints them, and runs it.

    Returns:
        One sentence if the compiler or the program fails, else an empty list.
    """
    with tempfile.TemporaryDirectory() as scratch:
        program = str(Path(scratch) / "prefill")
        for command in (["cc", str(EXAMPLE_IN_C), *flags, "-lm", "-o", program], [program]):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode != 0:
                said = _last_line(done.stderr or done.stdout)
                return [f"{Path(command[0]).name} of {EXAMPLE_IN_C.name} fails: {said}"]
    return []


def _emulated(wheel: Path, python: list[str]) -> list[str]:
    with tempfile.TemporaryDirectory() as scratch:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(scratch)
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": scratch}

        def told(*command: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                [*python, *command], env=environment, cwd=scratch, capture_output=True, text=True
            )

        return _binding(told, wheel)


def _binding(told, wheel: Path) -> list[str]:
    loaded = told("-c", BINDING)
    if loaded.returncode != 0:
        return [f"import fails: {_last_line(loaded.stderr)}"]
    with zipfile.ZipFile(wheel) as archive:
        rows = json.loads(archive.read("preflash/variants.json"))["variants"]
    if json.loads(loaded.stdout) != sorted(row["id"] for row in rows):
        return ["the loaded kernels are not those of variants.json"]
    return []


def _commands(told) -> list[str]:
    found = []
    seconds = []
    for _ in range(5):
        imported = told("-c", IMPORT)
        if imported.returncode != 0:
            return [f"import fails: {_last_line(imported.stderr)}"]
        seconds.append(float(imported.stdout))
    if min(seconds) > MAX_IMPORT_SECONDS:
        found.append(f"import takes {min(seconds):.2f} s behind torch's")
    missed = told("-c", MISS)
    if not re.search(r"head_dim", missed.stdout):
        found.append(f"a plan that no kernel serves says: {_last_line(missed.stderr)}")
    for command in (["info"], ["check"], ["config"]):
        done = told("-m", "preflash", *command)
        if done.returncode != 0:
            found.append(f"python -m preflash {command[0]}: {_last_line(done.stderr)}")
    return found


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["nothing"])[-1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--python", default=sys.executable, help="that the wheels' tags fit, or its command"
    )
    parser.add_argument("--torch", help='to install beside it, as "torch==2.13.0"')
    parser.add_argument("wheels", type=Path, nargs="+")
    arguments = parser.parse_args()
    failed = 0
    for wheel in arguments.wheels:
        found = problems(wheel, arguments.python, arguments.torch)
        failed += bool(found)
        size = f"{wheel.stat().st_size / 1e6:.1f} MB"
        print(f"{wheel.name}: {size}: {'; '.join(found) or 'ok'}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
