"""Random problems of the fuzzer with a fixed seed: tests/fuzz says what it looks at."""

import pytest
import torch
from fuzz.command import CALLS, WRAPPERS
from fuzz.random_cases import Limits

COUNTS = {
    WRAPPERS: 300,
    "trtllm_fmha_v2_prefill": 100,
    "pod": 80,
    "cudnn_batch_prefill_with_kv_cache": 100,
}
PROBLEMS = [(call, index) for call in CALLS for index in range(COUNTS[call])]


@pytest.mark.parametrize(("call", "index"), PROBLEMS)
def test_random_problems(target, call, index):
    draw, examine = CALLS[call]
    dtypes = (torch.float16, torch.bfloat16, *[torch.float32] * (target.device == "cpu"))
    problem = draw(20261121, index, Limits(700, 1e7, dtypes))
    verdict = examine(problem, backend=target.backend, device=target.device)
    if verdict.not_compiled:
        raise NotImplementedError(verdict.not_compiled)
    assert verdict.failures == []
