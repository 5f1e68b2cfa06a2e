"""Run by test_gpu_small_memory.py under the facts of another GPU: the cases whose kernels take most
shared memory, against the oracle, on fa2. Prints the kernels that ran."""

import attention_cases
import converted_cases
import prepass_policy
from preflash.testing import build, runner


def main() -> None:
    ran = set()
    cases = [*attention_cases.core(), *attention_cases.tiny(), *converted_cases.CASES]
    for case in cases:
        if max(case.head_dim, case.head_dim_vo or 0) <= 192:
            continue
        inputs = build(case, device="cuda")
        with prepass_policy.forced("never"):  # on load, where a copy would spare the kernel
            wrapper = runner.planned(inputs, backend="fa2")
        runner.compare(inputs, *runner.run(wrapper, inputs)).check()
        ran.add(wrapper.variant)
    print(*sorted(ran), sep="\n")


if __name__ == "__main__":
    main()
