"""Fixtures find the generator under test, and the build of the installed package."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("cmake/codegen", "tools", "wheels")]

import spec  # noqa: E402


@pytest.fixture(scope="session")
def matrix() -> spec.Matrix:
    return spec.load_matrix()


@pytest.fixture(scope="session")
def package_dir() -> Path:
    """Returns the directory that holds _core, lib/ and variants.json."""
    from preflash import _core

    return Path(_core.__file__).parent


@pytest.fixture(scope="session")
def kernel_libraries(package_dir: Path) -> list[Path]:
    libraries = sorted((package_dir / "lib").glob("libpreflash_kernels_*.so"))
    if not libraries:
        pytest.skip("built without kernel libraries (PREFLASH_CUDA=OFF)")
    return libraries


@pytest.fixture(scope="session")
def build_dir(package_dir: Path) -> Path:
    """Returns the CMake build tree: `make build` installs into its directory `stage`."""
    directory = package_dir.parents[1]
    if not (directory / "CMakeCache.txt").is_file():
        pytest.skip(f"{package_dir} is not inside a build tree, so its reports are not here")
    return directory


@pytest.fixture(scope="session")
def cmake_options(build_dir: Path) -> dict[str, str]:
    """Returns the PREFLASH_* entries of the build's cache."""
    text = (build_dir / "CMakeCache.txt").read_text()
    return dict(re.findall(r"^(PREFLASH_\w+):\w+=(.*)$", text, flags=re.MULTILINE))
