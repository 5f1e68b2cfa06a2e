"""Plans with a pre-pass on the CPU backend, which has one only where it is told to: what a plan
says of the copies, and how launches bind to them, is the same on every backend."""

import dataclasses

import preflash
import prepass_policy
import pytest
import torch
from fuzz.random_cases import random_prepass_cases
from preflash.testing import Case, KvForm, MaskKind, Sinks, build, runner
from preflash.testing.case import Position

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BASE = Case("prepass", (40, 0, 130, 3), (170, 9, 130, 0), 4, 2, 64, mask=MaskKind.CAUSAL)


def variations():
    rope = {"position": Position.ROPE}
    for what in (rope, {"kv_dtype": E4M3}, rope | {"kv_dtype": E5M2, "dtype": torch.float16}):
        for page_size in (0, 1, 3, 16):
            for layout in ("NHD", "HND"):
                yield {**what, "page_size": page_size, "layout": layout}
        for more in (
            {"soft_cap": 20.0},
            {"window_left": 33},
            {"mask": MaskKind.CUSTOM, "page_size": 3},
            {"mask": MaskKind.PACKED, "soft_cap": 10.0},
            {"head_dim": 192, "head_dim_vo": 128, "page_size": 16},
            {"head_dim": 512},
            {"sinks": Sinks.MIXED},
            {"form": KvForm.PADDED},
            {"form": KvForm.COMBINED, "page_size": 16},
            {"form": KvForm.HALVES},
            {"form": KvForm.TRANSPOSED, "page_size": 3},
            {"fixed_split_size": 64},
        ):
            yield {**what, **more}
    yield {"dtype": E4M3}
    yield {"dtype": E4M3, "o_dtype": torch.float16, "page_size": 3}
    yield {"dtype": E4M3, "o_dtype": torch.float16, "position": Position.ROPE}
    yield {"dtype": E4M3, "position": Position.ROPE, "mask": MaskKind.CUSTOM}
    yield {"dtype": E4M3, "position": Position.ROPE, "head_dim": 512, "page_size": 3}


@pytest.fixture(autouse=True)
def always_prepass():
    with prepass_policy.forced("always"):
        yield


def is_copied(wrapper) -> bool:
    return wrapper.variant.startswith("prepass+")


@pytest.mark.parametrize("change", list(variations()), ids=str)
def test_numbers(change):
    case = dataclasses.replace(BASE, **change)
    inputs = build(case)
    nan = runner.workspace().fill_(0xFF)
    wrapper = runner.make_wrapper(case, backend="cpu", buffer=nan)
    runner.plan(wrapper, inputs)
    assert is_copied(wrapper)
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()


@pytest.mark.parametrize("case", random_prepass_cases(40, seed=77), ids=lambda case: case.id)
def test_random_cases(case):
    inputs = build(case)
    wrapper = runner.planned(inputs, backend="cpu", size=1 << 28)
    assert is_copied(wrapper)
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()


@pytest.mark.parametrize("kv_dtype", [None, E4M3])
def test_single(kv_dtype):
    case = dataclasses.replace(BASE, qo_lens=(70,), kv_lens=(133,), position=Position.ROPE)
    case = dataclasses.replace(case, kv_dtype=kv_dtype)
    inputs = build(case)
    runner.compare(inputs, *runner.single(inputs, backend="cpu")).check()


def test_queries_in_place():
    """Q is rotated where its results go, also where they go into q itself."""
    case = dataclasses.replace(BASE, position=Position.ROPE)
    inputs = build(case)
    wrapper = runner.planned(inputs, backend="cpu")
    out, _ = runner.run(wrapper, inputs)
    q = inputs.q.clone()
    wrapper.run(q, inputs.k, inputs.v, out=q)
    assert torch.equal(q[: sum(case.qo_lens)], out[: sum(case.qo_lens)])


def test_the_workspace_is_large_enough_or_nothing_is_copied():
    case = dataclasses.replace(BASE, kv_dtype=E4M3)
    inputs = build(case)
    copies = 2 * sum(case.kv_lens) * case.num_kv_heads * case.head_dim * 2
    for size, copied in ((copies - 128, False), (32 << 20, True)):
        wrapper = runner.planned(inputs, backend="cpu", size=size)
        assert is_copied(wrapper) is copied
        assert wrapper.variant.startswith("prepass+cpu_bf16_d512" if copied else "cpu_bf16_kve4m3")
        assert wrapper.variant in repr(wrapper)
        runner.compare(inputs, *runner.run(wrapper, inputs)).check()


def test_workspace_size_counts_the_copies():
    case = dataclasses.replace(BASE, kv_dtype=E4M3)
    inputs = build(case)
    wrapper = runner.make_wrapper(case, backend="cpu")
    positional, options = runner.plan_arguments(inputs)
    needed, _ = wrapper.workspace_size(*positional, **options)
    assert needed >= 2 * sum(case.kv_lens) * case.num_kv_heads * case.head_dim * 2
    for size, copied in ((needed, True), (needed - 128, False)):
        wrapper = runner.planned(inputs, backend="cpu", size=size)
        assert is_copied(wrapper) is copied


def test_factors_of_heads_are_applied_without_copies():
    case = dataclasses.replace(BASE, kv_dtype=E4M3, head_scales=True)
    inputs = build(case)
    wrapper = runner.planned(inputs, backend="cpu")
    assert is_copied(wrapper)
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()
    single = build(dataclasses.replace(case, qo_lens=(40,), kv_lens=(170,)))
    runner.compare(single, *runner.single(single, backend="cpu")).check()


def test_a_wrapper_of_cuda_graphs_copies_nothing():
    case = dataclasses.replace(BASE, kv_dtype=E4M3)
    inputs = build(case)
    wrapper = preflash.BatchPrefillWithRaggedKVCacheWrapper(
        runner.workspace(), use_cuda_graph=True,
        qo_indptr_buf=torch.empty(5, dtype=torch.int32),
        kv_indptr_buf=torch.empty(5, dtype=torch.int32), backend="cpu",
    )  # fmt: skip
    runner.plan(wrapper, inputs)
    assert not is_copied(wrapper)
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()


def test_another_word_in_the_environment_is_refused():
    wrapper = runner.make_wrapper(BASE, backend="cpu")
    with prepass_policy.forced("sometimes"), pytest.raises(ValueError, match="PREFLASH_PREPASS"):
        runner.plan(wrapper, build(BASE))
