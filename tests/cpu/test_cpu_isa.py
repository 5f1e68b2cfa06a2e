"""PREFLASH_CPU_ISA chooses the vectors of the CPU backend; an unknown name is refused."""

import re
import sys
from pathlib import Path

import pytest
from preflash import _core
from processes import output_of, python

ISAS = ("generic", "avx2", "avx512")
# What the vectors compute: of these files, the tests that an expression of pytest's -k selects.
SELECTED = {
    "test_cpu_fp8.py": "every_code or rounding",
    "test_cpu_huge_logits.py": "not see_their_neighbours",
    "test_cpu_cases.py": "dequantised or test_core and (alibi or rope)",
}


@pytest.mark.parametrize("isa", ISAS)
def test_every_instruction_set(isa):
    if ISAS.index(isa) >= ISAS.index(_core.cpu_isa()):
        pytest.skip(f"the tests run on {_core.cpu_isa()}")
    tests = " or ".join(f"{name} and ({tests})" for name, tests in SELECTED.items())
    command = (sys.executable, "-m", "pytest", "-v", "-x", "-p", "no:cacheprovider", "-k", tests)
    printed = output_of(*command, *map(Path(__file__).with_name, SELECTED), PREFLASH_CPU_ISA=isa)
    assert all(re.search(rf"{name}::.* PASSED", printed) for name in SELECTED), printed


def test_known_instruction_sets():
    code = "from preflash import _core; print(_core.cpu_isa())"
    assert python(code, PREFLASH_CPU_ISA="generic") == "generic\n"
    assert python(code, PREFLASH_CPU_ISA="avx512") == f"{_core.cpu_isa()}\n"


CALLS = """
wrapper.plan(indptr, indptr, 2, 2, 64, q_data_type=torch.float32)
preflash.single_prefill_with_kv_cache(q, q, q)
preflash.packbits(torch.ones(9, dtype=torch.bool))
preflash.segment_packbits(torch.ones(9, dtype=torch.bool), torch.tensor([0, 4, 9]))
preflash.merge_state(q, s, q, s)
preflash.merge_state_in_place(q, s, q, s)
preflash.merge_states(q[:, None], s[:, None])
cli.main(["info"])
"""


def test_an_unknown_instruction_set_is_refused():
    """Every entry point refuses it, each time it is called; `info` only says so."""
    printed = python(
        f"""
        import preflash, torch
        from preflash import cli
        q, s = torch.randn(5, 2, 64), torch.randn(5, 2)
        indptr = torch.tensor([0, 5], dtype=torch.int32)
        buffer = torch.empty(1 << 20, dtype=torch.uint8)
        wrapper = preflash.BatchPrefillWithRaggedKVCacheWrapper(buffer)
        for call in 2 * {CALLS.strip().splitlines()!r}:
            try:
                eval(call)
            except ValueError as error:
                print("CPU", call, error)
        """,
        PREFLASH_CPU_ISA="avx1024",
    )
    said = [line for line in printed.splitlines() if line.startswith("CPU ")]
    assert len(said) == 2 * 8, printed
    assert all(name in line for line in said for name in ("avx1024", *ISAS))
