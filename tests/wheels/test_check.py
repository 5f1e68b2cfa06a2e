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
    about = {f"licenses/{name}": "" for name in check.LICENSES}
    about |= {"METADATA": METADATA, "RECORD": "", "WHEEL": f"Wheel-Version: 1.0\nTag: {tag}\n"}
    about["WHEEL"] += "Generator: test\nRoot-Is-Purelib: false\n"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in package.rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                archive.write(path, f"preflash/{path.relative_to(package)}")
        for name, text in about.items():
            archive.writestr(f"preflash-0.1.0+cu130.dist-info/{name}", text)
    return wheel


@pytest.fixture
def package(tmp_path) -> Path:
    installed = Path(_core.__file__).parent
    if not list((installed / "lib").glob("libpreflash_kernels_*.so")):
        pytest.skip("built without kernel libraries (PREFLASH_CUDA=OFF)")
    return Path(shutil.copytree(installed, tmp_path / "package"))


def without_a_library(package):
    (package / "lib" / "libpreflash_kernels_common.so").unlink()


def without_rows(package):
    (package / "variants.json").write_text('{"variants": []}')


def with_another_dependency(package):
    module = next(package.glob("_core.*.so"))
    module.write_bytes(module.read_bytes().replace(b"libc.so.6\0", b"libcuda.1\0"))


@pytest.mark.parametrize(
    ("spoil", "problems"),
    [
        (lambda package: None, []),
        (without_a_library, ["lacks preflash/lib/libpreflash_kernels_common.so"]),
        (without_rows, ["the loaded kernels are not those of variants.json"]),
        # It fails before it is imported.
        (with_another_dependency, [r"_core\..*\.so needs libcuda\.1"]),
    ],
)
def test_packages(package, tmp_path, spoil, problems):
    spoil(package)
    found = check.problems(packed(tmp_path, package))
    assert len(found) == len(problems)
    assert all(map(re.fullmatch, problems, found)), found


def test_wrong_tags_a_missing_licence_and_the_size_are_named(package, tmp_path, monkeypatch):
    for tag in ("py3-none-any", f"{TAG}-macosx_11_0_arm64"):
        assert check.problems(packed(tmp_path, package, tag))
    wheel = packed(tmp_path, package)
    monkeypatch.setattr(check, "LICENSES", (*check.LICENSES, "LICENSE.other"))
    assert check.problems(wheel) == ["lacks the licence LICENSE.other"]
    monkeypatch.setattr(check, "MAX_BYTES", 1000)
    assert any("more than 1000" in problem for problem in check.problems(wheel))


def test_needed_is_what_readelf_lists():
    readelf = shutil.which("readelf")
    if readelf is None:
        pytest.skip("no readelf to compare with")
    for path in (Path(_core.__file__), Path(sys.executable).resolve()):
        text = subprocess.run([readelf, "-d", path], capture_output=True, text=True).stdout
        libraries, paths = check.needed(path)
        assert libraries == re.findall(r"\(NEEDED\)\s+Shared library: \[(.+)\]", text)
        assert paths == re.findall(r"\((?:RUN|R)PATH\)\s+Library r\w+: \[(.+)\]", text)


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
