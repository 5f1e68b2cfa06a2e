"""Checks the main loops in the machine code of the built kernels (sass.py)."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import sass
from test_libraries import ALLOWED_SPILLS, kernel_id


def code_of(text: str) -> list[sass.Instruction]:
    """Instructions of "address: [@guard] name operands", one a line."""
    lines = []
    for line in text.strip().splitlines():
        address, instruction = line.split(":")
        lines.append(f"        /*{address.strip()}*/                   {instruction.strip()} ;")
    (kernel,) = sass.read_kernels(["\tcode for sm_90a", "arch = sm_90a", "Function : k", *lines])
    return kernel.code


LOOP = """
    0000: LDL R1, [R0]
    0010: HGMMA.64x128x16.F32 R24, gdesc[UR8], R24
    0020: BSSY B0, 0x0070
    0030: @P0 BRA 0x0060
    0040: STL [R0], R1
    0050: BSYNC B0
    0060: BSYNC B0
    0070: MUFU.EX2 R2, R2
    0080: @P1 BRA 0x0010
    0090: STL [R0], R2
    00a0: EXIT
    00b0: BRA 0x00b0
"""


def test_a_loop_ends_at_its_backward_branch():
    """The branch that is seldom taken counts, what comes before the loop and after it does not."""
    assert sass.local_accesses_of_main_loops(code_of(LOOP)) == 1


def test_convergence_is_followed():
    """The exponential is out of reach unless a BSYNC continues where its BSSY says."""
    lost = LOOP.replace("BSYNC B0", "BSYNC B1")
    with pytest.raises(ValueError, match="no loop"):
        sass.local_accesses_of_main_loops(code_of(lost))


def test_only_the_innermost_loop_counts():
    """Loops over items hold the main loop, and reload what they need."""
    outer = LOOP.replace("0090: STL [R0], R2", "0090: @P2 BRA 0x0000")
    assert sass.local_accesses_of_main_loops(code_of(outer)) == 1


def test_loops_without_exponentials_are_others():
    """Such as that of producers, or of a head that comes in slices."""
    slices = LOOP.replace("MUFU.EX2 R2, R2", "MUFU.RCP R2, R2")
    with pytest.raises(ValueError, match="no loop"):
        sass.local_accesses_of_main_loops(code_of(slices))


@dataclass(frozen=True)
class MainLoops:
    variant: str
    arch: str
    local_accesses: int
    misencoded_copies: int


@pytest.fixture(scope="module")
def main_loops(kernel_libraries) -> list[MainLoops]:
    cuobjdump = sass.find_cuobjdump()
    if cuobjdump is None:
        pytest.skip("no cuobjdump: pip install nvidia-cuda-cuobjdump, or a CUDA toolkit with it")
    found = []
    for library in kernel_libraries:
        for kernel in sass.disassemble(cuobjdump, library):
            variant = kernel_id(kernel.symbol)
            if variant is None:
                continue
            accesses = sass.local_accesses_of_main_loops(kernel.code)
            misencoded = sum(map(sass.has_two_addresses, kernel.code))
            found.append(MainLoops(variant, kernel.arch, accesses, misencoded))
    return found


def test_main_loops_hold_no_spills(main_loops, matrix):
    variants = {variant.id: variant for variant in matrix.variants}
    excess = []
    for kernel in main_loops:
        covering = [spill for spill in ALLOWED_SPILLS if spill.covers(variants[kernel.variant])]
        allowed = max((spill.loop_accesses for spill in covering), default=0)
        if kernel.local_accesses > allowed:
            found = f"{kernel.variant} ({kernel.arch}): {kernel.local_accesses}"
            excess.append(f"{found}, of {allowed}")
    assert main_loops
    assert not excess, "\n".join(excess)


WITH_UNIFORM_REGISTER = "0000: LDGSTS.E.BYPASS.LTC128B.128 [R7+UR0+0x1000], desc[UR1][R14.64]"
ORDINARY = "0000: LDGSTS.E.BYPASS.LTC128B.128 [R7+0x1000], desc[UR8][R14.64]"


def test_a_uniform_register_in_a_copys_target_is_seen():
    assert sass.has_two_addresses(code_of(WITH_UNIFORM_REGISTER)[0])
    assert not sass.has_two_addresses(code_of(ORDINARY)[0])


def test_copies_with_a_cache_policy_have_no_uniform_register(main_loops):
    """ptxas 13.0 encodes them wrongly: an illegal instruction. Only decode kernels of 16 bits have
    such copies."""
    kernels = [one for one in main_loops if one.variant.startswith("sm90")]
    decode = [one for one in kernels if "_decode" in one.variant and "converted" not in one.variant]
    if not decode:
        pytest.skip("built without decode kernels for sm_90")
    assert [one for one in decode if one.misencoded_copies] == []
