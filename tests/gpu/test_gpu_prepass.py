"""Plans with a pre-pass: RoPE and fp8 on copies that it makes before the kernel."""

import dataclasses
import itertools
import random

import prepass_policy
import pytest
import torch
from backends import backends_and_cases, captured, on_every_backend, planned
from fuzz.random_cases import random_prepass_cases
from preflash.testing import Case, KvForm, MaskKind, Sinks, build, runner
from preflash.testing.case import Position

pytestmark = pytest.mark.gpu

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BASE = Case("prepass", (190, 0, 77, 3), (470, 9, 77, 0), 4, 2, 128, mask=MaskKind.CAUSAL)
WHAT = {
    "rope": {"position": Position.ROPE},
    "e4m3": {"kv_dtype": E4M3},
    "e5m2": {"kv_dtype": E5M2},
    "rope_e4m3": {"position": Position.ROPE, "kv_dtype": E4M3},
}
MASKS = (
    {},
    {"mask": MaskKind.NONE},
    {"mask": MaskKind.CUSTOM},
    {"soft_cap": 20.0},
    {"soft_cap": 20.0, "mask": MaskKind.PACKED},
    {"window_left": 60},
    {"sinks": Sinks.MIXED},
)
HEAD_DIMS = ((64, None), (128, None), (192, 128), (256, None), (512, None), (80, None))


def options_of_prepass() -> list[dict]:
    """Samples the options, thousands in all, so that each value meets most of the others."""
    rng = random.Random(3)
    every = list(
        itertools.product(
            WHAT, MASKS, HEAD_DIMS, (0, 1, 3, 16), ("NHD", "HND"), (torch.float16, torch.bfloat16)
        )
    )
    options = []
    for what, mask, dims, page_size, layout, dtype in rng.sample(every, 120):
        forms = [KvForm.SEPARATE, KvForm.TRANSPOSED]
        if dims[1] is None and dims[0] % 16 == 0:
            forms += [KvForm.PADDED, *([KvForm.COMBINED] if page_size > 0 else [])]
        options.append(
            WHAT[what]
            | mask
            | {
                "head_dim": dims[0],
                "head_dim_vo": dims[1],
                "page_size": page_size,
                "layout": layout,
                "dtype": dtype,
                "form": rng.choice(forms),
            }
        )
    return options


def is_copied(wrapper) -> bool:
    return wrapper.variant.startswith("prepass+")


def with_prepass(case: Case, backend: str, size: int = 64 << 20):
    """A planned wrapper whose workspace is full of NaN."""
    inputs = build(case, device="cuda")
    buffer = runner.workspace("cuda", size).fill_(0xFF)
    wrapper = runner.make_wrapper(case, backend=backend, device="cuda", buffer=buffer)
    with prepass_policy.forced("always"):
        runner.plan(wrapper, inputs)
    assert is_copied(wrapper)
    return wrapper, inputs


def copied_cases():
    for change in options_of_prepass():
        yield dataclasses.replace(BASE, **change)
    # Slices and halves of 512 columns go by the masks of copies as of other tensors.
    for what, page_size in itertools.product(WHAT.values(), (0, 3)):
        wide = {"head_dim": 512, "mask": MaskKind.CUSTOM, "page_size": page_size}
        yield dataclasses.replace(BASE, **wide, **what)
    # Signs of the scale that Q takes, other angles, and items that share rows of Q.
    for change in (
        {"sm_scale": -0.1},
        {"sm_scale": 0.0},
        {"rope_scale": 4.0},
        {"rope_theta": 5e5},
        {"fixed_split_size": 128},
        {"qo_lens": (1, 33, 600), "kv_lens": (3000, 2000, 5000)},
    ):
        yield dataclasses.replace(BASE, position=Position.ROPE, **change)
    # Factors of heads take the kernel that converts.
    yield dataclasses.replace(BASE, kv_dtype=E4M3, head_scales=True)


@pytest.mark.parametrize(("backend", "case"), backends_and_cases(copied_cases()))
def test_numbers(backend, case):
    wrapper, inputs = with_prepass(case, backend)
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()


@on_every_backend
@pytest.mark.parametrize("case", random_prepass_cases(60, seed=3), ids=lambda case: case.id)
def test_random_cases(backend, case):
    """Strides, offsets, lengths and garbage of every kind."""
    wrapper, inputs = with_prepass(case, backend, 512 << 20)
    with prepass_policy.forced("always"):  # copies, whose rounding the bounds are told
        runner.compare(inputs, *runner.run(wrapper, inputs)).check()


@on_every_backend
@pytest.mark.parametrize("what", WHAT.values(), ids=WHAT)
def test_long_prefill_has_a_prepass_without_being_told(backend, what):
    case = Case("long", (6000,), (7013,), 8, 8, 128, mask=MaskKind.CAUSAL, page_size=16, **what)
    wrapper, inputs = planned(case, backend, size=128 << 20)
    assert is_copied(wrapper)
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()


@on_every_backend
@pytest.mark.parametrize("o_dtype", [None, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [128, 512])
def test_masks_under_rotated_queries_of_8_bits(backend, head_dim, o_dtype):
    """Copies have the dtype of the output."""
    case = dataclasses.replace(BASE, dtype=E4M3, o_dtype=o_dtype, position=Position.ROPE,
                               head_dim=head_dim, mask=MaskKind.CUSTOM)  # fmt: skip
    wrapper, inputs = with_prepass(case, backend)
    with prepass_policy.forced("always"):
        runner.compare(inputs, *runner.run(wrapper, inputs)).check()


@on_every_backend
@pytest.mark.parametrize("position", [Position.NONE, Position.ROPE], ids=str)
def test_long_prefill_of_rotated_8_bits_keeps_the_bits_of_float16(backend, position):
    """A kernel that rotates them leaves float16 whatever it writes; copies would be bfloat16. fa3
    multiplies 8 bits that are not rotated as they are."""
    case = Case("long", (3000,), (6133,), 8, 8, 128, dtype=E4M3, position=position,
                mask=MaskKind.CAUSAL)  # fmt: skip
    wrapper, inputs = planned(case, backend, size=128 << 20)
    copied = backend == "fa2" and position is Position.NONE
    assert is_copied(wrapper) == copied
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()


@on_every_backend
def test_positions_beyond_2_17(backend):
    case = dataclasses.replace(BASE, qo_lens=(200,), kv_lens=(140001,), position=Position.ROPE,
                               num_qo_heads=1, num_kv_heads=1, page_size=16)  # fmt: skip
    wrapper, inputs = with_prepass(case, backend, 256 << 20)
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()


@on_every_backend
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (8, 2), (8, 1), (130, 1)], ids=str)
@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [(128, torch.bfloat16), (80, torch.float16), (64, torch.float16), (40, torch.bfloat16)],
)
def test_queries_of_groups(backend, heads, head_dim, dtype):
    """Copies of queries lie where their results will be."""
    case = dataclasses.replace(BASE, num_qo_heads=heads[0], num_kv_heads=heads[1], dtype=dtype,
                               head_dim=head_dim, position=Position.ROPE)  # fmt: skip
    wrapper, inputs = with_prepass(case, backend)
    out, lse = runner.run(wrapper, inputs)
    runner.compare(inputs, out, lse).check()
    again, _ = runner.run(wrapper, inputs)
    rows = sum(case.qo_lens)
    assert torch.equal(out[:rows], again[:rows])


@on_every_backend
@pytest.mark.parametrize("heads", [(32, 8), (32, 32)], ids=str)
def test_many_rotated_queries(backend, heads):
    """plan() finds that copies pay, and they have the bits of copies that were asked for."""
    case = Case("many", (2100,), (2100,), *heads, 128, position=Position.ROPE,
                mask=MaskKind.CAUSAL)  # fmt: skip
    wrapper, inputs = planned(case, backend, size=64 << 20)
    assert is_copied(wrapper)
    out, lse = runner.run(wrapper, inputs)
    runner.compare(inputs, out, lse).check()
    told, _ = with_prepass(case, backend)
    assert torch.equal(runner.run(told, inputs)[0], out)


@on_every_backend
@pytest.mark.parametrize("what", WHAT.values(), ids=WHAT)
def test_single(backend, what):
    case = dataclasses.replace(BASE, qo_lens=(190,), kv_lens=(470,), **what)
    inputs = build(case, device="cuda")
    with prepass_policy.forced("always"):
        runner.compare(inputs, *runner.single(inputs, backend=backend)).check()
    wide = dataclasses.replace(case, head_dim=512, mask=MaskKind.CUSTOM)
    inputs = build(wide, device="cuda")
    runner.compare(inputs, *runner.single(inputs, backend=backend)).check()  # without copies


@on_every_backend
def test_queries_in_place(backend):
    case = dataclasses.replace(BASE, position=Position.ROPE)
    wrapper, inputs = with_prepass(case, backend)
    out, _ = runner.run(wrapper, inputs)
    q = inputs.q.clone()
    wrapper.run(q, inputs.k, inputs.v, out=q)
    rows = sum(case.qo_lens)
    assert torch.equal(q[:rows], out[:rows])


@on_every_backend
def test_runs_captured_into_a_graph(backend):
    case = dataclasses.replace(BASE, position=Position.ROPE, kv_dtype=E4M3, page_size=16)
    wrapper, inputs = with_prepass(case, backend)
    expected, _ = runner.run(wrapper, inputs)
    q, out = torch.zeros_like(inputs.q), torch.empty_like(expected)
    graph, _ = captured(lambda: wrapper.run(q, inputs.cache, out=out))
    q.copy_(inputs.q)
    graph.replay()
    rows = sum(case.qo_lens)
    assert torch.equal(out[:rows], expected[:rows])


@on_every_backend
def test_streams_follow_each_other(backend):
    """The copies of a run are read before the next run on the stream writes its own."""
    case = Case("stream", (700, 900), (3000, 900), 8, 8, 128, position=Position.ROPE,
                mask=MaskKind.CAUSAL)  # fmt: skip
    wrapper, inputs = with_prepass(case, backend)
    other = build(case, device="cuda", seed=9)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(10_000_000)
        results = [runner.run(wrapper, one) for one in (inputs, other, inputs, other)]
        torch.cuda.current_stream().synchronize()
    for one, (out, lse) in zip((inputs, other, inputs, other), results, strict=True):
        runner.compare(one, out, lse).check()


@on_every_backend
def test_the_name_of_a_plan_tells_of_its_copies(backend):
    """The variant names the kernel that computes on copies, or the one that works without them."""
    case = dataclasses.replace(BASE, head_dim=512, kv_dtype=E4M3)
    wrapper, inputs = with_prepass(case, backend)
    family = {"fa2": "sm80", "fa3": "sm90"}[backend]
    assert wrapper.variant == f"prepass+{family}_bf16_d512"
    assert wrapper.variant in repr(wrapper)
    small = runner.workspace("cuda", 1 << 20)
    wrapper = runner.make_wrapper(case, backend=backend, device="cuda", buffer=small)
    with prepass_policy.forced("always"):
        runner.plan(wrapper, inputs)
    assert wrapper.variant.startswith(f"{family}_bf16_d512" if backend == "fa2" else family)
    assert wrapper.variant.endswith("_converted")
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()
