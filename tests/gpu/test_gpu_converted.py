"""RoPE and 8-bit operands: kernels rotate and dequantise on load, or a pre-pass makes copies."""

import dataclasses
import itertools
from collections.abc import Iterator

import prepass_policy
import pytest
import torch
import wrapper_options
from backends import captured, check_run, check_runs, on_cases, replay, same_bits, sleep
from converted_cases import CASES, E4M3, E5M2, OPTIONS, ROPE, WHAT, large_prefill
from fuzz.random_cases import random_prepass_cases
from preflash.testing import Case, MaskKind, build, runner
from preflash.testing.case import DTYPE_NAMES

CUSTOM = {"mask": MaskKind.CUSTOM}
LENS = (190, 0, 77, 3), (470, 9, 77, 0)
BASE = Case("prepass", *LENS, 4, 2, 128, mask=MaskKind.CAUSAL)
KV_WHAT = {name: WHAT[name] for name in ("rope", "e4m3", "e5m2", "rope_e4m3")}
on_every_what = pytest.mark.parametrize("what", WHAT.values(), ids=WHAT)


def is_copied(wrapper) -> bool:
    return wrapper.variant.startswith("prepass+")


def planned(policy: str, case: Case, backend: str, size: int, **options):
    """Plans with a policy of the pre-pass and a workspace of NaN; options: of the constructor."""
    inputs = build(case, device="cuda")
    buffer = runner.workspace("cuda", size).fill_(0xFF)
    wrapper = runner.make_wrapper(case, backend=backend, device="cuda", buffer=buffer, **options)
    with prepass_policy.forced(policy):
        runner.plan(wrapper, inputs)
    return wrapper, inputs


def with_copies(case: Case, backend: str, size: int = 64 << 20):
    """Plans with copies; the variant names the kernel that computes on them."""
    wrapper, inputs = planned("always", case, backend, size)
    family = {"fa2": "sm80", "fa3": "sm90"}[backend]
    assert wrapper.variant.startswith(f"prepass+{family}_{DTYPE_NAMES[case.dtype_o]}_d")
    return wrapper, inputs


def pages_of_8_bits() -> Iterator[Case]:
    """Yields every page size: fa3 loads multiples of 8 rows by TMA; garbage follows requests."""
    options = ("causal", "window", "custom", "alibi_custom", "fixed_split")
    lengths = (190, 0, 77, 3, 1), (470, 9, 77, 0, 1031)
    for option, head_dim, page_size in itertools.product(
        options, (128, 80, 64, 48), (0, 5, 8, 24, 64, 256)
    ):
        how = {"mask": MaskKind.CAUSAL} | OPTIONS[option]
        how |= {"kv_dtype": E4M3 if page_size % 3 else E5M2, "page_size": page_size}
        yield Case("pages", *lengths, 6, 2, head_dim, **how)


LARGE = [large_prefill(dim, kv_dtype=E4M3, num_kv_heads=2, **ROPE) for dim in (512, 320)]


@on_cases([*CASES, *pages_of_8_bits(), *LARGE])
def test_conversion_on_load(backend, case):
    wrapper, inputs = planned("never", case, backend, 256 << 20)  # a fixed split needs its room
    assert not is_copied(wrapper)
    check_runs(wrapper, inputs, 2)


@pytest.mark.parametrize("sm_scale", [2.0**-22, -(2.0**-22)], ids=["positive", "negative"])
@pytest.mark.parametrize("qo_lens", [(1,) * 6, (190, 0, 77, 3, 9, 1)], ids=["decode", "prefill"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_queries_beyond_float16(backend, head_dim, qo_lens, sm_scale):
    """fa3 multiplies 8-bit keys in float16, and scales bfloat16 queries into its range."""
    how = {"kv_dtype": E4M3, "mask": MaskKind.CAUSAL, "sm_scale": sm_scale}
    case = Case("far", qo_lens, (470, 9, 77, 0, 700, 33), 8, 2, head_dim, **how)
    wrapper, inputs = planned("never", case, backend, 64 << 20)
    assert backend == "fa2" or ("_decode" in wrapper.variant) == (qo_lens[0] == 1)
    inputs.q[::4] *= 2.0**20
    rows = torch.arange(1, len(inputs.q), 2, device="cuda")
    inputs.q[rows, :, rows * 24 % head_dim] *= 2.0**22  # one dimension of a row
    check_run(wrapper, inputs)


def changes_of_copies() -> Iterator[dict]:
    # Slices and halves of 512 columns go by the masks of copies as of other tensors.
    for what, page_size in itertools.product(KV_WHAT.values(), (0, 3)):
        yield CUSTOM | {"head_dim": 512, "page_size": page_size, **what}
    # Factors of heads take the kernel that converts.
    yield {"kv_dtype": E4M3, "head_scales": True}
    # Signs of the scale that Q takes, other angles, and items that share rows of Q.
    yield ROPE | {"sm_scale": -0.1}
    yield ROPE | {"sm_scale": 0.0}
    yield ROPE | {"qo_lens": (150, 7), "kv_lens": (64, 3), "mask": MaskKind.NONE}
    yield ROPE | {"rope_scale": 4.0}
    yield ROPE | {"rope_theta": 5e5}
    yield ROPE | {"fixed_split_size": 128}
    yield ROPE | {"qo_lens": (1, 33, 600), "kv_lens": (3000, 2000, 5000)}
    half, bfloat = torch.float16, torch.bfloat16
    # Far positions: frequencies of float32 would be off by 2e-8 turns per position.
    one_head = {"num_qo_heads": 1, "num_kv_heads": 1, "head_dim": 8, "dtype": half, "sm_scale": 1.0}
    far = {"qo_lens": (20,), "kv_lens": (1_000_001,), "rope_scale": 0.1, "rope_theta": 3.0}
    yield ROPE | one_head | far | {"page_size": 16}
    # Copies of queries lie where their results will be, whatever the group.
    queries = ((128, bfloat), (80, half), (64, half), (40, bfloat))
    groups = ((4, 4), (6, 2), (8, 2), (8, 1), (130, 1))
    for (head_dim, dtype), (heads, kv_heads) in itertools.product(queries, groups):
        sizes = {"num_qo_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim}
        yield ROPE | sizes | {"dtype": dtype}
    # Copies of 8-bit queries have the dtype of the output.
    for o_dtype, head_dim in itertools.product((None, half, bfloat), (128, 512)):
        yield ROPE | CUSTOM | {"head_dim": head_dim, "dtype": E4M3, "o_dtype": o_dtype}


COPIED = [dataclasses.replace(BASE, **change) for change in changes_of_copies()]


@on_cases([*COPIED, *random_prepass_cases(160, seed=3)])
def test_copies(backend, case):
    wrapper, inputs = with_copies(case, backend, 512 << 20)
    with prepass_policy.forced("always"):  # copies, whose rounding the bounds know
        check_runs(wrapper, inputs, 2)


def cases_of_the_policy() -> Iterator[tuple[Case, tuple[str, ...]]]:
    """Yields cases, and the backends on which copies are faster for them and fit."""
    case = Case("long", (6000,), (7013,), 8, 8, 128, mask=MaskKind.CAUSAL, page_size=16)
    for what in KV_WHAT.values():
        yield dataclasses.replace(case, **what), ("fa2", "fa3")
    # A kernel that rotates 8 bits leaves float16 whatever it writes; copies would be bfloat16. fa3
    # multiplies 8 bits that are not rotated as they are.
    case = Case("long8", (3000,), (6133,), 8, 8, 128, dtype=E4M3, mask=MaskKind.CAUSAL)
    yield case, ("fa2",)
    yield dataclasses.replace(case, **ROPE), ()
    # The copies of this cache would exceed 128 MB.
    yield Case("cache", (1,), (1 << 18,), 4, 1, 512, page_size=64, kv_dtype=E4M3, **ROPE), ()


@pytest.mark.parametrize(
    ("case", "copying"), list(cases_of_the_policy()), ids=lambda part: getattr(part, "id", "")
)
def test_plan_copies_where_that_is_faster(backend, case, copying):
    wrapper, inputs = planned("auto", case, backend, 128 << 20)
    assert is_copied(wrapper) == (backend in copying)
    check_run(wrapper, inputs)


@pytest.mark.parametrize("mask", [MaskKind.CAUSAL, MaskKind.CUSTOM], ids=lambda mask: mask.value)
@pytest.mark.parametrize("head_dim", [512, 128])
@on_every_what
def test_a_workspace_without_room_for_copies(backend, what, head_dim, mask):
    """Kernels convert even if copies pay or are requested. Products of 8 bits need no copies."""
    case = large_prefill(head_dim, mask=mask, **what)
    plain = head_dim == 128 and mask is MaskKind.CAUSAL and "position" not in what
    native = backend == "fa3" and plain and case.dtype == E4M3
    for policy in ("auto", "always"):
        wrapper, inputs = planned(policy, case, backend, 1 << 20)
        assert wrapper.variant.endswith("e4m3_d128" if native else "_converted")
        assert not is_copied(wrapper)
        check_run(wrapper, inputs)


def test_queries_in_place(backend):
    wrapper, inputs = with_copies(dataclasses.replace(BASE, **ROPE), backend)
    out, _ = runner.run(wrapper, inputs)
    wrapper.run(inputs.q, inputs.k, inputs.v, out=inputs.q)
    assert torch.equal(inputs.q, out)


def check_replay(wrapper, inputs, *, plans_again: bool) -> None:
    """Captures a run over zeros and replays it with the queries."""
    expected = check_run(wrapper, inputs)
    still = dataclasses.replace(inputs, q=torch.zeros_like(inputs.q))
    graph, outputs = captured(lambda: runner.run(wrapper, still))
    still.q.copy_(inputs.q)
    if plans_again:
        runner.plan(wrapper, inputs)
    replay(graph)
    assert same_bits(outputs, expected)


@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize(
    ("head_dim", "mask"),
    [(512, MaskKind.CAUSAL), (512, MaskKind.CUSTOM), (128, MaskKind.CUSTOM), (64, MaskKind.CUSTOM)],
)
@on_every_what
def test_captured_conversion_on_load(backend, what, head_dim, mask, page_size):
    """A wrapper of graphs copies nothing, and its replays compute the next plan."""
    options = {"head_dim": head_dim, "mask": mask, "page_size": page_size, **what}
    case = dataclasses.replace(BASE, **options)
    buffers = wrapper_options.graph_options(build(case, device="cuda"))
    wrapper, inputs = planned("always", case, backend, 32 << 20, **buffers)
    assert not is_copied(wrapper)
    check_replay(wrapper, inputs, plans_again=True)


def test_captured_copies(backend):
    case = dataclasses.replace(BASE, kv_dtype=E4M3, page_size=16, **ROPE)
    check_replay(*with_copies(case, backend), plans_again=False)


def test_streams_follow_each_other(backend):
    """The copies of a run are read before the next run on the stream writes its own."""
    case = Case("stream", (700, 900), (3000, 900), 8, 8, 128, mask=MaskKind.CAUSAL, **ROPE)
    wrapper, inputs = with_copies(case, backend)
    batches = (inputs, build(case, device="cuda", seed=9)) * 2
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        sleep(5)
        results = [runner.run(wrapper, one) for one in batches]
        torch.cuda.current_stream().synchronize()
    for one, result in zip(batches, results, strict=True):
        runner.compare(one, *result).check()
