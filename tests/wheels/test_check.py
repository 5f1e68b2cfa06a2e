"""wheels/check.py refuses what must not be published; wheels/build.py copies every source."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import build
import check
import pytest
import torch
from preflash import _core
from processes import output_of

ROOT = Path(__file__).resolve().parents[2]

TAG = f"cp3{sys.version_info.minor}-cp3{sys.version_info.minor}"
VERSION = "0.1.0+cu130"


def packed(package, directory, tag="linux_x86_64", *, lacks="", version=VERSION) -> Path:
    """Packs a package as a wheel; lacks: a licence that is left out."""
    tag = tag if tag.startswith("py3") else f"{TAG}-{tag}"
    wheel = directory / f"preflash-{version}-{tag}.whl"
    about = {f"licenses/{name}": "" for name in check.LICENSES if name != lacks}
    about["METADATA"] = f"Metadata-Version: 2.1\nName: preflash\nVersion: {version}\n"
    about["METADATA"] += "Requires-Python: >=3.10\n"
    about["WHEEL"] = f"Wheel-Version: 1.0\nTag: {tag}\n"
    about["WHEEL"] += "Generator: test\nRoot-Is-Purelib: false\n"
    about["RECORD"] = ""
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in package.rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                archive.write(path, f"preflash/{path.relative_to(package)}")
        for name, text in about.items():
            archive.writestr(f"preflash-{version}.dist-info/{name}", text)
    return wheel


def test_the_copied_sources_hold_the_folders_that_cmake_names():
    cmake = re.sub("#.*", "", (ROOT / "CMakeLists.txt").read_text())
    named = {name for name in re.findall(r"(?<![\w/.}])\w+(?=/)", cmake) if (ROOT / name).is_dir()}
    assert {"cpp", "include", "python"} <= named
    assert named - {"tests"} <= set(build.SOURCES)  # wheels hold no test


def without_a_library(package):
    (package / "lib" / "libpreflash_kernels_common.so").unlink()


def without_rows(package):
    (package / "variants.json").write_text('{"variants": []}')


def with_another_dependency(package):
    module = next(package.glob("_core.*.so"))
    module.write_bytes(module.read_bytes().replace(b"libc.so.6\0", b"libcuda.1\0"))


def with_a_large_file(package):
    (package / "data").write_bytes(bytes(26_000_000))


@pytest.mark.parametrize(
    ("spoil", "how", "problems"),
    [
        (None, {}, []),
        (without_a_library, {}, ["lacks preflash/lib/libpreflash_kernels_common.so"]),
        (without_rows, {}, ["the loaded kernels are not those of variants.json"]),
        # It fails before it is imported.
        (with_another_dependency, {}, [r"_core\..*\.so needs libcuda\.1"]),
        (with_a_large_file, {}, [r"\d+ bytes, more than 25000000"]),
        (None, {"lacks": "NOTICE"}, ["lacks the licence NOTICE"]),
        (None, {"tag": "macosx_11_0_arm64"}, ["platform macosx_11_0_arm64 is not Linux"]),
        (None, {"tag": "py3-none-any"}, ["tag py3-none is not .*", "platform any is not Linux"]),
    ],
)
def test_packages(tmp_path, spoil, how, problems):
    installed = Path(_core.__file__).parent
    if not list((installed / "lib").glob("libpreflash_kernels_*.so")):
        pytest.skip("built without kernel libraries (PREFLASH_CUDA=OFF)")
    package = Path(shutil.copytree(installed, tmp_path / "package"))
    if spoil:
        spoil(package)
    found = check.problems(packed(package, tmp_path, **how))
    assert len(found) == len(problems)
    assert all(map(re.fullmatch, problems, found)), found


def test_needed_is_what_readelf_lists():
    readelf = shutil.which("readelf")
    if readelf is None:
        pytest.skip("no readelf to compare with")
    for path in (Path(_core.__file__), Path(sys.executable).resolve()):
        text = output_of(readelf, "-d", path)
        libraries, paths = check.needed(path)
        assert libraries == re.findall(r"\(NEEDED\)\s+Shared library: \[(.+)\]", text)
        assert paths == re.findall(r"\((?:RUN|R)PATH\)\s+Library r\w+: \[(.+)\]", text)


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_the_example_in_c_is_compiled_against_an_installed_wheel(tmp_path):
    """The flags are those that `python -m preflash config` prints in an environment of its own."""
    wheel = packed(Path(_core.__file__).parent, tmp_path)
    inside = tmp_path / "env" / "bin" / "python"
    output_of(sys.executable, "-m", "venv", "--without-pip", tmp_path / "env")
    pip = (sys.executable, "-m", "pip", "--python", inside, "install", "-q", "--no-deps")
    output_of(*pip, wheel)
    (packages,) = (tmp_path / "env").glob("lib/python*/site-packages")
    (packages / "torch.pth").write_text(str(Path(torch.__file__).parents[1]))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [inside, "-m", "preflash", "config", "--cflags", "--libs"]
    run = {"env": environment, "cwd": tmp_path, "capture_output": True, "text": True}
    flags = subprocess.run(command, check=True, **run).stdout.split()
    package = packages / "preflash"
    assert flags[:2] == [f"-I{package / 'include'}", f"-L{package / 'lib'}"]
    assert check.program_in_c(flags) == []
    (package / "lib" / "libpreflash.so").unlink()
    (found,) = check.program_in_c(flags)
    assert found.startswith("cc of prefill.c fails: ")
