"""wheels/build.py copies every folder that CMakeLists.txt reads."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "wheels"))

import build  # noqa: E402


def test_the_copied_sources_hold_the_folders_that_cmake_names():
    cmake = re.sub("#.*", "", (ROOT / "CMakeLists.txt").read_text())
    named = {name for name in re.findall(r"(?<![\w/.}])\w+(?=/)", cmake) if (ROOT / name).is_dir()}
    assert {"cpp", "include", "python"} <= named
    assert named - {"tests"} <= set(build.SOURCES)  # wheels hold no test
