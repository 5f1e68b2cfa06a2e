"""Plans with a pre-pass compute the same as plans without: the CPU backend copies where a test
forces it, and binds launches to copies as every backend does."""

import dataclasses

import preflash
import prepass_policy
import pytest
import torch
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
    yield {"kv_dtype": E4M3, "head_scales": True}
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


@pytest.mark.parametrize("change", list(variations()))
def test_numbers(change):
    case = dataclasses.replace(BASE, **change)
    inputs = build(case)
    nan = runner.workspace().fill_(0xFF)
    wrapper = runner.make_wrapper(case, backend="cpu", buffer=nan)
    runner.plan(wrapper, inputs)
    assert is_copied(wrapper)
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()


def test_queries_in_place():
    """Q is rotated in the memory of its results, also if that is q itself."""
    case = dataclasses.replace(BASE, position=Position.ROPE)
    inputs = build(case)
    wrapper = runner.planned(inputs, backend="cpu")
    out, _ = runner.run(wrapper, inputs)
    q = inputs.q.clone()
    wrapper.run(q, inputs.k, inputs.v, out=q)
    assert torch.equal(q[: sum(case.qo_lens)], out[: sum(case.qo_lens)])


def test_copies_are_made_where_the_workspace_has_room():
    case = dataclasses.replace(BASE, kv_dtype=E4M3)
    inputs = build(case)
    positional, options = runner.plan_arguments(inputs)
    wrapper = runner.make_wrapper(case, backend="cpu")
    needed, _ = wrapper.workspace_size(*positional, **options)
    assert needed >= 2 * sum(case.kv_lens) * case.num_kv_heads * case.head_dim * 2
    for size, variant in ((needed - 128, "cpu_bf16_kve4m3"), (needed, "prepass+cpu_bf16_d512")):
        wrapper = runner.planned(inputs, backend="cpu", size=size)
        assert wrapper.variant.startswith(variant)
        assert wrapper.variant in repr(wrapper)
        runner.compare(inputs, *runner.run(wrapper, inputs)).check()


@pytest.mark.parametrize(
    "change",
    [
        {"kv_dtype": E4M3, "head_scales": True},  # factors of heads, which copies do not have
        {"kv_dtype": E4M3},
        {"position": Position.ROPE},
    ],
)
def test_single_requests(change):
    case = dataclasses.replace(BASE, qo_lens=(40,), kv_lens=(170,), **change)
    inputs = build(case)
    runner.compare(inputs, *runner.single(inputs, backend="cpu")).check()


def test_a_wrapper_of_cuda_graphs_copies_nothing():
    inputs = build(dataclasses.replace(BASE, kv_dtype=E4M3))
    buffers = {f"{name}_indptr_buf": torch.empty(5, dtype=torch.int32) for name in ("qo", "kv")}
    wrapper = preflash.BatchPrefillWithRaggedKVCacheWrapper(
        runner.workspace(), use_cuda_graph=True, backend="cpu", **buffers
    )
    runner.plan(wrapper, inputs)
    assert not is_copied(wrapper)
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()


def test_another_word_in_the_environment_is_refused():
    wrapper = runner.make_wrapper(BASE, backend="cpu")
    with prepass_policy.forced("sometimes"), pytest.raises(ValueError, match="PREFLASH_PREPASS"):
        runner.plan(wrapper, build(BASE))
