"""fa2 where a block has 99 KB of shared memory (SM86, SM89, SM120), with that limit on this GPU."""

import attention_cases
import converted_cases
import prepass_policy
from backends import output_of
from preflash import _core
from preflash.testing import build, runner

LIMIT = 99 * 1024


def run_every_wide_case() -> None:
    """Compares the cases that take most shared memory with the oracle; prints the kernels."""
    ran = set()
    for case in [*attention_cases.core(), *attention_cases.tiny(), *converted_cases.CASES]:
        if max(case.head_dim, case.dim_vo) > 192:
            inputs = build(case, device="cuda")
            with prepass_policy.forced("never"):  # on load, where a copy would spare the kernel
                wrapper = runner.planned(inputs, backend="fa2")
            runner.compare(inputs, *runner.run(wrapper, inputs)).check()
            ran.add(wrapper.variant)
    print(*sorted(ran), sep="\n")


def test_every_wide_case():
    facts = f"smem_per_block={LIMIT},smem_per_sm={LIMIT + 1024}"
    program = "import test_gpu_small_memory; test_gpu_small_memory.run_every_wide_case()"
    ran = output_of(program, PREFLASH_GPU_FACTS=facts).split()
    bytes_of = {kernel["id"]: kernel["smem_bytes"] for kernel in _core.kernels()}
    assert max(bytes_of[name] for name in ran) <= LIMIT
    for part in ("d512_compact", "d512_compact_softcap", "d256_decode", "_compact_", "converted"):
        assert any(part in name for name in ran), part
