"""The CMake build says what it leaves out, and compiles as many sources as the machine holds."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
from processes import finished, output_of

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
    options = ["-DPREFLASH_CUDA=OFF", f"-DPython_EXECUTABLE={sys.executable}", "-G", "Ninja"]
    options.append(f"-DCMAKE_MAKE_PROGRAM={BIN / 'ninja'}")
    output_of(cmake, "-S", ROOT, "-B", tmp_path, *options)
    printed = output_of(cmake, "--install", tmp_path, "--component", "note")
    assert "preflash: built the CPU backend alone, without GPU kernels: " in printed
    assert "PREFLASH_CUDA is OFF" in printed or "no nvcc was found" in printed


CUDA_JOBS = ROOT / "cmake" / "CudaJobs.cmake"


def cmake_value(cmake: str, tmp_path: Path, call: str, *prefix: str, **environment: str) -> int:
    """Returns what a function of CudaJobs.cmake sets; `call` names the variable `value`."""
    script = tmp_path / "script.cmake"
    script.write_text(f'include("{CUDA_JOBS}")\n{call}\nmessage(NOTICE "value=${{value}}")\n')
    done = finished(*prefix, cmake, "-P", script, **environment)
    return int(done.stderr.strip().removeprefix("value="))


def test_cuda_jobs_are_one_per_core_and_per_8_gib(cmake, tmp_path):
    for cores, gib, jobs in ((64, 64, 8), (4, 64, 4), (64, 4, 1), (1, 64, 1), (2, 23, 2)):
        call = f"preflash_cuda_jobs(value {cores} {gib * 1024})"
        assert cmake_value(cmake, tmp_path, call) == jobs


@pytest.mark.parametrize(("text", "mib"), [("67108864\n", 64), ("max\n", None), (None, None)])
def test_a_memory_limit_of_the_container_counts(cmake, tmp_path, text, mib):
    """9223372036854771712 bytes is the cgroup v1 spelling of no limit."""
    limits = [tmp_path / "memory.max", tmp_path / "memory.limit_in_bytes"]
    for limit, words in zip(limits, (text, "9223372036854771712\n"), strict=True):
        if words is not None:
            limit.write_text(words)
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20
    files = ";".join(map(str, limits))
    found = cmake_value(cmake, tmp_path, f'preflash_memory_mib(value "{files}")')
    assert found == pytest.approx(mib or machine, abs=1)


def test_cuda_jobs_follow_the_cpu_affinity_and_not_openmp(cmake, tmp_path):
    (core, *_) = os.sched_getaffinity(0)
    on_one_core = ("taskset", "--cpu-list", core)
    call = "preflash_cores(value)"
    assert cmake_value(cmake, tmp_path, call, *on_one_core, OMP_NUM_THREADS="7") == 1


def test_an_explicit_number_of_cuda_jobs_is_kept(cmake):
    printed = output_of(cmake, "-DPREFLASH_CUDA_JOBS=97", "-P", CUDA_JOBS)
    assert "preflash: 97 CUDA sources are compiled at once" in printed


@pytest.mark.parametrize(
    ("given", "passed"), [([], "-DPREFLASH_CUDA_JOBS= "), (["CUDA_JOBS=3"], "=3 ")]
)
def test_make_leaves_the_number_of_cuda_jobs_to_cmake(given, passed):
    if shutil.which("make") is None:
        pytest.skip("no make")
    assert passed in output_of("make", "-n", "stage", "SIDE=cuda", *given, cwd=ROOT)
