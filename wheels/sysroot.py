"""glibc 2.28 to link against, on a build machine that has a newer one.

manylinux_2_28 (PEP 600) promises that a library asks for no symbol version behind GLIBC_2.28. The
zig compiler of PyPI writes stub libraries of any glibc; gcc compiles as ever and links with those,
with libstdc++ inside. auditwheel then looks at every symbol.
"""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

GLIBC = "2.28"
_SHIM = Path(__file__).with_name("glibc_2_28.c")
_STUBS = {"m": "libm.so.6", "pthread": "libpthread.so.0", "dl": "libdl.so.2", "rt": "librt.so.1"}

# For machines other than this one: nvcc finds its headers and libraries by this compiler's name.
_CROSS = """\
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR {machine})
set(CMAKE_CXX_COMPILER {prefix}g++)
set(CMAKE_CUDA_HOST_COMPILER {prefix}g++)
"""

_TOOLCHAIN = """\
# Written by wheels/sysroot.py.
{cross}set(flags "-L{stubs} {shim} -static-libstdc++ -Wl,--exclude-libs,ALL")
set(CMAKE_SHARED_LINKER_FLAGS_INIT "${{flags}} -Wl,-z,defs")
set(CMAKE_MODULE_LINKER_FLAGS_INIT "${{flags}}")
# The same bytes wherever the sources are.
set(map "-ffile-prefix-map=${{CMAKE_BINARY_DIR}}=build -ffile-prefix-map=${{CMAKE_SOURCE_DIR}}=.")
set(CMAKE_CXX_FLAGS_INIT "${{map}}")
string(REPLACE " " "," map "${{map}}")
set(CMAKE_CUDA_FLAGS_INIT "-Xcompiler=${{map}}")
"""


def prefix_of(machine: str) -> str:
    """Prefix of the machine's compiler names, as Debian's g++-aarch64-linux-gnu installs them."""
    return "" if machine == platform.machine() else f"{machine}-linux-gnu-"


def prepare(directory: Path, python: str, machine: str) -> Path:
    """Makes the stubs and a CMake toolchain file that links with them.

    Args:
        directory: where; what is there already is kept.
        python: an interpreter with the package `ziglang`.
        machine: what is compiled for, "x86_64" or "aarch64".

    Returns:
        The toolchain file.
    """
    directory = directory.resolve()
    toolchain = directory / "toolchain.cmake"
    if toolchain.exists():
        return toolchain
    stubs = directory / "stubs"
    stubs.mkdir(parents=True, exist_ok=True)
    prefix = prefix_of(machine)
    _write_stubs(stubs, directory / "zig", python, machine)
    shim = directory / "glibc_2_28.o"
    compiler = [f"{prefix}gcc", "-O2", "-fPIC", "-c"]
    subprocess.run([*compiler, str(_SHIM), "-o", str(shim)], check=True)
    cross = _CROSS.format(machine=machine, prefix=prefix) if prefix else ""
    toolchain.write_text(_TOOLCHAIN.format(cross=cross, stubs=stubs, shim=shim))
    return toolchain


def _write_stubs(stubs: Path, cache: Path, python: str, machine: str) -> None:
    """zig writes stubs of all of glibc into its cache when it links anything."""
    cache.mkdir(parents=True, exist_ok=True)
    source = cache / "empty.c"
    source.write_text("int preflash_empty;\n")
    command = [python, "-m", "ziglang", "cc", "-target", f"{machine}-linux-gnu.{GLIBC}", "-shared"]
    caches = {name: str(cache) for name in ("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR")}
    command += [str(source), "-o", str(cache / "empty.so")]
    subprocess.run(command, check=True, env={**os.environ, **caches})
    (found,) = cache.glob("o/*/libc.so.6")
    for name in ("libc.so.6", "libld.so.2", *_STUBS.values()):
        (stubs / name).write_bytes((found.parent / name).read_bytes())
    for name, stub in _STUBS.items():
        (stubs / f"lib{name}.so").symlink_to(stub)
    # Few functions, such as atexit(), are not in libc.so.6: every library has its own.
    ask = [f"{prefix_of(machine)}gcc", "-print-file-name=libc_nonshared.a"]
    nonshared = subprocess.run(ask, check=True, capture_output=True, text=True).stdout.strip()
    # glibc 2.28 has threads in a library of its own, which the newer one's compiler does not name.
    needed = f"AS_NEEDED({stubs / 'libld.so.2'} {stubs / 'libpthread.so.0'})"
    (stubs / "libc.so").write_text(f"INPUT({stubs / 'libc.so.6'} {nonshared} {needed})\n")
