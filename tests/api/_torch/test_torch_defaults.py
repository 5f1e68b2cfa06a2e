"""A caller's defaults of torch (device, dtype, inference mode) change no result.

Inputs, oracle and results are all made under them.
"""

import contextlib
import math

import attention_cases
import cudnn_calls
import numpy
import preflash
import pytest
import torch
from planned_cases import planned
from preflash.cli import main
from preflash.cli.batches import Sample, batches
from preflash.testing import Case, KvForm, MaskKind, build, oracle, runner

HOST = {"dtype": torch.float32, "device": "cpu"}


@contextlib.contextmanager
def default(device=None, dtype=None):
    before = torch.get_default_device(), torch.get_default_dtype()
    torch.set_default_device(device)
    torch.set_default_dtype(dtype or before[1])
    try:
        yield
    finally:
        torch.set_default_device(None if before[0].type == "cpu" else before[0])
        torch.set_default_dtype(before[1])


SURROUNDINGS = [
    pytest.param(lambda: default("meta"), id="set_default_device_meta"),
    pytest.param(lambda: torch.device("meta"), id="with_device_meta"),
    pytest.param(lambda: default("cuda"), id="set_default_device_cuda", marks=pytest.mark.gpu),
    pytest.param(lambda: default(dtype=torch.float64), id="float64"),
    pytest.param(lambda: default(dtype=torch.bfloat16), id="bfloat16"),
    pytest.param(torch.inference_mode, id="inference_mode"),
]


@pytest.fixture(params=SURROUNDINGS)
def surroundings(request):
    with request.param():
        yield


NAMES = [
    "gqa4", "zero_lengths", "softcap", "custom_u8", "packed", "very_negative", "page1_flat",
    "vllm_like_hnd", "custom_paged", "split",
]  # fmt: skip
CASES = {case.name: case for case in attention_cases.core()}


@pytest.mark.parametrize("name", NAMES)
def test_batch(surroundings, target, name):
    runner.check(build(CASES[name], device=target.device), backend=target.backend)


def test_single_and_outputs_of_our_own(surroundings, target):
    for mask in (MaskKind.CAUSAL, MaskKind.CUSTOM, MaskKind.PACKED):
        case = Case("single", (33,), (70,), 4, 2, 64, mask=mask)
        inputs = build(case, device=target.device)
        for _ in range(2):  # planned, then remembered
            runner.compare(inputs, *runner.single(inputs, backend=target.backend)).check()
    case = Case("own", (33, 5), (40, 90), 4, 2, 64, dtype=torch.float16)
    inputs, wrapper = planned(case, target)
    out, lse = wrapper.run(inputs.q, inputs.k, inputs.v, return_lse=True)
    assert (out.dtype, lse.dtype) == (torch.float16, torch.float32)
    runner.compare(inputs, out, lse).check()


@pytest.mark.parametrize("page_size", [0, 16])
def test_cudnn(surroundings, page_size):
    inputs = build(cudnn_calls.make_case("empty", page_size=page_size), device="cpu")
    out, lse = cudnn_calls.call(**cudnn_calls.arguments(inputs))
    assert lse.dtype == torch.float32
    cudnn_calls.check(inputs, out, cudnn_calls.rows_of(inputs.case, lse))


def test_self_test(surroundings):
    assert main(["check", "--quick", "--backend", "cpu"]) == 0


@pytest.mark.parametrize("bitorder", ["big", "little"])
def test_packbits(surroundings, target, bitorder):
    lengths = [3, 0, 8, 131, 1]
    draw = torch.rand(sum(lengths), generator=torch.Generator().manual_seed(0), **HOST)
    bits = draw < 0.5
    packed = preflash.packbits(target.to(bits), bitorder)
    assert packed.tolist() == numpy.packbits(bits.numpy(), bitorder=bitorder).tolist()
    begins = torch.from_numpy(numpy.cumsum([0, *lengths]).astype(numpy.int32))
    packed, new_indptr = preflash.segment_packbits(target.to(bits), begins, bitorder)
    expected = [numpy.packbits(part.numpy(), bitorder=bitorder) for part in bits.split(lengths)]
    assert packed.tolist() == numpy.concatenate(expected).tolist()
    assert new_indptr.tolist() == [0, 1, 1, 2, 19, 20]


def test_merges(surroundings, target):
    generator = torch.Generator().manual_seed(0)
    v = target.to(torch.randn(9, 3, 2, 64, generator=generator, **HOST))
    s = target.to(torch.randn(9, 3, 2, generator=generator, **HOST))
    s[0] = -math.inf
    pair = (v[:, 0], s[:, 0], v[:, 1], s[:, 1])
    merged, own = preflash.merge_state(*pair), [x.contiguous() for x in pair[:2]]
    preflash.merge_state_in_place(*own, *pair[2:])
    assert all(map(torch.equal, own, merged))
    several = preflash.merge_states(v, s)
    for got, expected in (
        (merged, oracle.merge(v[:, :2], s[:, :2])),
        (several, oracle.merge(v, s)),
    ):
        for one, wanted in zip(got, expected, strict=True):
            assert one.dtype == torch.float32
            assert torch.equal(one.isinf(), wanted.isinf())
            error = (one.double() - wanted).abs()[wanted.isfinite()]
            assert float(error.max()) <= 1e-5


@pytest.mark.parametrize("page_size", [0, 16])
def test_benchmark_inputs(surroundings, page_size):
    form = KvForm.COMBINED if page_size else KvForm.SEPARATE
    case = Case("bench", (33, 5), (40, 90), 4, 2, 64, page_size=page_size, form=form)
    inputs = next(batches(case, torch.device("cpu")))
    out, lse = runner.run(runner.planned(inputs, backend="cpu"), inputs)
    sample = Sample(case.qo_lens, 4)
    expected = sample.expected(inputs)
    runner.compare(inputs, sample.of(out), sample.of(lse), expected).check()
