"""Fixtures find the generator under test, and the build of the installed package."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import spec


@pytest.fixture(scope="session")
def matrix() -> spec.Matrix:
    return spec.load_matrix()


@pytest.fixture
def edited(tmp_path: Path) -> Callable:
    """Returns a function that loads the data files with one edit of one of them."""

    def load(name: str, old: str, new: str):
        for path in spec.VARIANTS_DIR.glob("*.toml"):
            shutil.copy(path, tmp_path)
        text = (tmp_path / name).read_text()
        assert old in text
        (tmp_path / name).write_text(text.replace(old, new, 1))
        return (spec.load_options if name == "options.toml" else spec.load_matrix)(tmp_path)

    return load


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
