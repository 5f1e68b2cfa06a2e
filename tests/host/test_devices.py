"""Every row of docs/support.md plans on fa2 with the facts of each GPU in 128 MB of workspace,
whatever the size of the KV cache, in a build of everything, of which the tables alone are
compiled."""

import os
import shutil
import sys
from pathlib import Path

import fa2_memory
import pytest
import spec
from processes import output_of, python

ROOT = Path(__file__).resolve().parents[2]
KB = 1024
# Compute capability, SMs, shared memory of a block and of an SM (CUDA C++ Programming Guide) of
# the GPUs with the fewest and the most SMs among those of one size of shared memory.
FACTS = ("compute_capability", "num_sms", "smem_per_block", "smem_per_sm")
GPUS = {
    "L4": (89, 58, 99 * KB, 100 * KB),
    "RTX Pro 6000 Blackwell": (120, 188, 99 * KB, 100 * KB),
    "B200": (100, 148, 227 * KB, 228 * KB),
    "A100": (80, 108, 163 * KB, 164 * KB),
}
ARCHITECTURES = "80;90+PTX"  # of a release

PLANS = """
import itertools, sys
import numpy as np
import support_table
from preflash import _core

WORKSPACE = 128 << 20
_core.set_library_dir(sys.argv[1])
features, dims = support_table.FEATURES.items(), support_table.HEAD_DIMS
rows = itertools.product(features, support_table.DTYPES, dims)
for (feature, changes), dtypes, dims in rows:
    if dtypes.q == _core.DType.float32:
        continue
    options = support_table.plain_options(dtypes, *dims).replace(
        num_qo_heads=32, num_kv_heads=8, **changes
    )
    for count, qo, kv in ((64, 1, 131072), (4, 700, 900), (1, 8192, 1 << 20)):
        lengths = [np.arange(count + 1, dtype=np.int32) * n for n in (qo, kv)]
        addresses = [array.ctypes.data for array in lengths]
        batch = _core.Batch(_core.BatchArrays(*addresses, 0, count), page_size=0)
        mask_bytes = 0
        if options.mask == _core.Mask.custom:
            batch = batch.with_mask()
            mask_bytes = batch.mask_bytes
        for graph_rows in (0, count * qo):
            segment = (options, batch, graph_rows, mask_bytes)
            plan = _core.plan(_core.Family.sm80, 0, [segment], WORKSPACE)
            assert plan.num_items > 0, (feature, dtypes, dims, qo)
            assert plan.has_prepass or plan.float_bytes <= WORKSPACE
            print(plan.id)
"""


@pytest.fixture(scope="module")
def kernels():
    return {v.id: v for v in spec.load_matrix().select("full", ["sm80"])}


@pytest.fixture(scope="module")
def tables(tmp_path_factory, kernels):
    """Makes a directory of kernel libraries without kernels."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    out = tmp_path_factory.mktemp("tables")
    options = ["--preset", "full", "--families", "sm80", "--archs", ARCHITECTURES]
    generate = ROOT / "cmake" / "codegen" / "generate.py"
    output_of(sys.executable, generate, "--write", out, *options)
    sizes = (f'{{"{name}", {fa2_memory.smem_bytes(v)}}},\n' for name, v in kernels.items())
    (out / "fake_smem.inl").write_text("".join(sizes))
    fakes = ROOT / "tests" / "cpp"
    sources = [fakes / "fake_gpu.cpp", *sorted(out.glob("sm80/*"))]
    everything = out / "everything.cpp"
    everything.write_text("".join(f'#include "{source}"\n' for source in sources))
    library = out / "lib" / "libpreflash_kernels_sm80.so"
    library.parent.mkdir()
    folders = (fakes / "fake_gpu", out, ROOT / "cpp", ROOT / "cpp" / "include")
    flags = ["-std=c++20", "-O0", "-shared", "-fPIC", *[f"-I{folder}" for folder in folders]]
    output_of(compiler, *flags, everything, "-o", library)
    shutil.copy(library, library.with_name("libpreflash_kernels_common.so"))
    return library.parent


@pytest.mark.parametrize("gpu", GPUS)
def test_every_row_plans(gpu, tables, kernels):
    facts = dict(zip(FACTS, GPUS[gpu], strict=True))
    given = ",".join(f"{name}={value}" for name, value in facts.items())
    ids = python(PLANS, tables, PREFLASH_GPU_FACTS=given).split()
    used = {name.removeprefix("prepass+") for name in ids}
    for name in used:
        assert fa2_memory.smem_bytes(kernels[name]) <= facts["smem_per_block"], name
    small = facts["smem_per_block"] <= 99 * KB
    compact = {name for name in kernels if "_compact" in name}
    assert compact
    assert used & compact == (compact if small else set())


NO_FACTS = ["smem=1", "num_sms", "num_sms=-3", "num_sms=x"]
QUERIES = f"""
import os, sys
from preflash import _core

_core.set_library_dir(sys.argv[1])
for facts in {NO_FACTS}:
    os.environ["PREFLASH_GPU_FACTS"] = facts
    try:
        _core.device_facts(0)
    except ValueError as error:
        print(error)
"""


def test_facts_that_are_none(tables):
    for facts, line in zip(NO_FACTS, python(QUERIES, tables).splitlines(), strict=True):
        assert line.startswith(f"PREFLASH_GPU_FACTS={facts}: '{facts}' must be")
