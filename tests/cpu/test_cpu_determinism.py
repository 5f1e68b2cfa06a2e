"""Bits depend neither on threads, nor on the batch beside a request, nor on an earlier run."""

import dataclasses
import json
import os
import pathlib

import attention_cases
import pytest
import torch
from cpu_runs import python, result, same
from fuzz import wrapper_trial
from fuzz.problems import Also, Problem
from preflash.testing import Case, MaskKind, build, reference, runner

SOME = [case for i, case in enumerate(attention_cases.core()) if i % 4 == 1]
WHOLE = {"disable_split_kv": True}


@pytest.mark.parametrize("split", [{}, {"fixed_split_size": 64}], ids=["auto", "fixed"])
@pytest.mark.parametrize("case", SOME, ids=lambda case: case.id)
def test_bits_do_not_depend_on_the_number_of_threads(case, split):
    threads = torch.get_num_threads()
    inputs = build(case)
    first = result(inputs, **split)
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            wrapper = runner.planned(inputs, backend="cpu", **split)
            for _ in range(2):
                assert same(runner.run(wrapper, inputs), first)
    finally:
        torch.set_num_threads(threads)


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
def add(name, *tensors):
    parts = b"".join(tensor.numpy().tobytes() for tensor in tensors)
    digests[name] = hashlib.sha256(parts).hexdigest()
for case in cases:
    inputs = build(case)
    wrapper = runner.planned(inputs, backend="cpu")
    add(case.name, *runner.run(wrapper, inputs))
    positional, options = runner.plan_arguments(inputs)
    split = wrapper.workspace_size(*positional, **options)[0] > 0
    assert split == (case.name != "disable_split_kv"), case.name
one = build(dataclasses.replace(mixed, name="single", qo_lens=(5,), kv_lens=(3000,)))
add("single", *runner.single(one, backend="cpu"))
d = build(decode)
k, v = (x.flatten(0, 1)[:3000] for x in (d.k, d.v))
k, v = k.nan_to_num(0.0, 0.0, 0.0), v.nan_to_num(0.0, 0.0, 0.0)
add("single decode", preflash.single_decode_with_kv_cache(d.q[0], k, v))
pod = preflash.PODWithPagedKVCacheWrapper(runner.workspace(), backend="cpu")
plan_decode(pod, decode, (d.kv_indptr, d.indices, d.last_page_len))
add("pod", *pod.run(one.q, one.k[:3000], one.v[:3000], d.q, d.cache, causal_p=True))
print(json.dumps(digests))
"""


def test_bits_do_not_depend_on_the_machine():
    """New processes on one core and on all compute the same with OMP_NUM_THREADS=1, 2 and 16."""
    tests = str(pathlib.Path(__file__).parents[1])  # where `fuzz` is
    path = os.pathsep.join(filter(None, [tests, os.environ.get("PYTHONPATH")]))

    def digests(threads, cores):
        environment = {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": path}
        return json.loads(python(DIGESTS, str(cores), **environment))

    first = digests(1, 1)
    assert len(first) == 8
    for threads, cores in ((1, 0), (2, 0), (16, 0), (2, 2)):
        assert digests(threads, cores) == first, (threads, cores)


PAGED = Case("paged", (1, 40, 5), (333, 200, 64), 4, 2, 64, page_size=16)
MIXED = ((1, 40, 3, 0, 70, 1), (700, 200, 0, 90, 333, 64))  # partials of any number side by side
MANY = Case("many", (64,) + (1,) * 50, (300,) + (20,) * 50, 4, 1, 64)  # mostly decode
BATCHES = [
    *((PAGED, split) for split in ({"fixed_split_size": 64}, {"fixed_split_size": 100})),
    *((PAGED, WHOLE | more) for more in ({}, {"fixed_split_size": 4096})),
    *(
        (Case("mixed", *MIXED, *heads, 64), split)
        for heads in ((2, 2), (6, 2), (8, 2), (128, 1))
        for split in ({"fixed_split_size": 64}, WHOLE)
    ),
    *((MANY, split) for split in ({"fixed_split_size": 128}, WHOLE)),
]


@pytest.mark.parametrize(
    "case",
    [dataclasses.replace(case, mask=MaskKind.CAUSAL, **split) for case, split in BATCHES],
    ids=lambda case: case.id,
)
def test_a_request_has_the_bits_that_it_has_alone(case):
    verdict = wrapper_trial.examine(Problem(case, also=Also.ALONE), backend="cpu")
    assert verdict.failures == []


SPLITS = [
    Case("decode", (1, 3), (700, 129), 4, 2, 64, page_size=16, mask=MaskKind.CAUSAL),
    Case("prefill", (70, 200), (300, 200), 4, 1, 128, mask=MaskKind.CAUSAL),
    Case("window", (70, 5), (300, 512), 3, 3, 64, mask=MaskKind.CAUSAL, window_left=90),
    Case("custom", (20, 5), (300, 512), 2, 1, 64, mask=MaskKind.CUSTOM, soft_cap=5.0),
    Case("longer_q", (150, 90), (130, 20), 2, 1, 64, mask=MaskKind.CAUSAL),
]


@pytest.mark.parametrize("size", [1, 65, 128, 256, 10_000])
@pytest.mark.parametrize("case", SPLITS, ids=lambda case: case.name)
def test_split_and_unsplit_agree(case, size):
    inputs = build(case.with_dtype(torch.float32))
    expected = reference(inputs)
    whole, split = result(inputs, **WHOLE), result(inputs, fixed_split_size=size)
    for found in (whole, split):
        runner.compare(inputs, *found, expected=expected).check()
    torch.testing.assert_close(whole[0], split[0], rtol=1e-5, atol=1e-5)
    assert torch.equal(whole[1] == -torch.inf, split[1] == -torch.inf)


@pytest.mark.parametrize("split", [WHOLE, {"fixed_split_size": 64}], ids=["whole", "fixed"])
def test_zeros_have_the_same_sign_in_every_split(split):
    inputs = build(Case("zeros", (1,), (700,), 4, 1, 64))
    wrapper = runner.planned(inputs, backend="cpu", **split)
    assert wrapper.run(inputs.q, inputs.k, 0.0 * inputs.v, v_scale=-1.0).signbit().all()


def test_the_workspace_is_for_the_chunks_of_a_split():
    """The tests above compare splits only if there are any."""
    inputs = build(Case("decode", (1,), (700,), 4, 1, 64))
    wrapper = runner.make_wrapper(inputs.case, backend="cpu")
    positional, options = runner.plan_arguments(inputs)
    split = wrapper.workspace_size(*positional, **options | {"fixed_split_size": 64})
    assert split[0] >= 11 * 4 * 64 * 4  # eleven chunks of four rows of 64 floats
    assert wrapper.workspace_size(*positional, **options | WHOLE)[0] == 0
