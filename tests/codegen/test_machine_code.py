"""The built kernels hold no instruction that ptxas encodes wrongly."""

from __future__ import annotations

import pytest
import sass
from ptxas import kernel_id


def is_decode_of_16_bits(variant: str) -> bool:
    """Returns True for the kernels of sm_90 that have copies with a cache policy."""
    return variant.startswith("sm90") and "_decode" in variant and "converted" not in variant


@pytest.mark.parametrize(("target", "seen"), [("R7+UR0+0x1000", True), ("R7+0x1000", False)])
def test_a_uniform_register_in_a_copys_target_is_seen(target, seen):
    copy = f"        /*0000*/      LDGSTS.E.BYPASS.LTC128B.128 [{target}], desc[UR1][R14.64] ;"
    lines = ["\tcode for sm_90a", "arch = sm_90a", "Function : k", copy]
    (kernel,) = sass.read_kernels(lines)
    assert [sass.has_two_addresses(one) for one in kernel.code] == [seen]


def test_copies_with_a_cache_policy_have_no_uniform_register(kernel_libraries):
    """ptxas 13.0 encodes them wrongly: an illegal instruction."""
    cuobjdump = sass.find_cuobjdump()
    if cuobjdump is None:
        pytest.skip("no cuobjdump: pip install nvidia-cuda-cuobjdump, or a CUDA toolkit with it")
    wrong, found = [], 0
    for library in kernel_libraries:
        for kernel in sass.disassemble(cuobjdump, library):
            variant = kernel_id(kernel.symbol)
            if variant and is_decode_of_16_bits(variant):
                found += 1
                wrong += [variant] if any(map(sass.has_two_addresses, kernel.code)) else []
    if not found:
        pytest.skip("built without decode kernels for sm_90")
    assert not wrong
