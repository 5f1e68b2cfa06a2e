"""plan() again, which C++ does by itself (test_call_times.py), makes the plan of a new wrapper."""

import copy
import dataclasses
import gc
import itertools
import random
import weakref

import pytest
import torch
from changed_tensors import freed, meta, negative, short_view, strided
from fuzz.pod_trial import plan_decode
from planned_cases import bounds_of, check_run, planned, table, tensors, unplanned
from preflash.decode import BatchDecodeWithPagedKVCacheWrapper, fast_decode_plan
from preflash.testing import Case, MaskKind, build, runner
from refusals import refused
from wrapper_options import block_table

PAGED = Case("paged", (3, 0, 9), (40, 0, 64), 4, 2, 64, page_size=16, mask=MaskKind.CAUSAL)
RAGGED = dataclasses.replace(PAGED, name="ragged", page_size=0)
DECODE = Case("decode", (1, 1, 1), (40, 7, 64), 4, 2, 64, page_size=16)
SMALL = (4, 2, 64, 16)  # heads, head_dim and page size
on_the_cpu = pytest.mark.parametrize("target", ["cpu"], indirect=True)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def with_lengths(case, qo_lens, kv_lens, target, seed=0, where="cpu"):
    case = dataclasses.replace(case, qo_lens=qo_lens, kv_lens=kv_lens)
    return build(case, seed=seed, device=target.device, index_device=where)


def new_wrapper(target, case):
    return runner.make_wrapper(case, backend=target.backend, device=target.device)


def decode_wrapper(*buffers):
    for_graphs = ("NHD", True, False, *buffers) if buffers else ()
    return BatchDecodeWithPagedKVCacheWrapper(runner.workspace(), *for_graphs)


def of_decode(kv_lens, seed=0, **changes):
    changes = {"qo_lens": (1,) * len(kv_lens), **changes}
    return build(dataclasses.replace(DECODE, kv_lens=kv_lens, **changes), seed=seed)


OPTIONS = (
    {}, {}, {"window_left": 5}, {"sm_scale": 0.3}, {"logits_soft_cap": 8.0}, {"causal": False},
    {"disable_split_kv": True}, {"fixed_split_size": 16}, {"pos_encoding_mode": "ALIBI"},
    *({"pos_encoding_mode": "ROPE_LLAMA", **rope}
      for rope in ({}, {"rope_scale": 8.0}, {"rope_scale": 8.0, "rope_theta": 5e5})),
)  # fmt: skip
RUNS = [("run", {}), ("run", {"window_left": 9}), ("run", {"k_scale": 0.5}),
        *(("forward", {"causal": causal, "sm_scale": scale})
          for causal in (False, True) for scale in (None, 0.2)),
        ("forward", {"causal": True, "pos_encoding_mode": "ALIBI"})]  # fmt: skip


@pytest.mark.parametrize("case", [PAGED, RAGGED], ids=lambda case: case.name)
@pytest.mark.parametrize("seed", range(4))
def test_any_sequence_of_calls(seed, case, target):
    """Plans, runs, windows and forward() in any order: the results of a new wrapper each time."""
    rng = random.Random(seed)
    wrapper = new_wrapper(target, case)
    for step in range(25):
        if step % 5 == 0:
            options, where = rng.choice(OPTIONS), rng.choice(["cpu", target.device])
            way = rng.choice(["plan", "begin_forward"])
            as_table, bounded = (case.paged and rng.random() < 0.5 for _ in range(2))
            bounded = bounded and "fixed_split_size" not in options  # windows of run() are refused
        count = rng.choice([1, 2, 3, 4, 5, 70] if as_table else [0, 1, 2, 3, 4, 5, 70])
        qo_lens = tuple(rng.randint(0, 6) for _ in range(count))
        kv_lens = tuple(qo_len + rng.randint(0, 90) for qo_len in qo_lens)
        inputs = with_lengths(case, qo_lens, kv_lens, target, step, where)
        given, more = dataclasses.replace(inputs), {}
        if as_table:
            wide = torch.nn.functional.pad(block_table(inputs), (0, 3), value=-5)
            given.indices = wide.to(target.device)[:, :-3]  # of strided rows
        if bounded:  # runs read the lengths of the last plan()
            given.last_page_len = torch.full_like(inputs.last_page_len, case.page_size)
            more = bounds_of(inputs)
        positional, known = runner.plan_arguments(given)
        other = new_wrapper(target, case)
        for one in (wrapper, other):
            getattr(one, way)(*positional, **{**known, **options, **more})
        # On a GPU a repeated plan() may be for the kernel of the last forward().
        variant = str(wrapper.variant)
        assert repr(other) == repr(wrapper).replace(variant, str(other.variant))
        for call, of_run in rng.choices(RUNS, k=2):
            got, expected = (
                getattr(one, call)(*tensors(inputs), **of_run) for one in (wrapper, other)
            )
            assert torch.equal(got, expected), (step, way, options, call, of_run)
        if not options and count:
            check_run(inputs, wrapper)


def test_options_of_forward_are_read_in_every_call(target):
    """Equal numbers of another type are checked, other numbers count, tensors are read again."""
    inputs, wrapper = planned(PAGED, target)
    q_and_cache, scale = tensors(inputs), torch.tensor(0.3)
    for changed in (0.3, 0.3, 0.5, scale, scale):
        out, lse = wrapper.forward_return_lse(*q_and_cache, causal=True, sm_scale=changed)
        case = dataclasses.replace(PAGED, sm_scale=float(changed))
        runner.compare(dataclasses.replace(inputs, case=case), out, lse).check()
        scale.add_(0.1)
    says = "causal must be True or False"
    refused(says, wrapper.forward, *q_and_cache, error=TypeError, causal=1.0, sm_scale=0.5)
    plus, minus = (wrapper.forward(*q_and_cache, v_scale=zero) for zero in (0.0, -0.0))
    assert not bool((plus.signbit() & minus.signbit()).any())  # 0.0 is not -0.0
    runner.plan(wrapper, inputs, window_left=3)  # which forward() does not take over
    by_position = wrapper.forward(*q_and_cache, True, sm_scale=0.5)
    assert torch.equal(wrapper.forward(*q_and_cache, causal=True, sm_scale=0.5), by_position)


UNUSUAL = {
    "list": torch.Tensor.tolist,
    "none": lambda value: None,
    "int64": torch.Tensor.long,
    "float": torch.Tensor.float,
    "two dimensions": lambda value: value[None],
    "strided": strided,
    "subclass": lambda value: torch.nn.Parameter(value, requires_grad=False),
    "meta": meta,
    "sparse": torch.Tensor.to_sparse,
    "negative view": negative,
    "freed": freed,
    "short of storage from an offset": short_view,
    "shorter": lambda value: value[:-1],
    "part of a larger one": lambda value: torch.cat([value[:1], value, value[:1]])[1:-1],
    "negative": lambda value: -value,
    "falling": lambda value: value.flip(0),
    "larger": lambda value: value + 20,
}
ARRAYS = ("qo_indptr", "kv_indptr", "indices", "last_page_len")
OF_LENGTHS = {"falling": "kv_indptr", "larger": "last_page_len"}
CHANGED = [
    pytest.param(name, change, {}, id=f"{kind} {name}")
    for name, (kind, change) in itertools.product(ARRAYS, UNUSUAL.items())
    if OF_LENGTHS.get(kind, name) == name
]
LENS = ints(*PAGED.kv_lens)
# Options of plan(); a function makes seq_lens of those of the plan before.
WRONG_OPTIONS = {
    "flag": {"causal": 1.0},
    "integer": {"causal": 1},
    "length": {"seq_lens": lambda lens: ints(40, 1, 64)},
    "length in place": {"seq_lens": lambda lens: lens.copy_(ints(40, 1, 64))},
    "lengths": {"seq_lens": lambda lens: ints(40, 0), "lengths_are_upper_bounds": True},
}


def same(value):
    return value


CHANGED += [pytest.param("indices", same, *row, id=name) for name, *row in WRONG_OPTIONS.items()]


def end_of(target, array, change, options, *, repeated: bool):
    inputs, wrapper = unplanned(PAGED, target)
    lens, before = LENS.clone(), None
    for _ in range(2 * repeated):
        runner.plan(wrapper, inputs, seq_lens=lens)
        before = runner.run(wrapper, inputs), repr(wrapper)
    given = dataclasses.replace(inputs, **{array: change(getattr(inputs, array))})
    options = {**options, "seq_lens": options.get("seq_lens", same)(lens)}
    try:
        runner.plan(wrapper, given, **options)
    except (TypeError, ValueError) as error:
        if before:  # is the plan as yet
            assert all(map(torch.equal, runner.run(wrapper, inputs), before[0]))
            assert repr(wrapper) == before[1]
            runner.plan(wrapper, inputs, seq_lens=LENS)
        return type(error), str(error)
    return [x.tolist() for x in runner.run(wrapper, inputs)]


@on_the_cpu
@pytest.mark.parametrize(("array", "change", "options"), CHANGED)
def test_unusual_arguments(target, array, change, options):
    """Served or refused as in a first plan(); a refused one changes nothing."""
    ends = [end_of(target, array, change, options, repeated=n) for n in (False, True)]
    assert ends[0] == ends[1]
    if options:
        assert next(iter(options)) in ends[0][1]


@pytest.mark.parametrize("hint", ["max_token_per_sequence", "max_sequence_kv", "uniform_q_len"])
def test_hints_of_repeated_plans(target, hint):
    value, wrapper = 64 if hint == "max_sequence_kv" else 3, new_wrapper(target, PAGED)
    same, longer = (with_lengths(PAGED, (n,) * 3, (n + 61,) * 3, target) for n in (3, 4))
    for _ in range(2):
        runner.plan(wrapper, same, **{hint: value})
    refused(f"{hint}={value}", runner.plan, wrapper, longer, **{hint: value})


@pytest.mark.parametrize("kind", [MaskKind.CUSTOM, MaskKind.PACKED], ids=lambda kind: kind.name)
def test_a_mask_that_changes_in_place(target, kind):
    """Each plan() reads the mask anew, and runs do not read it again."""
    inputs, wrapper = planned(dataclasses.replace(PAGED, mask=kind), target)
    mask = inputs.custom_mask if kind is MaskKind.CUSTOM else inputs.packed_custom_mask
    for _ in range(3):
        mask.bitwise_not_()
        inputs.masks = [~mask for mask in inputs.masks]
        runner.plan(wrapper, inputs)
        mask.bitwise_not_()
        check_run(inputs, wrapper)
        mask.bitwise_not_()


def test_debugging_from_the_second_plan_on(monkeypatch):
    wrapper, inputs = decode_wrapper(), of_decode(PAGED.kv_lens)
    plan_decode(wrapper, inputs, **bounds_of(inputs))
    monkeypatch.setenv("PREFLASH_DEBUG", "1")
    bounds = bounds_of(inputs) | {"seq_lens": ints(99, 0, 64)}
    refused(r"seq_lens\[0\] = 99", plan_decode, wrapper, inputs, **bounds)


@on_the_cpu
def test_an_interrupt_of_a_mode_is_not_lost(target):
    class Interrupting(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            raise KeyboardInterrupt

    inputs, wrapper = planned(PAGED, target)
    with pytest.raises(KeyboardInterrupt), Interrupting():
        runner.plan(wrapper, inputs)


@on_the_cpu
@pytest.mark.parametrize("other", [lambda buffer: torch.empty_like(buffer[:16]), lambda b: b[:16]])
def test_memory_of_another_workspace(target, other):
    """The caller's float buffer is another one, or shorter: plan() reads its size again."""
    buffer, case = runner.workspace(size=1 << 20), dataclasses.replace(PAGED, kv_lens=(4000, 0, 64))
    inputs, wrapper = unplanned(case, target, buffer=buffer)
    runner.plan(wrapper, inputs)
    buffer.data = other(buffer)
    runner.plan(wrapper, inputs)
    check_run(inputs, wrapper)


def test_a_plan_that_was_too_large_is_split_again():
    """A small int workspace takes a plan without split keys; the next one is as requested."""
    sizes, large = [], of_decode((4000, 4000))
    for before in ([], [large]):
        wrapper = decode_wrapper()
        memory = torch.zeros(2624, dtype=torch.uint8)
        wrapper.reset_workspace_buffer(runner.workspace(size=1 << 22), memory)
        for inputs in (*before, of_decode((4000,))):
            plan_decode(wrapper, inputs)
        sizes.append(wrapper._plan_info.float_bytes)
    assert sizes[0] == sizes[1] > 0


def test_replaced_plans_are_freed(target):
    """An array that refers to its wrapper does not keep it alive; a copy keeps the plan it has."""
    inputs, wrapper = planned(PAGED, target)
    indices = inputs.indices.clone()
    gone = weakref.ref(indices)
    runner.plan(wrapper, dataclasses.replace(inputs, indices=indices))
    del indices
    twin = copy.copy(wrapper)
    inputs.qo_indptr.owner = wrapper
    for one in (wrapper, twin):
        gc.collect()
        assert gone() is not None
        check_run(inputs, twin)
        runner.plan(one, inputs)
    gc.collect()
    assert gone() is None
    gone = weakref.ref(wrapper)
    del wrapper, one, inputs
    gc.collect()
    assert gone() is None


QUERIES = {"qo_lens": (2, 2, 2), "mask": MaskKind.CAUSAL}


@pytest.mark.parametrize("bounds", [False, True])
def test_decode_with_other_queries_after_a_repeated_plan(bounds):
    """run(q_len_per_req=) plans the arrays of the last plan() again, also of a repeated one, and
    reads its lengths."""
    wrapper, wanted = decode_wrapper(), of_decode((18, 90, 33), 1, **QUERIES)
    for inputs in (of_decode((5,)), of_decode((40, 7, 64)), wanted, wanted):
        plan_decode(wrapper, inputs, **bounds_of(inputs) if bounds else {})
    check_run(wanted, wrapper, q_len_per_req=2)


def test_other_options_in_repeated_plans_of_decode():
    """An option that is left out again, and several queries."""
    wrapper = decode_wrapper()
    for _ in range(2):
        plan_decode(wrapper, of_decode((40, 7, 64)), window_left=5)
    for lens, options, more in (
        ((40, 7, 64), {}, {}),
        *((lens, QUERIES, {"q_len_per_req": 2}) for lens in ((18, 90, 33), (2, 5, 6), (40, 7, 64))),
    ):
        inputs = of_decode(lens, **options)
        plan_decode(wrapper, inputs, **more)
        check_run(inputs, wrapper)


@pytest.mark.parametrize("given", ["array", "other", None, "buffer"])
def test_fast_decode_plan(given):
    """The indptr on the host overrides the one on the device: other values, none, or the buffer."""
    buffers = [torch.zeros(n, dtype=torch.int32) for n in (4, 60, 3)]
    wrapper = decode_wrapper(*buffers)
    for seed, lens in enumerate(((40, 7, 64), (18, 90, 33), (1, 2, 0))):
        inputs = of_decode(lens, seed)
        indptr, *rest = arrays = table(inputs)
        device = {"array": indptr, "other": indptr + 1, "buffer": buffers[0]}.get(given)
        fast_decode_plan(
            wrapper, device, *rest, *SMALL, q_data_type=DECODE.dtype,
            global_override_indptr_cpu=None if given == "array" else indptr,
        )  # fmt: skip
        check_run(inputs, wrapper)
        for buffer, values in zip(buffers, arrays, strict=True):
            assert torch.equal(buffer[: values.numel()], values)
