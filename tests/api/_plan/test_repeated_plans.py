"""plan() again, which C++ does by itself (test_call_times.py), makes the plan of a new wrapper."""

import dataclasses
import gc
import itertools
import random
import weakref

import pytest
import torch
from planned_cases import planned
from preflash.decode import BatchDecodeWithPagedKVCacheWrapper, fast_decode_plan
from preflash.testing import Case, MaskKind, build, runner

PAGED = Case("paged", (3, 0, 9), (40, 0, 64), 4, 2, 64, page_size=16, mask=MaskKind.CAUSAL)
RAGGED = dataclasses.replace(PAGED, name="ragged", page_size=0)
DECODE = Case("decode", (1, 1, 1), (40, 7, 64), 4, 2, 64, page_size=16)
DECODE_LENGTHS = ((40, 7, 64), (18, 90, 33), (1, 2, 0))
OTHERS = (
    {"qo_lens": (3, 0, 9), "kv_lens": (40, 0, 64)},
    {"qo_lens": (1, 1, 1), "kv_lens": (3, 200, 17)},
    {"qo_lens": (30,), "kv_lens": (100,)},
    {"qo_lens": (), "kv_lens": ()},
    {"qo_lens": (5,) * 70, "kv_lens": (90,) * 70},
)
SMALL = (4, 2, 64, 16)  # heads, head_dim and page size


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def on_the_cpu():
    inputs = build(PAGED)
    return inputs, runner.make_wrapper(PAGED, backend="cpu")


def check(wrapper, inputs) -> None:
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()


def decode_arrays(inputs):
    return inputs.kv_indptr, inputs.indices, inputs.last_page_len


def decode_wrapper(*buffers):
    for_graphs = ("NHD", True, False, *buffers) if buffers else ()
    return BatchDecodeWithPagedKVCacheWrapper(runner.workspace(), *for_graphs)


def of_decode(kv_lens, seed=0, **changes):
    return build(dataclasses.replace(DECODE, kv_lens=kv_lens, **changes), seed=seed)


def check_like_a_new_one(wrapper, inputs, target, **options):
    """Plans the wrapper and a new one, and compares their runs. Returns the wrapper's result."""
    other = runner.make_wrapper(inputs.case, backend=target.backend, device=target.device)
    for one in (wrapper, other):
        runner.plan(one, inputs, **options)
    got = runner.run(wrapper, inputs)
    for run_options, given in (({}, got), ({"window_left": 5}, None)):
        given = given or runner.run(wrapper, inputs, **run_options)
        assert all(map(torch.equal, given, runner.run(other, inputs, **run_options)))
    assert repr(other) == repr(wrapper)
    return got


@pytest.mark.parametrize("case", [PAGED, RAGGED], ids=lambda case: case.name)
@pytest.mark.parametrize("on_host", [True, False])
def test_other_lengths(case, on_host, target):
    wrapper = runner.make_wrapper(case, backend=target.backend, device=target.device)
    for seed, lengths in enumerate(OTHERS):
        other_case = dataclasses.replace(case, **lengths)
        where = "cpu" if on_host else target.device
        inputs = build(other_case, seed=seed, device=target.device, index_device=where)
        got = check_like_a_new_one(wrapper, inputs, target)
        if inputs.case.batch_size > 0:
            runner.compare(inputs, *got).check()


LENS = torch.tensor(PAGED.kv_lens, dtype=torch.int32)


def of(name, change):
    return lambda inputs: (
        dataclasses.replace(inputs, **{name: change(getattr(inputs, name))}), {}
    )  # fmt: skip


def option(**options):
    return lambda inputs: (inputs, options)


REFUSED = [
    (of("kv_indptr", lambda x: x.flip(0)), ValueError, "paged_kv_indptr"),
    (of("indices", lambda x: x[:-1]), ValueError, "paged_kv_indices"),
    (of("indices", torch.Tensor.float), TypeError, "paged_kv_indices"),
    (of("indices", lambda x: x.index_fill(0, torch.tensor([2]), -1)), ValueError, "holds -1"),
    (of("last_page_len", lambda x: x + 20), ValueError, "last_page_len"),
    (of("last_page_len", lambda x: x[:-1]), ValueError, "last_page_len"),
    (of("qo_indptr", torch.Tensor.neg), ValueError, "qo_indptr"),
    (option(causal=1.0), TypeError, "causal"),
    (option(seq_lens=ints(40, 1, 64)), ValueError, r"seq_lens\[1\] = 1"),
    (option(seq_lens=ints(40, 0), lengths_are_upper_bounds=True), ValueError, "seq_lens"),
]


@pytest.mark.parametrize(("spoil", "error", "match"), REFUSED)
def test_refused_plans_change_nothing(spoil, error, match):
    inputs, wrapper = on_the_cpu()
    options = {"seq_lens": LENS}
    for _ in range(2):
        runner.plan(wrapper, inputs, **options)
    expected, shown = runner.run(wrapper, inputs), repr(wrapper)
    wrong, changed = spoil(inputs)
    with pytest.raises(error, match=match):
        runner.plan(wrapper, wrong, **{**options, **changed})
    assert all(map(torch.equal, runner.run(wrapper, inputs), expected))
    assert repr(wrapper) == shown
    runner.plan(wrapper, inputs, **options)


def test_debugging_from_the_second_plan_on(monkeypatch):
    wrapper = decode_wrapper()
    arrays = (ints(0, 2, 4), ints(0, 1, 2, 3), ints(16, 16), *SMALL)
    wrapper.plan(*arrays, seq_lens=ints(5, 6), lengths_are_upper_bounds=True)
    monkeypatch.setenv("PREFLASH_DEBUG", "1")
    with pytest.raises(ValueError, match=r"seq_lens\[0\] = 99"):
        wrapper.plan(*arrays, seq_lens=ints(99, 6), lengths_are_upper_bounds=True)


def test_memory_of_another_workspace():
    """The caller's float buffer is another one: plan() reads its size again."""
    inputs = build(PAGED)
    buffer = runner.workspace(size=1 << 20)
    wrapper = runner.make_wrapper(PAGED, backend="cpu", buffer=buffer)
    runner.plan(wrapper, inputs)
    buffer.data = torch.empty(16, dtype=torch.uint8)
    runner.plan(wrapper, inputs)
    check(wrapper, inputs)
    wrapper.reset_workspace_buffer(runner.workspace(size=1 << 20), torch.zeros(1 << 20))
    for _ in range(2):
        runner.plan(wrapper, inputs)
        check(wrapper, inputs)


def test_a_plan_that_was_too_large_is_split_again():
    """A small int workspace takes a plan without split keys; the next one is as requested."""
    sizes, large = [], of_decode((4000, 4000), qo_lens=(1, 1))
    for before in ([], [large]):
        wrapper = decode_wrapper()
        memory = torch.zeros(2624, dtype=torch.uint8)
        wrapper.reset_workspace_buffer(runner.workspace(size=1 << 22), memory)
        for inputs in (*before, of_decode((4000,), qo_lens=(1,))):
            wrapper.plan(*decode_arrays(inputs), *SMALL, q_data_type=DECODE.dtype)
        sizes.append(wrapper._plan_info.float_bytes)
    assert sizes[0] == sizes[1] > 0


def test_replaced_plans_are_freed(target):
    """An array that refers to its wrapper does not keep it alive."""
    inputs, wrapper = planned(PAGED, target)
    runner.plan(wrapper, inputs)
    indices = inputs.indices.clone()
    gone = weakref.ref(indices)
    runner.plan(wrapper, dataclasses.replace(inputs, indices=indices))
    del indices
    inputs.qo_indptr.owner = wrapper
    runner.plan(wrapper, inputs)
    gc.collect()
    assert gone() is None
    gone = weakref.ref(wrapper)
    del wrapper, inputs
    gc.collect()
    assert gone() is None


# --- Decode ------------------------------------------------------------------


def test_decode_with_other_queries_after_a_repeated_plan():
    """run(q_len_per_req=) plans the arrays of the last plan() again, also of a repeated one."""
    wrapper = decode_wrapper()
    wanted = of_decode((18, 90, 33), 1, qo_lens=(2, 2, 2), mask=MaskKind.CAUSAL)
    for inputs in (of_decode((40, 7, 64)), wanted, wanted):
        wrapper.plan(*decode_arrays(inputs), *SMALL, q_data_type=DECODE.dtype)
    out, lse = wrapper.run(wanted.q, wanted.cache, q_len_per_req=2, return_lse=True)
    runner.compare(wanted, out, lse).check()


def test_other_queries_than_planned_read_the_lengths_of_the_last_plan():
    results = []
    cache = torch.randn(4, 2, 16, 2, 64, dtype=torch.float16)
    q = torch.randn(4, 4, 64, dtype=torch.float16)
    for plans in ((ints(30, 20),), (ints(5, 6), ints(30, 20)), (ints(5), ints(30, 20))):
        wrapper = decode_wrapper()
        for lens in plans:
            n = lens.numel()
            arrays = (ints(0, 2, 4)[: n + 1], ints(0, 1, 2, 3), ints(16, 16)[:n], *SMALL)
            wrapper.plan(*arrays, seq_lens=lens, lengths_are_upper_bounds=True)
        results.append(wrapper.run(q, cache, q_len_per_req=2))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("given", ["array", "other", None, "buffer"])
def test_fast_decode_plan(given):
    """The indptr on the host overrides the one on the device: other values, none, or the buffer."""
    buffers = [torch.zeros(n, dtype=torch.int32) for n in (4, 60, 3)]
    wrapper = decode_wrapper(*buffers)
    for seed, lens in enumerate(DECODE_LENGTHS):
        inputs = of_decode(lens, seed)
        indptr, indices, last_page_len = decode_arrays(inputs)
        device = {"array": indptr, "other": indptr + 1, "buffer": buffers[0]}.get(given)
        fast_decode_plan(
            wrapper, device, indices, last_page_len, *SMALL, q_data_type=DECODE.dtype,
            global_override_indptr_cpu=None if given == "array" else indptr,
        )  # fmt: skip
        out, lse = wrapper.run(inputs.q, inputs.cache, return_lse=True)
        runner.compare(inputs, out, lse).check()
        for buffer, values in zip(buffers, decode_arrays(inputs), strict=True):
            assert torch.equal(buffer[: values.numel()], values)


def test_many_page_indices():
    """Each plan has its own, whichever memory they are in and whatever was in that before."""
    wrappers = [decode_wrapper() for _ in range(2)]
    for i, count in enumerate((20_000, 30_000, 16_383, 16_384, 70_000, 20_000)):
        wrapper, pages = wrappers[i % 2], torch.randperm(count, dtype=torch.int32)
        wrapper.plan(ints(0, count), pages, ints(7), *SMALL)
        expected = pages.tolist()
        pages.fill_(-1)
        assert wrapper._paged_kv_indices_buf.tolist() == expected
        with pytest.raises(ValueError, match="indices holds -1;"):
            wrapper.plan(ints(0, count), pages, ints(7), *SMALL)


# --- forward() ---------------------------------------------------------------


def test_options_of_forward_are_read_in_every_call(target):
    """Equal numbers of another type are checked, other numbers count, tensors are read again."""
    inputs, wrapper = planned(PAGED, target)
    tensors = (inputs.q, inputs.cache)
    scale = torch.tensor(0.3)
    for changed in (0.3, 0.3, 0.5, scale, scale):
        out, lse = wrapper.forward_return_lse(*tensors, causal=True, sm_scale=changed)
        case = dataclasses.replace(PAGED, sm_scale=float(changed))
        runner.compare(dataclasses.replace(inputs, case=case), out, lse).check()
        scale.add_(0.1)
    with pytest.raises(TypeError, match="causal"):
        wrapper.forward(*tensors, causal=1.0, sm_scale=0.5)
    plus, minus = (wrapper.forward(*tensors, v_scale=zero) for zero in (0.0, -0.0))
    assert not bool((plus.signbit() & minus.signbit()).any())  # 0.0 is not -0.0
    for options in ({}, {"window_left": 3}):  # forward() has its own
        runner.plan(wrapper, inputs, **options)
        by_position = wrapper.forward(*tensors, True, sm_scale=0.5)
        assert torch.equal(wrapper.forward(*tensors, causal=True, sm_scale=0.5), by_position)


OPTIONS = (
    {}, {"window_left": 5}, {"sm_scale": 0.3}, {"logits_soft_cap": 8.0}, {"causal": True},
    {"disable_split_kv": True}, {"fixed_split_size": 16}, {"pos_encoding_mode": "ROPE_LLAMA"},
)  # fmt: skip
RUNS = [("run", {}), ("run", {"window_left": 9}), ("run", {"k_scale": 0.5})] + [
    ("forward", {"causal": causal, "sm_scale": scale})
    for causal in (False, True)
    for scale in (None, 0.2)
]
RUNS.append(("forward", {"causal": True, "pos_encoding_mode": "ALIBI"}))


@pytest.mark.parametrize("seed", range(12))
def test_any_sequence_of_calls(seed, target):
    """Plans, runs, windows and forward() in any order: the results of a new wrapper each time."""
    rng = random.Random(seed)
    wrapper = runner.make_wrapper(PAGED, backend=target.backend, device=target.device)
    options, way, as_table = {}, "plan", False
    for step in range(25):
        if rng.random() < 0.15:
            options = rng.choice(OPTIONS)
            way, as_table = rng.choice(["plan", "begin_forward"]), rng.random() < 0.5
        lens = [(q := rng.randint(0, 6), q + rng.randint(0, 90)) for _ in range(rng.randint(1, 5))]
        qo_lens, kv_lens = map(tuple, zip(*lens, strict=True))
        case = dataclasses.replace(PAGED, qo_lens=qo_lens, kv_lens=kv_lens)
        inputs = build(case, seed=step, device=target.device, index_device="cpu")
        indices = block_table(inputs, 6, target.device) if as_table else inputs.indices
        other = runner.make_wrapper(case, backend=target.backend, device=target.device)
        arrays = (inputs.qo_indptr, inputs.kv_indptr, indices, inputs.last_page_len)
        for one in (wrapper, other):
            getattr(one, way)(*arrays, *SMALL, q_data_type=case.dtype, **options)
        for call, more in rng.choices(RUNS, k=2):
            got, expected = (
                getattr(one, call)(inputs.q, inputs.cache, **more) for one in (wrapper, other)
            )
            assert torch.equal(got, expected), (step, way, options, call, more)


# --- Block tables and upper bounds -------------------------------------------


def block_table(inputs, width: int, device) -> torch.Tensor:
    """Returns a table [batch, width] in wider rows, where entries of no request are no pages."""
    table = torch.full((inputs.case.batch_size, width + 3), -5, dtype=torch.int32)
    indptr = inputs.kv_indptr.tolist()
    for i, (begin, end) in enumerate(itertools.pairwise(indptr)):
        table[i, : end - begin] = inputs.indices[begin:end]
    return table.to(device)[:, :width]


@pytest.mark.parametrize(("as_table", "bounds"), [(True, False), (False, True), (True, True)])
def test_tables_and_upper_bounds(as_table, bounds, target):
    """Bounds are planned; a run reads the lengths of the last plan()."""
    wrapper = runner.make_wrapper(PAGED, backend=target.backend, device=target.device)
    for seed, (lengths, width) in enumerate(zip(OTHERS[:3] * 2, (5, 15, 9) * 2, strict=True)):
        case = dataclasses.replace(PAGED, **lengths)
        inputs = build(case, seed=seed, device=target.device, index_device="cpu")
        given, options = inputs, {}
        if as_table:
            table = block_table(inputs, width, target.device)
            given = dataclasses.replace(inputs, indices=table)
        if bounds:
            full = torch.full_like(inputs.last_page_len, case.page_size)
            given = dataclasses.replace(given, last_page_len=full)
            lens = torch.tensor(case.kv_lens, dtype=torch.int32, device=target.device)
            options = {"seq_lens": lens, "lengths_are_upper_bounds": True}
        runner.plan(wrapper, given, **options)
        check(wrapper, inputs)
    if as_table and not bounds and target.device == "cpu":
        for wrong, match in ((table[:, :2], "paged_kv_indices"), (table * 0 - 1, "holds -1")):
            with pytest.raises(ValueError, match=match):
                runner.plan(wrapper, dataclasses.replace(given, indices=wrong), **options)
        runner.plan(wrapper, dataclasses.replace(given, indices=table + 10**6), **options)
        with pytest.raises(ValueError, match="holds 10000"):
            runner.run(wrapper, inputs)


# --- Arrays of other kinds ---------------------------------------------------


def resized(value: torch.Tensor, nbytes: int) -> torch.Tensor:
    value = value.clone()
    value.untyped_storage().resize_(nbytes)
    return value


UNUSUAL = {
    "list": torch.Tensor.tolist,
    "none": lambda value: None,
    "int64": torch.Tensor.long,
    "float": torch.Tensor.float,
    "two dimensions": lambda value: value[None],
    "strided": lambda value: torch.stack([value, value], dim=1)[:, 0],
    "subclass": lambda value: torch.nn.Parameter(value, requires_grad=False),
    "meta": lambda value: value.to("meta"),
    "sparse": torch.Tensor.to_sparse,
    "negative view": lambda value: torch._neg_view(value.clone()),
    "freed": lambda value: resized(value, 0),
    "short of storage": lambda value: resized(value, value.nbytes - 4),
    "shorter": lambda value: value[:-1],
    "part of a larger one": lambda value: torch.cat([value[:1], value, value[:1]])[1:-1],
    "negative": lambda value: -value,
}


@pytest.mark.parametrize("kind", UNUSUAL)
@pytest.mark.parametrize("name", ["qo_indptr", "kv_indptr", "indices", "last_page_len"])
def test_unusual_arrays(name, kind):
    """Served or refused as in a first plan()."""
    ends = []
    for plans in (1, 2):
        inputs, wrapper = on_the_cpu()
        unusual = dataclasses.replace(inputs, **{name: UNUSUAL[kind](getattr(inputs, name))})
        if plans == 2:
            runner.plan(wrapper, inputs)
        try:
            runner.plan(wrapper, unusual)
            ends.append([x.tolist() for x in runner.run(wrapper, inputs)])
        except (TypeError, ValueError) as error:
            ends.append((type(error), str(error)))
    assert ends[0] == ends[1]


def test_an_interrupt_of_a_mode_is_not_lost():
    class Interrupting(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            raise KeyboardInterrupt

    inputs, wrapper = on_the_cpu()
    runner.plan(wrapper, inputs)
    with pytest.raises(KeyboardInterrupt), Interrupting():
        runner.plan(wrapper, inputs)
