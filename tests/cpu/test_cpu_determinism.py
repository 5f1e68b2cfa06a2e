"""Bits depend on neither threads nor machine. The fuzzer compares requests with lone ones."""

import json

import pytest
from preflash.testing import Case, build, runner
from processes import python

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
plan_decode(pod, d)
add("pod", *pod.run(one.q, one.k[:3000], one.v[:3000], d.q, d.cache, causal_p=True))
print(json.dumps(digests))
"""


def test_bits_do_not_depend_on_the_machine():
    """New processes compute the same with one thread on one core and with 16 on all."""
    one, many = (
        json.loads(python(DIGESTS, cores, OMP_NUM_THREADS=threads))
        for threads, cores in (("1", 1), ("16", 0))
    )
    assert len(one) == 8
    assert one == many


@pytest.mark.parametrize("split", [{"disable_split_kv": True}, {"fixed_split_size": 64}])
def test_zeros_have_the_same_sign_in_every_split(split):
    inputs = build(Case("zeros", (1,), (700,), 4, 1, 64))
    wrapper = runner.planned(inputs, backend="cpu", **split)
    assert wrapper.run(inputs.q, inputs.k, 0.0 * inputs.v, v_scale=-1.0).signbit().all()
