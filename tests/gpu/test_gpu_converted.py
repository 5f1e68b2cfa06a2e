"""Kernels that rotate and widen on load, where nothing is copied: by the policy, for want of
room, and in CUDA graphs."""

import dataclasses

import prepass_policy
import pytest
import torch
import wrapper_options
from backends import backends_and_cases, captured, on_every_backend
from converted_cases import CASES, E4M3, E5M2, OPTIONS, ROPE, WHAT, large_prefill
from preflash.testing import Case, MaskKind, build, runner

pytestmark = pytest.mark.gpu


def planned(case: Case, backend: str, size: int = 32 << 20, policy: str = "never", **options):
    """A wrapper without copies whose workspace is full of NaN."""
    inputs = build(case, device="cuda")
    buffer = runner.workspace("cuda", size).fill_(0xFF)
    wrapper = runner.make_wrapper(case, backend=backend, device="cuda", buffer=buffer, **options)
    with prepass_policy.forced(policy):
        runner.plan(wrapper, inputs)
    assert "prepass+" not in wrapper.variant
    return wrapper, inputs


@pytest.mark.parametrize(("backend", "case"), backends_and_cases(CASES))
def test_numbers(backend, case):
    wrapper, inputs = planned(case, backend, 256 << 20)  # a fixed split is kept whatever it takes
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()


@on_every_backend
@pytest.mark.parametrize("page_size", [0, 5, 8, 24, 64, 256])
@pytest.mark.parametrize("head_dim", [128, 80, 64, 48])
@pytest.mark.parametrize("option", ["causal", "window", "custom", "alibi_custom", "fixed_split"])
def test_8_bits_in_pages_of_every_size(backend, option, head_dim, page_size):
    """fa3 loads by TMA if pages are multiples of 8 rows. Garbage follows every request."""
    options = {"mask": MaskKind.CAUSAL} | OPTIONS[option]
    kv_dtype = E4M3 if page_size % 3 else E5M2
    lengths = (190, 0, 77, 3, 1), (470, 9, 77, 0, 1031)
    case = Case("pages", *lengths, 6, 2, head_dim, dtype=torch.bfloat16, kv_dtype=kv_dtype,
                page_size=page_size, **options)  # fmt: skip
    wrapper, inputs = planned(case, backend, 256 << 20)
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()


@on_every_backend
@pytest.mark.parametrize("mask", [MaskKind.CAUSAL, MaskKind.CUSTOM], ids=lambda mask: mask.value)
@pytest.mark.parametrize("head_dim", [512, 128])
@pytest.mark.parametrize("what", WHAT.values(), ids=WHAT)
def test_a_workspace_without_room_for_copies(backend, what, head_dim, mask):
    """Kernels convert even if copies pay or are requested. Products of 8 bits need no copies."""
    case = large_prefill(head_dim, mask=mask, **what)
    plain = head_dim == 128 and mask is MaskKind.CAUSAL and "position" not in what
    native = backend == "fa3" and plain and case.dtype == E4M3
    for policy in ("auto", "always"):
        wrapper, inputs = planned(case, backend, 1 << 20, policy)
        assert wrapper.variant.endswith("e4m3_d128" if native else "_converted")
        runner.compare(inputs, *runner.run(wrapper, inputs)).check()


@on_every_backend
@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize(
    ("head_dim", "mask"),
    [(512, MaskKind.CAUSAL), (512, MaskKind.CUSTOM), (128, MaskKind.CUSTOM), (64, MaskKind.CUSTOM)],
)
@pytest.mark.parametrize("what", WHAT.values(), ids=WHAT)
def test_captured_runs(backend, what, head_dim, mask, page_size):
    case = Case("graph", (190, 0, 77, 3), (470, 9, 77, 0), 4, 2, head_dim, mask=mask,
                page_size=page_size, **what)  # fmt: skip
    inputs = build(case, device="cuda")
    options = wrapper_options.graph_options(inputs)
    wrapper, _ = planned(case, backend, policy="always", **options)
    out, lse = runner.run(wrapper, inputs)
    runner.compare(inputs, out, lse).check()
    again, lse_again = torch.full_like(out, float("nan")), torch.full_like(lse, float("nan"))
    q = torch.zeros_like(inputs.q)
    still = dataclasses.replace(inputs, q=q)
    graph, _ = captured(lambda: runner.run(wrapper, still, out=again, lse=lse_again))
    q.copy_(inputs.q)
    runner.plan(wrapper, inputs)
    graph.replay()
    rows = sum(case.qo_lens)
    for got, expected in ((again, out), (lse_again, lse)):
        assert torch.equal(got[:rows].view(torch.uint8), expected[:rows].view(torch.uint8))


@on_every_backend
def test_a_cache_whose_copies_exceed_128_megabytes(backend):
    case = Case("long", (1,), (1 << 18,), 4, 1, 512, page_size=64, kv_dtype=E4M3, **ROPE)
    wrapper, inputs = planned(case, backend, 128 << 20, "auto")
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()


@on_every_backend
@pytest.mark.parametrize("head_dim", [512, 320])
def test_runs_repeat_their_bits(backend, head_dim):
    case = large_prefill(head_dim, kv_dtype=E4M3, num_kv_heads=2, **ROPE)
    wrapper, inputs = planned(case, backend)
    first, _ = runner.run(wrapper, inputs)
    second, _ = runner.run(wrapper, inputs)
    rows = sum(case.qo_lens)
    assert torch.equal(first[:rows], second[:rows])
