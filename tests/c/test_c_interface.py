"""libpreflash.so computes the cases of attention_cases.py, its symbols are those of preflash.h, and
the examples in C and Rust build and run."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import os
import re
import shutil
import sys
from pathlib import Path

import attention_cases
import pytest
import torch
from interface import (
    ALIBI,
    E4M3,
    F16,
    INVALID_ARGUMENT,
    LIBRARY,
    Call,
    Plan,
    RefusedError,
    address,
    call,
    changed,
    compute,
    find_variant,
    pair,
    segment_of,
    tensors_of,
)
from preflash.testing import Case, MaskKind, build, poison, runner
from processes import output_of

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples"
EXAMPLE = EXAMPLES / "c" / "prefill.c"
HEADER = ROOT / "include" / "preflash" / "preflash.h"
MAP = ROOT / "cpp" / "c" / "preflash.map"
SANITIZE = os.environ.get("PREFLASH_CFLAGS", "").split()  # make sanitize


def needs(tool: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(tool) is None, reason=f"there is no {tool}")


@functools.cache
def config(*options: str) -> list[str]:
    return output_of(sys.executable, "-m", "preflash", "config", *options).split()


CASES = [
    case.with_dtype((torch.float32, torch.bfloat16)[index % 2])
    for index, case in enumerate(attention_cases.core())
    if case.fixed_split_size is None
]
PAGED = Case("paged", (33, 1, 0, 70), (90, 40, 7, 70), 4, 2, 64, page_size=16, mask=MaskKind.CAUSAL)
FORMS = [*((case, {}) for case in CASES), (PAGED, {"bounds": True}), (PAGED, {"table": True})]


def prepared(case: Case, **form):
    """Returns a segment, tensors, and the output and LSE that they write."""
    inputs = build(case)
    out = poison((*inputs.q.shape[:2], case.dim_vo), case.dtype_o)
    lse = poison(inputs.q.shape[:2], torch.float32)
    return segment_of(inputs, **form), tensors_of(inputs, out, lse), out, lse


@pytest.mark.parametrize(
    ("case", "form"), FORMS, ids=[f"{case.name} {','.join(form)}" for case, form in FORMS]
)
def test_cases(case, form):
    """A plan has copies of the lengths. Engines pass bounds of them, and block tables."""
    segment, tensors, out, lse = prepared(case, **form)
    made = Call(segment, tensors)
    made.allocate()
    made.make_plan()
    for array in segment.on_host[: 3 if case.paged else 2]:
        array.fill_(-1)
    made.run()
    inputs = tensors.memory[0]
    inputs.variant = made.planned_variant()
    runner.compare(inputs, out, lse).check()


ROWS, KEYS, HEADS, DIM = 9, 40, 2, 8
PREFILL = Case("prefill", (ROWS,), (KEYS,), HEADS, HEADS, DIM, dtype=torch.float32,
               mask=MaskKind.CAUSAL, sm_scale=0.5)  # fmt: skip
DECODE = dataclasses.replace(PREFILL, name="decode", qo_lens=(1, 1), kv_lens=(30, 10))
LONG = dataclasses.replace(DECODE, name="split keys", qo_lens=(1,), kv_lens=(4000,))


def refused(says: str, function, *arguments) -> None:
    with pytest.raises(RefusedError, match=says) as caught:
        function(*arguments)
    assert caught.value.status == INVALID_ARGUMENT


@pytest.mark.parametrize("case", [PREFILL, DECODE, LONG], ids=lambda case: case.name)
def test_the_options_name_the_planned_kernel(case):
    segment, tensors, *_ = prepared(case)
    assert compute(segment, tensors).planned_variant() == find_variant(segment)


def test_two_segments():
    """One launch has the bits of two, also where each segment has its own kernel and its own
    numbers of keys."""
    (prefill, p, *_), (decode, d, *_) = sides = [prepared(PREFILL), prepared(DECODE)]
    for kv_lens in (None, torch.tensor([KEYS - 11, 20, 5], dtype=torch.int32)):
        if kv_lens is not None:
            decode.position = ALIBI
            prefill.kv_lens, decode.kv_lens = address(kv_lens), address(kv_lens[1:])
        compute(pair(prefill, decode), pair(p, d), 2)
        together = [out.clone() for *_, out, _ in sides]
        for (segment, tensors, out, _), expected in zip(sides, together, strict=True):
            compute(segment, tensors)
            assert torch.equal(out, expected)
    half, *_ = prepared(dataclasses.replace(PREFILL, dtype=torch.float16))
    name = find_variant(pair(prefill, half), 2)
    assert "f32_" in name
    assert "f16_" in name


@pytest.mark.parametrize("shared", ["lse", "out"])
def test_outputs_on_memory_of_the_other_segment(shared):
    (prefill, p, *_), (decode, d, *_) = prepared(PREFILL), prepared(DECODE)
    if shared == "lse":
        d.lse = p.lse
    else:
        p.out.data = d.q.data
    refused("shares memory", compute, pair(prefill, decode), pair(p, d), 2)


def test_plans_that_share_memory():
    """The last plan runs, one that it has overwritten does not."""
    segment, tensors, *_ = prepared(PREFILL)
    first = Call(segment, tensors)
    first.allocate()
    second = dataclasses.replace(first, plan=Plan())
    for one in (first, second, first):
        one.make_plan()
        one.run()
    with pytest.raises(RefusedError):
        second.run()


@pytest.mark.parametrize(
    "changes", [{"window_left": 8}, {"page_size": 32}, {"page_indices": 8}], ids=str
)
def test_what_a_graph_fixes(changes):
    """Options, the page size and the address of the pages; lengths may change."""
    segment, tensors, *_ = prepared(dataclasses.replace(PAGED, qo_lens=(1,) * 4))
    segment.graph_max_rows = 9
    made = Call(segment, tensors)
    made.allocate()
    made.make_plan()
    segment.on_host[0].zero_()
    made.make_plan()
    made.segment = changed(segment, changes)
    refused("graph", made.make_plan)


def test_values_that_are_right_or_wrong_by_another_argument():
    segment, tensors, *_ = prepared(PREFILL)
    compute(changed(segment, {"position": ALIBI}), changed(tensors, {"sm_scale": 0.0}))
    capped, large = changed(segment, {"soft_cap": 1e-6}), changed(tensors, {"sm_scale": 1e33})
    refused("sm_scale = .* finite", compute, capped, large)
    few = changed(tensors, {"k.num_tokens": KEYS - 1, "v.num_tokens": KEYS - 1})
    refused("k has 1 x 39 tokens", compute, segment, few)


def of_later_release(one, other, added: int = 0):
    """Returns the two structs with another member after theirs, which the second one sets."""
    members = [("known", type(one)), ("added", ctypes.c_int64)]
    kind = type("Later", (ctypes.Structure,), {"_fields_": members})
    made = (kind * 2)((one, 0), (other, added))
    for later in made:
        later.known.size = ctypes.sizeof(kind)
    return made


def test_structs_of_later_releases():
    """Members that this release does not know must be 0."""
    (prefill, p, *_), (decode, d, out, _) = prepared(PREFILL), prepared(DECODE)
    tensors = of_later_release(p, d)
    compute(of_later_release(prefill, decode), tensors, 2)
    runner.compare(d.memory[0], out, None).check()
    unknown = of_later_release(prefill, decode, 7)
    refused("of a later release", compute, unknown, tensors, 2)


def test_structs_of_an_earlier_release():
    """Members after its own are not read."""
    segment, tensors, out, lse = prepared(PREFILL)
    segment.size, tensors.size = type(segment).kv_lens.offset, type(tensors).sinks.offset
    segment.reserved, segment.graph_max_rows, tensors.mask_bits = 5, -3, tensors.q.data
    compute(segment, tensors)
    runner.compare(tensors.memory[0], out, lse).check()


def test_other_strides_and_a_scale_of_the_output():
    """The output is a part of larger memory, the LSE [heads, rows]."""
    segment, tensors, *_ = prepared(PREFILL)
    inputs, wide = tensors.memory[0], torch.zeros(ROWS, HEADS, 2 * DIM)
    lse = torch.zeros(HEADS, ROWS)
    strided = changed(tensors_of(inputs, wide[..., :DIM], lse), {"out_scale": 2.0})
    strided.lse_stride_token, strided.lse_stride_head = 1, ROWS
    compute(segment, strided)
    runner.compare(inputs, wide[..., :DIM] / 2, lse.T).check()
    assert not wide[..., DIM:].any()


def test_the_output_may_be_q():
    segment, tensors, *_ = prepared(PREFILL)
    q = tensors.memory[0].q.clone()
    compute(segment, changed(tensors, {"q.data": address(q), "out.data": address(q)}))
    runner.compare(tensors.memory[0], q, None).check()


def test_what_finds_no_kernel():
    segment, *_ = prepared(PREFILL)
    unserved = changed(segment, {"head_dim_qk": 24, "q_dtype": F16, "o_dtype": F16})
    with pytest.raises(RefusedError):
        find_variant(unserved)
    eight = changed(segment, {"q_dtype": E4M3, "kv_dtype": E4M3, "o_dtype": E4M3})
    assert "e4m3" in find_variant(eight)
    refused("device", find_variant, segment, 1, -2)
    refused("directory is NULL", call, "set_kernel_directory", None)
    assert LIBRARY.preflash_abi_version() == 1


@needs("nm")
def test_every_function_is_a_symbol_with_a_version_and_nothing_else_is():
    functions = re.findall(r"^PREFLASH_API [^;]*?(preflash_\w+)\(", HEADER.read_text(), re.M)
    (library,) = Path(config("--libdir")[0]).glob("libpreflash.so")
    listed = output_of("nm", "-D", "--defined-only", library)
    found = {line.split()[-1] for line in listed.splitlines() if " A " not in line}
    assert found == {f"{name}@@PREFLASH_1" for name in functions}
    assert sorted(re.findall(r"^    (preflash_\w+);", MAP.read_text(), re.M)) == sorted(functions)


@needs("c++")
def test_the_header_is_cpp_too(tmp_path):
    source = tmp_path / "includes.cpp"
    source.write_text(
        "#include <preflash/preflash.h>\npreflash_segment s = PREFLASH_SEGMENT_INIT;\n"
    )
    flags = ("-Wall", "-Werror", *config("--cflags"))
    output_of("c++", "-c", source, *flags, "-o", tmp_path / "includes.o")


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


@needs("cc")
def test_the_example_in_c(tmp_path):
    program, flags = tmp_path / "prefill", config("--cflags", "--libs")
    strict = ("-std=c11", "-D_POSIX_C_SOURCE=200809L", "-Wall", "-Wextra", "-Werror")
    output_of("cc", *strict, *SANITIZE, EXAMPLE, *flags, "-lm", "-o", program)
    assert "largest error 0.00" in output_of(program)


@needs("rustc")
def test_the_example_in_rust(tmp_path):
    (directory,) = config("--libdir")
    program = tmp_path / "serve"
    command = ["rustc", "--edition", "2021", "-O", "-D", "warnings", "-L", directory]
    command += ["-C", f"link-arg=-Wl,-rpath,{directory}", "-o", program]
    # rustc does not run with the sanitizers' libraries preloaded.
    output_of(*command, EXAMPLES / "rust" / "src" / "main.rs", LD_PRELOAD="")
    assert "each has the same tokens alone" in output_of(program)
