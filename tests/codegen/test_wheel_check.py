"""wheels/check.py refuses what must not be published."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from preflash import _core

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "wheels"))

import check  # noqa: E402
import elf  # noqa: E402

TAG = f"cp3{sys.version_info.minor}-cp3{sys.version_info.minor}"


def packed(directory: Path, package: Path, tag: str = f"{TAG}-linux_x86_64") -> Path:
    wheel = directory / f"preflash-0.1.0-{tag}.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in package.rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                archive.write(path, f"preflash/{path.relative_to(package)}")
    return wheel


@pytest.fixture
def package(package_dir, kernel_libraries, tmp_path) -> Path:
    copy = tmp_path / "package"
    shutil.copytree(package_dir, copy)
    return copy


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


def test_size_is_limited(package, tmp_path, monkeypatch):
    monkeypatch.setattr(check, "MAX_BYTES", 1000)
    (found,) = check.problems(packed(tmp_path, package))
    assert "more than PyPI's 1000" in found


def test_needed_is_what_readelf_lists():
    readelf = shutil.which("readelf")
    if readelf is None:
        pytest.skip("no readelf to compare with")
    for path in (Path(_core.__file__), Path(sys.executable).resolve()):
        text = subprocess.run([readelf, "-d", path], capture_output=True, text=True).stdout
        assert elf.needed(path) == re.findall(r"\(NEEDED\)\s+Shared library: \[(.+)\]", text)


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "libx.so"
    path.write_bytes(b"\x7fELF\x01\x01" + bytes(100))
    with pytest.raises(ValueError, match="64-bit"):
        elf.needed(path)
