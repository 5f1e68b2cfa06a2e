"""libpreflash.so: programs in C and Rust compute the cases of attention_cases.py and are refused
what is wrong, and its symbols are those of preflash.h."""

from __future__ import annotations

import functools
import os
import re
import shutil
import struct
import sys
from pathlib import Path

import attention_cases
import pytest
import torch
from preflash.testing import build, runner
from preflash.testing.case import Case, KvForm, MaskKind, Position
from preflash.testing.inputs import Inputs, as_nhd, pack_little, pages_of
from processes import output_of

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
EXAMPLES = ROOT / "docs" / "examples"
EXAMPLE = EXAMPLES / "c" / "prefill.c"
HEADER = ROOT / "include" / "preflash" / "preflash.h"
MAP = ROOT / "cpp" / "c" / "preflash.map"
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
SANITIZE = os.environ.get("PREFLASH_CFLAGS", "").split()  # make sanitize
POSITIONS = [Position.NONE, Position.ROPE, Position.ALIBI]

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")


@functools.cache
def config(*options: str) -> list[str]:
    """Returns the words that `python -m preflash config` prints."""
    return output_of(sys.executable, "-m", "preflash", "config", *options).split()


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    """Compiles C files: compiled(source) is the program."""
    made: dict[Path, Path] = {}
    folder = tmp_path_factory.mktemp("c")
    flags = config("--cflags", "--libs")

    def program(source: Path) -> Path:
        if source not in made:
            made[source] = folder / source.stem
            command = ["cc", "-std=c11", "-D_POSIX_C_SOURCE=200809L", "-Wall", "-Wextra", "-Werror"]
            output_of(*command, *SANITIZE, source, *flags, "-lm", "-o", made[source])
        return made[source]

    return program


# The cases.


def strided(rows: torch.Tensor, view: torch.Tensor) -> tuple[bytes, list[int]]:
    """Returns the bytes of contiguous rows, and the header of a view of them: [token, head, dim],
    or [page, token, head, dim]."""
    data = rows.view(torch.uint8).numpy().tobytes()
    if view.dim() == 3:
        view = view[None]
    return data, [len(data), *view.stride()[:3], *view.shape[:2]]


def encoded(inputs: Inputs, *, bounds: bool = False, table: bool = False) -> bytes:
    """Returns the file that run_case.c reads. bounds: lengths are upper bounds, and the device has
    the numbers of keys. table: pages are a block table."""
    case = inputs.case
    out = torch.empty(*inputs.q.shape[:2], case.dim_vo, dtype=case.dtype_o)
    q, k, v = (t.contiguous() for t in (inputs.q, inputs.k, inputs.v))
    tokens = pages_of if case.paged else lambda rows, case: as_nhd(rows, case.layout)
    tensors = [
        strided(q, q), strided(k, tokens(k, case)), strided(v, tokens(v, case)), strided(out, out)
    ]  # fmt: skip
    counts = inputs.kv_indptr.diff()
    indices, stride, last = inputs.indices, 0, inputs.last_page_len
    if table:
        stride = int(counts.max()) + 1
        rows = torch.full((case.batch_size, stride), -5, dtype=torch.int32)
        for row, begin, count in zip(rows, inputs.kv_indptr, counts, strict=False):
            row[:count] = inputs.indices[begin : begin + count]
        indices = rows.flatten()
    if bounds:
        last = torch.full_like(last, case.page_size)
    mask = b""
    if inputs.masks is not None:  # kernels read words: 8 bytes follow
        packed = torch.cat([pack_little(mask) for mask in inputs.masks])
        mask = packed.numpy().tobytes() + bytes(8 + -len(packed) % 4)
    numbers = [
        case.num_qo_heads, case.num_kv_heads, case.head_dim, case.dim_vo, DTYPES.index(case.dtype),
        DTYPES.index(case.dtype_kv), DTYPES.index(case.dtype_o), case.mask is MaskKind.CAUSAL,
        inputs.masks is not None, case.window_left, POSITIONS.index(case.position),
        case.batch_size, case.page_size, 0 if indices is None else len(indices), stride,
        inputs.sinks is not None, len(mask), bounds,
        *(number for _, header in tensors for number in header),
    ]  # fmt: skip
    reals = [case.soft_cap or 0.0, case.scale, case.rope_scale or 1.0, case.rope_theta or 1e4]
    parts = [struct.pack(f"={len(numbers)}q{len(reals)}d", *numbers, *reals)]
    arrays = [inputs.qo_indptr, inputs.kv_indptr]
    if case.paged:
        arrays += [last, indices]
    if bounds:
        arrays.append(torch.tensor(case.kv_lens, dtype=torch.int32))
    parts += [array.to(torch.int32).numpy().tobytes() for array in arrays]
    parts += [data for data, _ in tensors[:3]]
    if inputs.sinks is not None:
        parts.append(inputs.sinks.float().numpy().tobytes())
    return b"".join([*parts, mask])


def computed(program: Path, folder: Path, inputs: Inputs, **form: bool):
    """Returns out and lse of run_case.c."""
    case = inputs.case
    given, result = folder / "case", folder / "result"
    given.write_bytes(encoded(inputs, **form))
    inputs.variant = output_of(program, given, result).strip()
    data = bytearray(result.read_bytes() or bytes(4))  # frombuffer() takes no empty one
    rows = inputs.q.shape[0]
    count = rows * case.num_qo_heads * case.dim_vo
    out = torch.frombuffer(data, dtype=case.dtype_o)[:count]
    lse = torch.frombuffer(data, dtype=torch.float32)[count * case.dtype_o.itemsize // 4 :]
    lse = lse[: rows * case.num_qo_heads]
    return out.view(rows, case.num_qo_heads, case.dim_vo), lse.view(rows, case.num_qo_heads)


SEPARATE = [
    case.with_dtype((torch.float32, torch.bfloat16)[index % 2])
    for index, case in enumerate(attention_cases.core())
    if case.form is KvForm.SEPARATE and case.fixed_split_size is None and not case.head_scales
]


@pytest.mark.parametrize("case", SEPARATE, ids=lambda case: case.name)
def test_cases(compiled, tmp_path, case):
    inputs = build(case)
    out, lse = computed(compiled(HERE / "run_case.c"), tmp_path, inputs)
    rows = slice(int(inputs.qo_indptr[0]), int(inputs.qo_indptr[-1]))
    runner.compare(inputs, out[rows], lse[rows]).check()


PAGED = Case("paged", (33, 1, 0, 70), (90, 40, 7, 70), 4, 2, 64, page_size=16, mask=MaskKind.CAUSAL)


@pytest.mark.parametrize("form", [{"bounds": True}, {"table": True}], ids=str)
def test_lengths_and_pages_of_an_engine(compiled, tmp_path, form):
    inputs = build(PAGED)
    result = computed(compiled(HERE / "run_case.c"), tmp_path, inputs, **form)
    runner.compare(inputs, *result).check()


def test_refusals(compiled):
    rows = len(re.findall(r"^  X\(", (HERE / "refusals.c").read_text(), re.M))
    said = output_of(compiled(HERE / "refusals.c"))
    assert said.splitlines()[-1] == f"{rows} refusals, 0 failures"


def test_uses_that_no_case_has(compiled):
    assert output_of(compiled(HERE / "uses.c")).strip() == "0 failures"


def test_every_function_is_a_symbol_with_a_version_and_nothing_else_is():
    functions = re.findall(r"^PREFLASH_API [^;]*?(preflash_\w+)\(", HEADER.read_text(), re.M)
    (library,) = Path(config("--libdir")[0]).glob("libpreflash.so")
    listed = output_of("nm", "-D", "--defined-only", library)
    found = {line.split()[-1] for line in listed.splitlines() if " A " not in line}
    assert found == {f"{name}@@PREFLASH_1" for name in functions}
    assert sorted(re.findall(r"^    (preflash_\w+);", MAP.read_text(), re.M)) == sorted(functions)


def test_the_header_is_cpp_too(tmp_path):
    source = tmp_path / "includes.cpp"
    source.write_text(
        "#include <preflash/preflash.h>\npreflash_segment s = PREFLASH_SEGMENT_INIT;\n"
    )
    flags = ("-Wall", "-Werror", *config("--cflags"))
    output_of("c++", "-c", source, *flags, "-o", tmp_path / "includes.o")


# The examples, by the package's own files for the command line, pkg-config, CMake and rustc.


def needs(tool: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(tool) is None, reason=f"there is no {tool}")


PROJECT = f"""
cmake_minimum_required(VERSION 3.16)
project(user LANGUAGES C)
find_package(preflash 0.1 REQUIRED)
add_executable(prefill {EXAMPLE})
target_link_libraries(prefill PRIVATE preflash::preflash m)
"""


@needs("pkg-config")
def test_pkg_config_finds_the_package(tmp_path):
    (directory,) = config("--libdir")
    command = ["pkg-config", "--cflags", "--libs", "preflash >= 0.1"]
    flags = output_of(*command, PKG_CONFIG_PATH=f"{directory}/pkgconfig").split()
    program = tmp_path / "prefill"
    output_of("cc", EXAMPLE, *SANITIZE, *flags, f"-Wl,-rpath,{directory}", "-lm", "-o", program)
    assert "largest error 0.00" in output_of(program)


@needs("cmake")
def test_find_package_finds_the_package(tmp_path):
    (directory,) = config("--libdir")
    (tmp_path / "CMakeLists.txt").write_text(PROJECT)
    found = f"-Dpreflash_DIR={directory}/cmake/preflash"
    flags = f"-DCMAKE_C_FLAGS={' '.join(SANITIZE)}"
    output_of("cmake", "-S", tmp_path, "-B", tmp_path / "build", found, flags)
    output_of("cmake", "--build", tmp_path / "build")
    assert "largest error 0.00" in output_of(tmp_path / "build" / "prefill")


def test_the_example_in_c(compiled):
    assert "largest error 0.00" in output_of(compiled(EXAMPLE))


@needs("rustc")
def test_the_example_in_rust(tmp_path):
    (directory,) = config("--libdir")
    program = tmp_path / "serve"
    command = ["rustc", "--edition", "2021", "-O", "-D", "warnings", "-L", directory]
    command += ["-C", f"link-arg=-Wl,-rpath,{directory}", "-o", program]
    # rustc does not run with the sanitizers' libraries preloaded.
    output_of(*command, EXAMPLES / "rust" / "src" / "main.rs", LD_PRELOAD="")
    assert "each has the same tokens alone" in output_of(program)
