"""The built libraries hold the matrix, are loaded late, and do not spill in main loops."""

from __future__ import annotations

import json
import re

import fa2_memory
import generate
import pytest
import sass
import spec
from preflash import _core
from processes import python
from ptxas import PtxasEntry, kernel_id, read_ptxas

# A family, bytes that its kernels may spill, and their axes: any value of those not named.
ALLOWED_SPILLS = [
    # Values of the prologue and the epilogue; in the main loop a reload or two a tile at d128 and
    # (192, 128), and four words where tiles are skipped, or with a soft cap in float16.
    ("sm80", 104, {"tile_class": "prefill", "mask": "bounds"}),
    ("sm80", 116, {"head_dim": "192x128", "position": "alibi"}),
    ("sm80", 48, {"head_dim": ["64", "256"], "tile_class": "decode"}),
    ("sm80", 32, {"head_dim": "512", "tile_class": "compact"}),
    # O and S alone take three quarters of 255 registers, and a custom mask's words come on top; in
    # the main loop words of a thread's row, where a tile is masked.
    ("sm80", 168, {"tile_class": "prefill", "mask": "custom"}),
    ("sm80", 52, {"head_dim": "64", "tile_class": "decode", "mask": "custom"}),
    # Addresses that each branch of the conversion reloads, two or three in 300 instructions, where
    # all options are run-time values.
    ("sm80", 1040, {"load": "converted"}),
    # What kernels of one segment with either tile spill, and words that both need between items;
    # the prefill's loop reloads up to seven words a tile, twice as many with a mask.
    ("sm80", 364, {"segments": "two", "mask": "bounds"}),
    ("sm80", 490, {"segments": "two", "mask": "custom"}),
    # Words of the gathering producers' item loop, and with ALiBi of a consumer between items; the
    # producers' row loops hold no LDL or STL.
    ("sm90", 32, {"head_dim": "64"}),
    ("sm90", 192, {"head_dim": "64", "position": "alibi"}),
    # Where items begin and end; the main loop holds no LDL or STL in SASS.
    ("sm90", 100, {"head_dim": "64", "logits": "softcap"}),
    ("sm90", 100, {"head_dim": "64", "sparsity": "skipping"}),
    ("sm90", 8, {"head_dim": "192x128", "sparsity": "skipping"}),
    ("sm90", 96, {"head_dim": "128", "q_dtype": "e4m3"}),  # 52 but where Q is quantised
    ("sm90", 320, {"head_dim": "256"}),
    ("sm90", 480, {"head_dim": "256", "segments": "two"}),
    # 92 or 372 bytes by what is compiled in the same file; the main loop holds none.
    ("sm90", 372, {"head_dim": "512"}),
    # Addresses and counters of the producers between the tiles that they convert; consumers reload
    # words that are the same for all tiles, at d256 and with options at run time.
    ("sm90", 200, {"load": "converted"}),
    ("sm90", 368, {"load": "converted", "position": "alibi"}),
    ("sm90", 600, {"load": "converted", "position": "alibi", "mask": "custom"}),
    ("sm90", 1116, {"head_dim": "256", "load": "converted"}),
    ("sm90", 1248, {"head_dim": "256", "load": "converted", "mask": "custom", "q_dtype": "f16"}),
    # Words of the producer that looks through a mask's bits, above all where it also gathers;
    # consumers of d64 and d256 reload a word or two for a tile.
    ("sm90", 320, {"mask": "custom"}),
    # Where items begin and end and where P crosses to the other CTA; in the main loop three words
    # with a custom mask, up to 51 in 1,500 instructions where operands are converted.
    ("sm90", 1400, {"head_dim": "512", "load": "converted"}),
    ("sm90", 1748, {"head_dim": "512", "load": "converted", "q_dtype": "f16"}),
    ("sm90", 2592, {"head_dim": "512", "load": "converted", "mask": "custom", "q_dtype": "f16"}),
    ("sm90", 804, {"head_dim": "512", "mask": "custom"}),
]


def may_spill(variant: spec.Variant, family: str, axes: dict[str, str | list[str]]) -> bool:
    match = spec.match_of({"family": family, **axes}, variant.vocabulary.axes, "spills")
    return match.covers(variant.values)


def excess_spills(variant: spec.Variant | None, entry: PtxasEntry) -> bool:
    """Returns True for a kernel over its allowance: 0 for None, a kernel of the common library."""
    allowed = (
        size
        for family, size, axes in ALLOWED_SPILLS
        if variant and may_spill(variant, family, axes)
    )
    return max(entry.spill_stores, entry.spill_loads) > max(allowed, default=0)


@pytest.fixture(scope="module")
def reports(build_dir, kernel_libraries) -> dict[str, str]:
    """Returns ptxas's report of each source."""
    found = {path.stem: path.read_text() for path in (build_dir / "report").glob("*.ptxas")}
    return found or pytest.skip("prebuilt kernel libraries: their compile reports are elsewhere")


@pytest.fixture(scope="module")
def entries(reports) -> list[PtxasEntry]:
    return [entry for text in reports.values() for entry in read_ptxas(text)]


@pytest.fixture(scope="module")
def compiled(package_dir) -> dict:
    return json.loads((package_dir / "variants.json").read_text())


@pytest.fixture(scope="module")
def kernels() -> dict[str, dict]:
    return {kernel["id"]: kernel for kernel in _core.kernels()}


def test_registry_and_variants_json_agree(compiled, kernels):
    """Ids, fields and tiles of the loaded kernels are those of the data file."""
    assert len(compiled["variants"]) == len(kernels)
    for row in compiled["variants"]:
        assert {key: kernels[row["id"]][key] for key in row} == row


def test_the_whole_preset_is_compiled(compiled, kernels, matrix, kernel_libraries):
    assert set(kernels) == {
        variant.id
        for variant in matrix.select(compiled["preset"])
        if variant.family_facts.on_cpu
        or generate.architectures_of(variant.family_facts, compiled["architectures"])
    }


def test_kernels_fit_into_shared_memory(matrix, kernels, kernel_libraries):
    """tests/host/test_devices.py plans with the sizes of fa2_memory."""
    variants = {variant.id: variant for variant in matrix.variants}
    for name, kernel in kernels.items():
        if kernel["family"] == "sm80":
            assert kernel["smem_bytes"] == fa2_memory.smem_bytes(variants[name])
        if kernel["family"] != "cpu":
            assert 0 < kernel["smem_bytes"] <= 227 * 1024, name
            resident = kernel["smem_bytes"] + 1024
            # The launch bounds promise this many CTAs on SM80 (164 KiB) and on SM90 (228 KiB).
            assert resident * kernel["tile"]["ctas_per_sm"] <= 228 * 1024, name


def test_import_loads_no_kernel_library(package_dir):
    printed = python("""
        maps = lambda: open('/proc/self/maps').read()
        from preflash import _core
        assert '_core' in maps()
        assert 'libpreflash_kernels' not in maps(), 'loaded at import'
        _core.kernels()
        print('libpreflash_kernels_sm80' in maps())
    """)
    there = (package_dir / "lib" / "libpreflash_kernels_sm80.so").is_file()
    assert printed.strip() == str(there)


def test_every_kernel_has_a_ptxas_report(entries, compiled, build_dir, matrix):
    archs = [arch.removesuffix("+PTX") for arch in compiled["architectures"]]
    cache = (build_dir / "CMakeCache.txt").read_text()
    (wanted,) = re.findall(r"^PREFLASH_ARCHS:\w+=(.*)$", cache, flags=re.MULTILINE)
    assert archs == wanted.replace("+PTX", "").split(";")
    reported = {(variant, entry.arch) for entry in entries if (variant := kernel_id(entry.kernel))}
    expected = {
        (row["id"], f"sm_{arch}")
        for row in compiled["variants"]
        for arch in generate.architectures_of(matrix.families[row["family"]], archs)
    }
    assert reported == expected


def test_registers_are_what_the_launch_bounds_leave(entries, kernels):
    """A kernel that takes more than its tile's CTAs have would not launch."""
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
    for family, _, axes in ALLOWED_SPILLS:
        assert any(may_spill(variant, family, axes) for variant in matrix.variants), axes


def test_ptxas_warned_of_nothing(reports):
    """C7510 and its like: wgmma was serialised, which costs half the speed."""
    for name, text in reports.items():
        warnings = [line for line in text.splitlines() if re.search(r"warning|\(C7\d+\)", line)]
        assert not warnings, f"{name}: {warnings}"


REPORT = """\
ptxas info    : Compiling entry function '_Z1fIN1v14sm80_bf16_d128EEv' for 'sm_80'
ptxas info    : Function properties for _Z1fIN1v14sm80_bf16_d128EEv
    56 bytes stack frame, 72 bytes spill stores, 64 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers
ptxas info    : Compiling entry function '_Z1g' for 'sm_90'
ptxas info    : Function properties for _Z1g
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 8 barriers
"""


def test_the_report_reader_sees_spills_and_architectures(matrix):
    first, second = read_ptxas(REPORT)
    assert first == PtxasEntry("_Z1fIN1v14sm80_bf16_d128EEv", "sm_80", 72, 64, 255)
    assert second == PtxasEntry("_Z1g", "sm_90", 0, 0, 168)
    assert (kernel_id(first.kernel), kernel_id(second.kernel)) == ("sm80_bf16_d128", None)
    by_id = {variant.id: variant for variant in matrix.variants}
    assert excess_spills(by_id["sm80_bf16_d128_decode"], first)
    assert not excess_spills(by_id["sm80_bf16_d128"], first)
    assert not excess_spills(None, second)


def test_the_build_report_tells_what_each_source_cost(build_dir, reports):
    for name in reports:
        cost = json.loads((build_dir / "report" / f"{name}.json").read_text())
        assert cost["source"] == f"{name}.cu"
        assert cost["seconds"] > 0
        assert 50 < cost["peak_mib"] < 12 * 1024
        assert cost["object_kib"] > 0


def test_a_uniform_register_in_a_copys_target_is_seen():
    for target, seen in (("R7+UR0+0x1000", True), ("R7+0x1000", False)):
        copy = f"        /*0000*/      LDGSTS.E.BYPASS.LTC128B.128 [{target}], desc[UR1][R14.64] ;"
        (kernel,) = sass.read_kernels(["\tcode for sm_90a", "arch = sm_90a", "Function : k", copy])
        assert [sass.has_two_addresses(one) for one in kernel.code] == [seen]


def test_copies_with_a_cache_policy_have_no_uniform_register(kernel_libraries):
    """ptxas 13.0 encodes them wrongly: an illegal instruction. On sm_90 kernels for decode of 16
    bits have such copies."""
    cuobjdump = sass.find_cuobjdump()
    if cuobjdump is None:
        pytest.skip("no cuobjdump: pip install nvidia-cuda-cuobjdump, or a CUDA toolkit with it")
    library = next((path for path in kernel_libraries if "sm90" in path.name), None)
    copying = [
        one
        for one in (sass.disassemble(cuobjdump, library) if library else ())
        if re.match(r"sm90(?!.*converted).*_decode", kernel_id(one.symbol) or "")
    ]
    if not copying:
        pytest.skip("built without decode kernels for sm_90")
    assert not [one.symbol for one in copying if any(map(sass.has_two_addresses, one.code))]
