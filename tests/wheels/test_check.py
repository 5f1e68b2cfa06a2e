"""wheels/check.py refuses what must not be published."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from preflash import _core

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "wheels"))

import check  # noqa: E402

TAG = f"cp3{sys.version_info.minor}-cp3{sys.version_info.minor}"
METADATA = "Metadata-Version: 2.1\nName: preflash\nVersion: 0.1.0+cu130\nRequires-Python: >=3.10\n"


def packed(directory: Path, package: Path, tag: str = f"{TAG}-linux_x86_64") -> Path:
    wheel = directory / f"preflash-0.1.0+cu130-{tag}.whl"
    info = "preflash-0.1.0+cu130.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in package.rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                archive.write(path, f"preflash/{path.relative_to(package)}")
        for name in check.LICENSES:
            archive.writestr(f"{info}/licenses/{name}", "")
        archive.writestr(f"{info}/METADATA", METADATA)
        archive.writestr(
            f"{info}/WHEEL",
            f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: false\nTag: {tag}\n",
        )
        archive.writestr(f"{info}/RECORD", "")
    return wheel


@pytest.fixture
def package(tmp_path) -> Path:
    installed = Path(_core.__file__).parent
    if not list((installed / "lib").glob("libpreflash_kernels_*.so")):
        pytest.skip("built without kernel libraries (PREFLASH_CUDA=OFF)")
    return Path(shutil.copytree(installed, tmp_path / "package"))


def test_the_installed_package_would_pass(package, tmp_path):
    assert check.problems(packed(tmp_path, package)) == []


def test_a_missing_library_is_named(package, tmp_path):
    (package / "lib" / "libpreflash_kernels_common.so").unlink()
    found = check.problems(packed(tmp_path, package))
    assert found == ["lacks preflash/lib/libpreflash_kernels_common.so"]


def test_kernels_that_variants_json_does_not_list_are_noticed(package, tmp_path):
    (package / "variants.json").write_text('{"variants": []}')
    found = check.problems(packed(tmp_path, package))
    assert found == ["the loaded kernels are not those of variants.json"]


def test_a_broken_library_fails_before_it_is_imported(package, tmp_path):
    module = next(package.glob("_core.*.so"))
    data = module.read_bytes()
    module.write_bytes(data.replace(b"libc.so.6\0", b"libcuda.1\0"))
    assert check.problems(packed(tmp_path, package)) == [f"{module.name} needs libcuda.1"]


@pytest.mark.parametrize("tag", ["py3-none-any", f"{TAG}-macosx_11_0_arm64"])
def test_wrong_tags_are_named(package, tmp_path, tag):
    assert check.problems(packed(tmp_path, package, tag))


def test_needed_is_what_readelf_lists():
    readelf = shutil.which("readelf")
    if readelf is None:
        pytest.skip("no readelf to compare with")
    for path in (Path(_core.__file__), Path(sys.executable).resolve()):
        text = subprocess.run([readelf, "-d", path], capture_output=True, text=True).stdout
        libraries, paths = check.needed(path)
        assert libraries == re.findall(r"\(NEEDED\)\s+Shared library: \[(.+)\]", text)
        assert paths == re.findall(r"\((?:RUN|R)PATH\)\s+Library r\w+: \[(.+)\]", text)


def test_a_missing_licence_is_named(package, tmp_path, monkeypatch):
    wheel = packed(tmp_path, package)
    monkeypatch.setattr(check, "LICENSES", (*check.LICENSES, "LICENSE.other"))
    assert check.problems(wheel) == ["lacks the licence LICENSE.other"]


def test_size_is_limited(package, tmp_path, monkeypatch):
    monkeypatch.setattr(check, "MAX_BYTES", 1000)
    (found,) = check.problems(packed(tmp_path, package))
    assert "more than 1000" in found


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_the_example_in_c_is_compiled_against_an_installed_wheel(tmp_path):
    """The flags are those that `python -m preflash config` prints in an environment of its own."""
    wheel = packed(tmp_path, Path(_core.__file__).parent)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    inside = str(tmp_path / "env" / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "--python", inside, "install", "-q", "--no-deps"]
    subprocess.run([*pip, str(wheel)], check=True)
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
