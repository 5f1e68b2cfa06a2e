"""Plans with a pre-pass compute the same as plans without: tests force copies on the CPU. The
fuzzer has them under every option."""

import dataclasses

import prepass_policy
import pytest
import torch
import wrapper_options
from preflash.testing import Case, MaskKind, build, runner
from preflash.testing.case import Position

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ROPE, FP8 = {"position": Position.ROPE}, {"kv_dtype": E4M3}
BASE = Case("prepass", (40, 0, 130, 3), (170, 9, 130, 0), 4, 2, 64, mask=MaskKind.CAUSAL)
KV_8_BITS = (ROPE, FP8, ROPE | {"kv_dtype": E5M2, "dtype": torch.float16})
Q_8_BITS = (
    {},
    {"o_dtype": torch.float16, "page_size": 3},
    {"o_dtype": torch.float16, **ROPE},
    {"mask": MaskKind.CUSTOM, **ROPE},
    {"head_dim": 512, "page_size": 3, **ROPE},
)
# Factors of heads, which copies do not have.
FACTORS = FP8 | {"head_scales": True}
CHANGES = [*KV_8_BITS, *({"dtype": E4M3} | more for more in Q_8_BITS), FACTORS]


@pytest.fixture(autouse=True)
def always_prepass():
    with prepass_policy.forced("always"):
        yield


def changed(**change):
    """Returns the inputs of the base case with these changes."""
    return build(dataclasses.replace(BASE, **change))


def check(change: dict, *, copies: bool, **options) -> None:
    """Compares a run in a workspace of NaN with the oracle; options: of the constructor."""
    inputs = changed(**change)
    options.setdefault("buffer", runner.workspace().fill_(0xFF))
    wrapper = runner.make_wrapper(inputs.case, backend="cpu", **options)
    runner.plan(wrapper, inputs)
    assert wrapper.variant.startswith("prepass+") == copies
    assert wrapper.variant in repr(wrapper)
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()


def needed(inputs) -> int:
    """Returns the bytes of float workspace that the plan takes at most."""
    positional, options = runner.plan_arguments(inputs)
    wrapper = runner.make_wrapper(inputs.case, backend="cpu")
    return wrapper.workspace_size(*positional, **options)[0]


@pytest.mark.parametrize("change", CHANGES)
def test_numbers(change):
    check(change, copies=True)


def test_queries_in_place():
    """Q is rotated in the memory of its results, also if that is q itself."""
    inputs = changed(**ROPE)
    wrapper = runner.planned(inputs, backend="cpu")
    out, _ = runner.run(wrapper, inputs)
    q = inputs.q.clone()
    wrapper.run(q, inputs.k, inputs.v, out=q)
    rows = sum(BASE.qo_lens)
    assert torch.equal(q[:rows], out[:rows])


def test_copies_are_made_where_the_workspace_has_room():
    size = needed(changed(**FP8))
    assert size >= 2 * sum(BASE.kv_lens) * BASE.num_kv_heads * BASE.head_dim * 2
    check(FP8, copies=True, buffer=runner.workspace("cpu", size))
    check(FP8, copies=False, buffer=runner.workspace("cpu", size - 128))


def test_partial_results_and_copies_share_the_workspace():
    change = FP8 | {"fixed_split_size": 64}
    size = needed(changed(**change))
    for less in (0, 16):  # then two launches share it
        check(change, copies=True, buffer=runner.workspace("cpu", size - less))
    one = {"qo_lens": (5,), "kv_lens": (65,), "num_qo_heads": 7, "num_kv_heads": 1}
    copies, size = needed(changed(**FP8, **one)), needed(changed(**change, **one))
    with pytest.raises(ValueError, match=f"has {copies} bytes; .* needs {size} .* beside copies"):
        check(change | one, copies=True, buffer=runner.workspace("cpu", copies))


def test_a_wrapper_of_cuda_graphs_copies_nothing():
    check(FP8, copies=False, **wrapper_options.graph_options(changed(**FP8)))


@pytest.mark.parametrize("changes", [(FP8, FACTORS), (ROPE,)], ids=["fp8", "rope"])
def test_single_requests(changes):
    """A call with factors of heads does not find the plan of an equal call without."""
    for change in changes:
        inputs = changed(qo_lens=(40,), kv_lens=(170,), **change)
        runner.compare(inputs, *runner.single(inputs, backend="cpu")).check()


def test_another_word_in_the_environment_is_refused():
    wrapper = runner.make_wrapper(BASE, backend="cpu")
    with prepass_policy.forced("sometimes"), pytest.raises(ValueError, match="PREFLASH_PREPASS"):
        runner.plan(wrapper, build(BASE))
