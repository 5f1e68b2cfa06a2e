"""What the build says of itself."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent


@pytest.fixture
def cmake() -> str:
    found = shutil.which("cmake", path=BIN) or shutil.which("cmake")
    if found is None or shutil.which("ninja", path=BIN) is None:
        pytest.skip("no cmake and ninja, or none beside this Python")
    return found


def test_an_install_without_gpu_kernels_says_so_at_its_end(cmake, tmp_path):
    """`pip install -v .` prints what the install step prints; nothing is compiled here."""
    options = ["-DPREFLASH_CUDA=OFF", f"-DPython_EXECUTABLE={sys.executable}"]
    options += ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={BIN / 'ninja'}"]
    configure = [cmake, "-S", str(ROOT), "-B", str(tmp_path), *options]
    subprocess.run(configure, check=True, capture_output=True)
    install = [cmake, "--install", str(tmp_path), "--component", "note"]
    done = subprocess.run(install, check=True, capture_output=True, text=True)
    assert "preflash: built the CPU backend alone, without GPU kernels: " in done.stdout
    assert "PREFLASH_CUDA is OFF" in done.stdout or "no nvcc was found" in done.stdout
