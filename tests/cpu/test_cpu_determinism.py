"""Bits: two runs, any number of threads, any company in the batch, split or not."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import attention_cases
import pytest
import torch
from cpu_runs import alone, result, rows_of, same
from preflash.testing import Case, MaskKind, build, reference, runner

SOME = [case for i, case in enumerate(attention_cases.core()) if i % 4 == 1]


@pytest.mark.parametrize("case", SOME, ids=lambda case: case.id)
def test_two_runs_of_one_plan(case):
    inputs = build(case)
    wrapper = runner.planned(inputs, backend="cpu")
    assert same(runner.run(wrapper, inputs), runner.run(wrapper, inputs))


@pytest.mark.parametrize("split", [{}, {"fixed_split_size": 64}], ids=["auto", "fixed"])
@pytest.mark.parametrize("case", SOME, ids=lambda case: case.id)
def test_bits_do_not_depend_on_the_number_of_threads(case, split):
    threads = torch.get_num_threads()
    inputs = build(case)
    results = []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            results.append(result(inputs, **split))
    finally:
        torch.set_num_threads(threads)
    assert same(results[0], results[1])
    assert same(results[0], results[2])


# Prints a digest of the bits of every kind of call, by name; float32, where the output's rounding
# hides no order of additions.
DIGESTS = """
import dataclasses, hashlib, json, os, sys
cores = int(sys.argv[1])
if cores: os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
import preflash, torch
from preflash.testing import Case, MaskKind, build, runner
from fuzz.pod_trial import plan_decode
mixed = Case("ragged", (1, 70, 130), (2600, 300, 130), 8, 2, 64, dtype=torch.float32,
             mask=MaskKind.CAUSAL)
decode = dataclasses.replace(mixed, name="decode", qo_lens=(1, 1, 1), kv_lens=(4000, 90, 1300),
                             page_size=16)
cases = [mixed, decode, dataclasses.replace(mixed, name="paged", page_size=16),
         dataclasses.replace(mixed, name="fixed_split_size", fixed_split_size=128),
         dataclasses.replace(mixed, name="disable_split_kv", disable_split_kv=True)]
digests = {}
def tell(name, *tensors):
    parts = b"".join(tensor.numpy().tobytes() for tensor in tensors)
    digests[name] = hashlib.sha256(parts).hexdigest()
for case in cases:
    inputs = build(case)
    wrapper = runner.planned(inputs, backend="cpu")
    tell(case.name, *runner.run(wrapper, inputs))
    positional, options = runner.plan_arguments(inputs)
    split = wrapper.workspace_size(*positional, **options)[0] > 0
    assert split == (case.name != "disable_split_kv"), case.name
one = build(dataclasses.replace(mixed, name="single", qo_lens=(5,), kv_lens=(3000,)))
tell("single", *runner.single(one, backend="cpu"))
d = build(decode)
k, v = (x.flatten(0, 1)[:3000] for x in (d.k, d.v))
k, v = k.nan_to_num(0.0, 0.0, 0.0), v.nan_to_num(0.0, 0.0, 0.0)
tell("single decode", preflash.single_decode_with_kv_cache(d.q[0], k, v))
pod = preflash.PODWithPagedKVCacheWrapper(runner.workspace(), backend="cpu")
plan_decode(pod, decode, (d.kv_indptr, d.indices, d.last_page_len))
tell("pod", *pod.run(one.q, one.k[:3000], one.v[:3000], d.q, d.cache, causal_p=True))
print(json.dumps(digests))
"""


def test_bits_do_not_depend_on_the_machine():
    """In new processes on one core and on all, with OMP_NUM_THREADS=1, 2 and 16."""
    tests = str(pathlib.Path(__file__).parents[1])  # where `fuzz` is
    path = os.pathsep.join(filter(None, [tests, os.environ.get("PYTHONPATH")]))

    def digests(threads, cores=0):
        done = subprocess.run(
            [sys.executable, "-c", DIGESTS, str(cores)],
            env={**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    first = digests(threads=1, cores=1)
    assert len(first) == 8
    for threads in (1, 2, 16):
        assert digests(threads) == first, threads
    assert digests(threads=2, cores=2) == first


WHOLE = {"disable_split_kv": True}
MIXED = ((1, 40, 3, 0, 70, 1), (700, 200, 0, 90, 333, 64))  # partials of any number side by side
MANY = ((64,) + (1,) * 50, (300,) + (20,) * 50)  # a batch of mostly decode requests
COMPANIES = [
    *(
        (Case("paged", (1, 40, 5), (333, 200, 64), 4, 2, 64, page_size=16), policy)
        for policy in (
            {"fixed_split_size": 64},
            {"fixed_split_size": 100},
            WHOLE,
            {"fixed_split_size": 4096, **WHOLE},
        )
    ),
    *(
        (Case("mixed", *MIXED, *heads, 64), policy)
        for heads in ((2, 2), (6, 2), (8, 2), (128, 1))
        for policy in ({"fixed_split_size": 64}, WHOLE)
    ),
    *((Case("many", *MANY, 4, 1, 64), policy) for policy in ({"fixed_split_size": 128}, WHOLE)),
]


@pytest.mark.parametrize(("crowd", "policy"), COMPANIES, ids=lambda part: getattr(part, "id", None))
def test_a_request_does_not_see_its_company(crowd, policy):
    """Right, and to the bit what each request is alone."""
    inputs = build(dataclasses.replace(crowd, mask=MaskKind.CAUSAL))
    together = result(inputs, **policy)
    runner.compare(inputs, *together).check()
    for request in range(crowd.batch_size):
        rows = rows_of(crowd.qo_lens, request)
        assert same(result(alone(inputs, request), **policy), [part[rows] for part in together])


SPLITS = [
    Case("decode", (1, 3), (700, 129), 4, 2, 64, page_size=16, mask=MaskKind.CAUSAL),
    Case("prefill", (70, 200), (300, 200), 4, 1, 128, mask=MaskKind.CAUSAL),
    Case("window", (70, 5), (300, 512), 3, 3, 64, mask=MaskKind.CAUSAL, window_left=90),
    Case("custom", (20, 5), (300, 512), 2, 1, 64, mask=MaskKind.CUSTOM, soft_cap=5.0),
    Case("longer_q", (150, 90), (130, 20), 2, 1, 64, mask=MaskKind.CAUSAL),
]


@pytest.mark.parametrize("size", [1, 64, 65, 128, 256, 10_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", SPLITS, ids=lambda case: case.name)
def test_split_and_unsplit_agree(case, dtype, size):
    """Both are right, which is a stronger statement than being close to each other."""
    case = case.with_dtype(dtype)
    inputs = build(case)
    expected = reference(inputs)
    whole = result(inputs, disable_split_kv=True)
    split = result(inputs, fixed_split_size=size)
    runner.compare(inputs, *whole, expected=expected).check()
    runner.compare(inputs, *split, expected=expected).check()
    if dtype is torch.float32:
        torch.testing.assert_close(whole[0], split[0], rtol=1e-5, atol=1e-5)
    assert torch.equal(whole[1] == -torch.inf, split[1] == -torch.inf)


def test_a_split_really_happens():
    """Otherwise the tests above compare a thing with itself."""
    case = Case("decode", (1,), (700,), 4, 1, 64, fixed_split_size=64)
    inputs = build(case)
    wrapper = runner.make_wrapper(case, backend="cpu")
    positional, options = runner.plan_arguments(inputs)
    float_bytes, _ = wrapper.workspace_size(*positional, **options)
    # Eleven chunks of at least four rows of 64 floats.
    assert float_bytes >= 11 * 4 * 64 * 4
    none, _ = wrapper.workspace_size(
        *positional, **{**options, "fixed_split_size": None, "disable_split_kv": True}
    )
    assert none == 0
