"""The built libraries hold the matrix, need no GPU to load, do not spill in main loops, and hold no
instruction that ptxas encodes wrongly."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import check
import fa2_memory
import generate
import pytest
import sass
import spec
from preflash import _core
from ptxas import PtxasEntry, kernel_id, read_ptxas

# Why a kernel may spill, and what of it lies in a main loop.
_OUTSIDE = (
    "values of the prologue and the epilogue; in the main loop a reload or two a tile at d128 and "
    "(192, 128), and four words where tiles are skipped, or with a soft cap in float16"
)
_IN_MASK = (
    "O and S alone take three quarters of 255 registers, and a custom mask's words come on top; in "
    "the main loop words of a thread's row, where a tile is masked"
)
_IN_GATHER = "words of the gathering producers' item loop; their row loops hold no LDL or STL"
_IN_GATHER_AND_CONSUMER = _IN_GATHER + "; and words of a consumer between items"
_IN_CONVERSION = (
    "addresses and counters of the producers between the tiles that they convert; consumers "
    "reload words that are the same for all tiles, at d256 and with options at run time"
)
_IN_BRANCHES = (
    "addresses that each branch of the conversion reloads, two or three in 300 instructions, where "
    "all options are run-time values"
)
_IN_SCAN = (
    "words of the producer that looks through a mask's bits, above all where it also gathers; "
    "consumers of d64 and d256 reload a word or two for a tile"
)
_OF_BOTH = (
    "what kernels of one segment with either tile spill, and words that both need between items; "
    "the prefill's loop reloads up to seven words a tile, twice as many with a mask"
)
_IN_EXCHANGE = (
    "where items begin and end and where P crosses to the other CTA; in the main loop three words "
    "with a custom mask, up to 51 in 1,500 instructions where operands are converted"
)
_BETWEEN_ITEMS = "where items begin and end; the main loop holds no LDL or STL in SASS"


@dataclass(frozen=True)
class AllowedSpill:
    """Says which kernels may spill, and what makes that harmless."""

    spill_bytes: int
    why: str
    axes: dict[str, str]  # as in tiles.toml: an axis that is not named has any value

    def covers(self, variant: spec.Variant) -> bool:
        return spec.match_of(self.axes, variant.vocabulary.axes, "spills").covers(variant.values)


def may_spill(family: str, spill_bytes: int, why: str, **axes: str) -> AllowedSpill:
    return AllowedSpill(spill_bytes, why, {"family": family, **axes})


ALLOWED_SPILLS = [
    may_spill("sm80", 104, _OUTSIDE, tile_class="prefill", mask="bounds"),
    may_spill("sm80", 168, _IN_MASK, tile_class="prefill", mask="custom"),
    may_spill("sm80", 48, _OUTSIDE, head_dim="64", tile_class="decode"),
    may_spill("sm80", 52, _IN_MASK, head_dim="64", tile_class="decode", mask="custom"),
    may_spill("sm80", 48, _OUTSIDE, head_dim="256", tile_class="decode"),
    may_spill("sm80", 32, _OUTSIDE, head_dim="512", tile_class="compact"),
    may_spill("sm80", 1040, _IN_BRANCHES, load="converted"),
    may_spill("sm80", 364, _OF_BOTH, segments="two", mask="bounds"),
    may_spill("sm80", 490, _OF_BOTH, segments="two", mask="custom"),
    may_spill("sm90", 32, _IN_GATHER, head_dim="64"),
    may_spill("sm90", 100, _BETWEEN_ITEMS, head_dim="64", logits="softcap"),
    may_spill("sm90", 192, _IN_GATHER_AND_CONSUMER, head_dim="64", position="alibi"),
    may_spill("sm90", 52, _BETWEEN_ITEMS, head_dim="128", q_dtype="e4m3"),
    may_spill("sm90", 320, _BETWEEN_ITEMS, head_dim="256"),
    may_spill("sm90", 480, _BETWEEN_ITEMS, head_dim="256", segments="two"),
    may_spill("sm90", 96, _BETWEEN_ITEMS, head_dim="64", sparsity="skipping"),
    may_spill("sm90", 200, _IN_CONVERSION, load="converted"),
    may_spill("sm90", 1116, _IN_CONVERSION, head_dim="256", load="converted"),
    may_spill("sm90", 1400, _IN_EXCHANGE, head_dim="512", load="converted"),
    may_spill("sm90", 320, _IN_SCAN, mask="custom"),
    may_spill("sm90", 804, _IN_EXCHANGE, head_dim="512", mask="custom"),
    may_spill("sm90", 320, _BETWEEN_ITEMS, head_dim="512"),
]


def excess_spills(variant: spec.Variant | None, entry: PtxasEntry) -> bool:
    """Returns True for a kernel over its allowance: 0 for None, a kernel of the common library."""
    covering = [spill for spill in ALLOWED_SPILLS if variant and spill.covers(variant)]
    allowed = max((spill.spill_bytes for spill in covering), default=0)
    return max(entry.spill_stores, entry.spill_loads) > allowed


@pytest.fixture(scope="module")
def ptxas_reports(build_dir, kernel_libraries) -> dict[str, str]:
    reports = {path.stem: path.read_text() for path in (build_dir / "report").glob("*.ptxas")}
    if not reports:
        pytest.skip("prebuilt kernel libraries: their compile reports are elsewhere")
    return reports


@pytest.fixture(scope="module")
def entries(ptxas_reports) -> list[PtxasEntry]:
    return [entry for text in ptxas_reports.values() for entry in read_ptxas(text)]


@pytest.fixture(scope="module")
def compiled(package_dir) -> dict:
    return json.loads((package_dir / "variants.json").read_text())


def test_registry_and_variants_json_agree(compiled):
    """Ids, fields and tiles of the loaded kernels are those of the data file."""
    rows = {row["id"]: row for row in compiled["variants"]}
    kernels = {kernel["id"]: kernel for kernel in _core.kernels()}
    assert set(rows) == set(kernels)
    for name, row in rows.items():
        assert {key: kernels[name][key] for key in row} == row


def test_the_whole_preset_is_compiled(compiled, matrix, kernel_libraries):
    expected = {
        variant.id
        for variant in matrix.select(compiled["preset"])
        if variant.family_facts.on_cpu
        or generate.architectures_of(variant.family_facts, compiled["architectures"])
    }
    assert {kernel["id"] for kernel in _core.kernels()} == expected


def test_kernels_fit_into_shared_memory(matrix, kernel_libraries):
    """tests/host/test_devices.py plans with the sizes of fa2_memory."""
    variants = {variant.id: variant for variant in matrix.variants}
    for kernel in _core.kernels():
        if kernel["family"] == "sm80":
            assert kernel["smem_bytes"] == fa2_memory.smem_bytes(variants[kernel["id"]])
        if kernel["family"] != "cpu":
            assert 0 < kernel["smem_bytes"] <= 227 * 1024, kernel["id"]
            resident = kernel["smem_bytes"] + 1024
            # The launch bounds promise this many CTAs on SM80 (164 KiB) and on SM90 (228 KiB).
            assert resident * kernel["tile"]["ctas_per_sm"] <= 228 * 1024, kernel["id"]


def test_the_module_and_its_libraries_need_neither_cuda_nor_torch(package_dir):
    """All of them fit into a wheel."""
    files = [Path(_core.__file__), *package_dir.glob("lib/libpreflash_kernels_*.so")]
    for path in files:
        libraries, _ = check.needed(path)
        assert "libc.so.6" in libraries, path.name
        assert not [name for name in libraries if name.startswith(check.FORBIDDEN)], path.name
    assert sum(path.stat().st_size for path in files) < check.MAX_BYTES


def test_import_loads_no_kernel_library(package_dir):
    code = (
        "from preflash import _core\n"
        "maps = open('/proc/self/maps').read()\n"
        "assert '_core' in maps\n"
        "assert 'libpreflash_kernels' not in maps, 'loaded at import'\n"
        "_core.kernels()\n"
        "print('libpreflash_kernels_sm80' in open('/proc/self/maps').read())\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    there = (package_dir / "lib" / "libpreflash_kernels_sm80.so").is_file()
    assert run.stdout.strip() == str(there)


def test_every_kernel_has_a_ptxas_report(entries, compiled, cmake_options, matrix):
    archs = [arch.removesuffix("+PTX") for arch in compiled["architectures"]]
    assert archs == cmake_options["PREFLASH_ARCHS"].replace("+PTX", "").split(";")
    reported = {(variant, entry.arch) for entry in entries if (variant := kernel_id(entry.kernel))}
    expected = {
        (row["id"], f"sm_{arch}")
        for row in compiled["variants"]
        for arch in generate.architectures_of(matrix.families[row["family"]], archs)
    }
    assert reported == expected


def test_registers_are_what_the_launch_bounds_leave(entries):
    """A kernel that takes more than its tile's CTAs have would not launch."""
    kernels = {kernel["id"]: kernel for kernel in _core.kernels()}
    for entry in entries:
        if found := kernel_id(entry.kernel):
            tile = kernels[found]["tile"]
            threads = 32 * tile["warps"] * tile["ctas_per_sm"]
            assert 0 < -(-entry.registers // 8) * 8 * threads <= 65536, (found, entry.arch)


def test_no_kernel_spills(entries, matrix):
    variants = {variant.id: variant for variant in matrix.variants}
    assert entries
    assert [one for one in entries if excess_spills(variants.get(kernel_id(one.kernel)), one)] == []


def test_allowed_spills_are_of_kernels_that_exist(matrix):
    for spill in ALLOWED_SPILLS:
        assert any(spill.covers(variant) for variant in matrix.variants), spill


def test_ptxas_warned_of_nothing(ptxas_reports):
    """C7510 and its like: wgmma was serialised, which costs half the speed."""
    for name, text in ptxas_reports.items():
        warnings = [line for line in text.splitlines() if re.search(r"warning|\(C7\d+\)", line)]
        assert not warnings, f"{name}: {warnings}"


def test_the_report_reader_sees_spills_and_architectures(matrix):
    text = (
        "ptxas info    : Compiling entry function '_Z1fIN1v14sm80_bf16_d128EEv' for 'sm_80'\n"
        "ptxas info    : Function properties for _Z1fIN1v14sm80_bf16_d128EEv\n"
        "    56 bytes stack frame, 72 bytes spill stores, 64 bytes spill loads\n"
        "ptxas info    : Used 255 registers, used 1 barriers\n"
        "ptxas info    : Compiling entry function '_Z1g' for 'sm_90'\n"
        "ptxas info    : Function properties for _Z1g\n"
        "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
        "ptxas info    : Used 168 registers, used 8 barriers\n"
    )
    first, second = read_ptxas(text)
    assert first == PtxasEntry("_Z1fIN1v14sm80_bf16_d128EEv", "sm_80", 72, 64, 255)
    assert second == PtxasEntry("_Z1g", "sm_90", 0, 0, 168)
    assert kernel_id(first.kernel) == "sm80_bf16_d128"
    assert kernel_id(second.kernel) is None
    by_id = {variant.id: variant for variant in matrix.variants}
    assert excess_spills(by_id["sm80_bf16_d128_decode"], first)
    assert not excess_spills(by_id["sm80_bf16_d128"], first)
    assert not excess_spills(None, second)


def test_the_build_report_tells_what_each_source_cost(build_dir, ptxas_reports):
    for name in ptxas_reports:
        cost = json.loads((build_dir / "report" / f"{name}.json").read_text())
        assert cost["source"] == f"{name}.cu"
        assert cost["seconds"] > 0
        assert 50 < cost["peak_mib"] < 12 * 1024
        assert cost["object_kib"] > 0


@pytest.mark.parametrize(("target", "seen"), [("R7+UR0+0x1000", True), ("R7+0x1000", False)])
def test_a_uniform_register_in_a_copys_target_is_seen(target, seen):
    copy = f"        /*0000*/      LDGSTS.E.BYPASS.LTC128B.128 [{target}], desc[UR1][R14.64] ;"
    lines = ["\tcode for sm_90a", "arch = sm_90a", "Function : k", copy]
    (kernel,) = sass.read_kernels(lines)
    assert [sass.has_two_addresses(one) for one in kernel.code] == [seen]


def test_copies_with_a_cache_policy_have_no_uniform_register(kernel_libraries):
    """ptxas 13.0 encodes them wrongly: an illegal instruction. On sm_90 kernels for decode of 16
    bits have such copies."""
    cuobjdump = sass.find_cuobjdump()
    if cuobjdump is None:
        pytest.skip("no cuobjdump: pip install nvidia-cuda-cuobjdump, or a CUDA toolkit with it")
    kernels = [one for path in kernel_libraries for one in sass.disassemble(cuobjdump, path)]
    copying = [
        one
        for one in kernels
        if re.match(r"sm90(?!.*converted).*_decode", kernel_id(one.symbol) or "")
    ]
    if not copying:
        pytest.skip("built without decode kernels for sm_90")
    assert not [one.symbol for one in copying if any(map(sass.has_two_addresses, one.code))]
