"""plan() again with other index arrays: C++ makes that plan by itself, and it is the plan that a
new wrapper makes."""

import dataclasses
import gc
import itertools
import random
import weakref

import pytest
import torch
from graph_stage import Limits, Stage, capture, recorder  # noqa: F401
from preflash import _core
from preflash.decode import BatchDecodeWithPagedKVCacheWrapper, fast_decode_plan
from preflash.testing import Case, MaskKind, build, runner

PAGED = Case("paged", (3, 0, 9), (40, 0, 64), 4, 2, 64, page_size=16, mask=MaskKind.CAUSAL)
RAGGED = dataclasses.replace(PAGED, name="ragged", page_size=0)
DECODE = Case("decode", (1, 1, 1), (40, 7, 64), 4, 2, 64, page_size=16)
CASES = pytest.mark.parametrize("case", [PAGED, RAGGED], ids=lambda case: case.name)
OTHERS = (
    {"qo_lens": (3, 0, 9), "kv_lens": (40, 0, 64)},
    {"qo_lens": (1, 1, 1), "kv_lens": (3, 200, 17)},
    {"qo_lens": (30,), "kv_lens": (100,)},
    {"qo_lens": (), "kv_lens": ()},
    {"qo_lens": (5,) * 70, "kv_lens": (90,) * 70},
)


@pytest.fixture
def answers(monkeypatch):
    """The answers of plan_again(): True where C++ planned."""
    found, again = [], _core.plan_again
    monkeypatch.setattr(
        _core, "plan_again", lambda *given: found.append(again(*given)) or found[-1]
    )
    return found


def decode_arrays(inputs):
    return inputs.kv_indptr, inputs.indices, inputs.last_page_len


def decode_plan(wrapper, inputs, **options):
    case = inputs.case
    wrapper.plan(
        *decode_arrays(inputs), case.num_qo_heads, case.num_kv_heads, case.head_dim,
        case.page_size, **{"q_data_type": case.dtype, "kv_data_type": case.dtype, **options},
    )  # fmt: skip


@CASES
@pytest.mark.parametrize("on_host", [True, False])
def test_other_lengths(case, on_host, target, answers):
    where = "cpu" if on_host else target.device
    wrapper = runner.make_wrapper(case, backend=target.backend, device=target.device)
    for seed, lengths in enumerate(OTHERS):
        other_case = dataclasses.replace(case, **lengths)
        inputs = build(other_case, seed=seed, device=target.device, index_device=where)
        runner.plan(wrapper, inputs)
        got = runner.run(wrapper, inputs)
        if inputs.case.batch_size > 0:
            runner.compare(inputs, *got).check()
        other = runner.make_wrapper(case, backend=target.backend, device=target.device)
        runner.plan(other, inputs)
        assert all(map(torch.equal, got, runner.run(other, inputs)))
        assert repr(other) == repr(wrapper)
    # An empty array of pages has no memory to read.
    assert answers[::2] == [False, True, True, not case.paged, True]


@pytest.mark.parametrize(
    "changed",
    [
        {"sm_scale": 0.5}, {"causal": False}, {"window_left": 7}, {"logits_soft_cap": 3.0},
        {"uniform_q_len": -1}, {"disable_split_kv": True},
    ],
    ids=lambda changed: next(iter(changed)),
)  # fmt: skip
def test_another_option_is_another_plan(changed, target, answers):
    inputs = build(PAGED, device=target.device)
    wrapper = runner.make_wrapper(PAGED, backend=target.backend, device=target.device)
    runner.plan(wrapper, inputs)
    runner.plan(wrapper, inputs, **changed)
    assert answers == [False, False]
    got = runner.run(wrapper, inputs)
    other = runner.make_wrapper(PAGED, backend=target.backend, device=target.device)
    runner.plan(other, inputs, **changed)
    assert all(map(torch.equal, got, runner.run(other, inputs)))


def test_equal_numbers_of_another_type(answers):
    inputs = build(PAGED)
    wrapper = runner.make_wrapper(PAGED, backend="cpu")
    runner.plan(wrapper, inputs, sm_scale=1.0)
    runner.plan(wrapper, inputs, sm_scale=1.0)
    runner.plan(wrapper, inputs, sm_scale=1)
    assert answers == [False, True, False]
    with pytest.raises(TypeError, match="causal"):
        runner.plan(wrapper, inputs, sm_scale=1, causal=1.0)


@pytest.mark.parametrize(
    ("name", "change", "match"),
    [
        ("kv_indptr", lambda x: x.flip(0), "paged_kv_indptr"),
        ("indices", lambda x: x[:-1], "paged_kv_indices"),
        ("indices", lambda x: x.float(), "paged_kv_indices"),
        ("last_page_len", lambda x: x + 20, "last_page_len"),
        ("last_page_len", lambda x: x[:-1], "last_page_len"),
        ("qo_indptr", lambda x: -x, "qo_indptr"),
    ],
)
def test_wrong_arrays_are_named_and_change_nothing(name, change, match, answers):
    inputs = build(PAGED)
    wrapper = runner.make_wrapper(PAGED, backend="cpu")
    runner.plan(wrapper, inputs)
    expected, shown = runner.run(wrapper, inputs), repr(wrapper)
    wrong = dataclasses.replace(inputs, **{name: change(getattr(inputs, name))})
    with pytest.raises((TypeError, ValueError), match=match):
        runner.plan(wrapper, wrong)
    assert all(map(torch.equal, runner.run(wrapper, inputs), expected))
    assert repr(wrapper) == shown
    runner.plan(wrapper, inputs)
    assert answers == [False, False, True]


def test_lengths_that_are_repeated(answers):
    inputs = build(PAGED)
    wrapper = runner.make_wrapper(PAGED, backend="cpu")
    lens = torch.tensor(PAGED.kv_lens, dtype=torch.int32)
    for _ in range(2):
        runner.plan(wrapper, inputs, seq_lens=lens)
    assert answers == [False, True]
    with pytest.raises(ValueError, match=r"seq_lens\[1\] = 1"):
        runner.plan(wrapper, inputs, seq_lens=torch.tensor([40, 1, 64], dtype=torch.int32))


def test_arrays_that_changed_in_place(answers):
    """The arrays are read again: they are not what the last plan() is compared with."""
    first = build(dataclasses.replace(DECODE, kv_lens=(16, 16, 16)))
    second = build(dataclasses.replace(DECODE, kv_lens=(9, 9, 9)), seed=1)
    wrapper = runner.make_wrapper(DECODE, backend="cpu")
    arrays = [getattr(first, name).clone() for name in ("kv_indptr", "indices", "last_page_len")]
    for inputs in (first, second):
        for array, values in zip(arrays, decode_arrays(inputs), strict=True):
            array.copy_(values)
        runner.plan(wrapper, dataclasses.replace(
            inputs, kv_indptr=arrays[0], indices=arrays[1], last_page_len=arrays[2]
        ))  # fmt: skip
        runner.compare(inputs, *runner.run(wrapper, inputs)).check()
    assert answers == [False, True]


def test_decode_with_other_queries_after_a_repeated_plan(answers):
    """run(q_len_per_req=) plans the arrays of the last plan() again, also of a repeated one."""
    wrapper = BatchDecodeWithPagedKVCacheWrapper(runner.workspace())
    for seed, lens in enumerate(((40, 7, 64), (18, 90, 33))):
        inputs = build(dataclasses.replace(DECODE, kv_lens=lens), seed=seed)
        decode_plan(wrapper, inputs)
    assert answers == [False, True]
    two = dataclasses.replace(DECODE, qo_lens=(2, 2, 2), kv_lens=(18, 90, 33), mask=MaskKind.CAUSAL)
    wanted = build(two, seed=1)
    arrays = dict(zip(("indptr", "indices", "last_page_len"), decode_arrays(wanted), strict=True))
    wrapper.plan(**arrays, num_qo_heads=4, num_kv_heads=2, head_dim=64, page_size=16,
                 q_data_type=DECODE.dtype)  # fmt: skip
    for _ in range(2):
        wrapper.plan(**arrays, num_qo_heads=4, num_kv_heads=2, head_dim=64, page_size=16,
                     q_data_type=DECODE.dtype)  # fmt: skip
    out, lse = wrapper.run(wanted.q, wanted.cache, q_len_per_req=2, return_lse=True)
    runner.compare(wanted, out, lse).check()


def test_a_run_with_a_window_between_plans(answers):
    inputs = build(PAGED)
    wrapper = runner.make_wrapper(PAGED, backend="cpu")
    expected = None
    for _ in range(3):
        runner.plan(wrapper, inputs)
        got = runner.run(wrapper, inputs, window_left=5)
        expected = expected or got
        assert all(map(torch.equal, got, expected))
        runner.compare(inputs, *runner.run(wrapper, inputs)).check()
    assert answers == [False, True, True]


def test_a_copy_has_nothing_to_repeat(answers):
    import copy

    inputs, other = build(PAGED), build(dataclasses.replace(PAGED, **OTHERS[1]), seed=1)
    wrapper = runner.make_wrapper(PAGED, backend="cpu")
    runner.plan(wrapper, inputs)
    copied = copy.copy(wrapper)
    runner.plan(copied, other)
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()
    runner.compare(other, *runner.run(copied, other)).check()
    assert answers == [False, False]


def test_memory_of_another_workspace(answers):
    """The caller's float buffer is another one: what it has room for is asked again."""
    inputs = build(PAGED)
    buffer = runner.workspace(size=1 << 20)
    wrapper = runner.make_wrapper(PAGED, backend="cpu", buffer=buffer)
    runner.plan(wrapper, inputs)
    buffer.data = torch.empty(16, dtype=torch.uint8)
    runner.plan(wrapper, inputs)
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()
    wrapper.reset_workspace_buffer(runner.workspace(size=1 << 20), torch.zeros(1 << 20))
    runner.plan(wrapper, inputs)
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()
    runner.plan(wrapper, inputs)
    assert answers == [False, False, False, True]


def test_replaced_plans_are_freed(target):
    inputs = build(PAGED, device=target.device)
    wrapper = runner.make_wrapper(PAGED, backend=target.backend, device=target.device)
    runner.plan(wrapper, inputs)
    runner.plan(wrapper, inputs)
    indices = inputs.indices.clone()
    gone = weakref.ref(indices)
    runner.plan(wrapper, dataclasses.replace(inputs, indices=indices))
    del indices
    runner.plan(wrapper, inputs)
    gc.collect()
    assert gone() is None
    gone = weakref.ref(wrapper)
    del wrapper
    gc.collect()
    assert gone() is None


def test_of_graphs(target, recorder, answers):  # noqa: F811
    """Plans between replays: of the captured work list, which each overwrites in its place."""
    like = dataclasses.replace(PAGED, qo_lens=(), kv_lens=())
    stage = Stage(like, Limits(batch=3, rows=40, pages=90), target)
    stage.plan(stage.make((9, 20, 3), (100, 90, 7)))
    graph = capture(recorder, target.device, stage.run)
    for lengths in (((3, 0, 9), (40, 0, 64)), ((1, 1, 1), (3, 200, 17))) * 2:
        inputs = stage.make(*lengths)
        stage.plan(inputs)
        graph.replay()
        stage.check(inputs)
    assert answers == [False, False, True, True, True]
    larger = stage.make((30, 20, 3), (100, 90, 7))
    with pytest.raises(ValueError, match="qo_indptr"):
        runner.plan(stage.wrapper, larger)


def test_fast_decode_plan(answers):
    buffers = (torch.zeros(4), torch.zeros(60), torch.zeros(3))
    wrapper = BatchDecodeWithPagedKVCacheWrapper(
        runner.workspace(), "NHD", True, False, *(b.to(torch.int32) for b in buffers)
    )
    for seed, lens in enumerate(((40, 7, 64), (18, 90, 33), (1, 2, 0))):
        inputs = build(dataclasses.replace(DECODE, kv_lens=lens), seed=seed)
        indptr, indices, last_page_len = decode_arrays(inputs)
        for on_host in (None, indptr):
            fast_decode_plan(
                wrapper, indptr if on_host is None else indptr + 1, indices, last_page_len,
                4, 2, 64, 16, q_data_type=DECODE.dtype, global_override_indptr_cpu=on_host,
            )  # fmt: skip
            out, lse = wrapper.run(inputs.q, inputs.cache, return_lse=True)
            runner.compare(inputs, out, lse).check()
        assert wrapper._paged_kv_indptr_buf.tolist() == indptr.tolist()
        assert wrapper._paged_kv_indices_buf[: indices.numel()].tolist() == indices.tolist()
        assert wrapper._paged_kv_last_page_len_buf.tolist() == last_page_len.tolist()


def test_steps_with_forward(target, answers):
    """begin_forward() plans for the options of the last forward(), as often as it is repeated."""
    wrapper = runner.make_wrapper(PAGED, backend=target.backend, device=target.device)
    heads = (PAGED.num_qo_heads, PAGED.num_kv_heads, PAGED.head_dim, PAGED.page_size)
    for seed, lengths in enumerate((OTHERS[0], OTHERS[1], OTHERS[4], OTHERS[0])):
        case = dataclasses.replace(PAGED, **lengths)
        inputs = build(case, seed=seed, device=target.device, index_device="cpu")
        table = (inputs.qo_indptr, inputs.kv_indptr, inputs.indices, inputs.last_page_len)
        wrapper.begin_forward(*table, *heads, q_data_type=case.dtype)
        out, lse = wrapper.forward_return_lse(inputs.q, inputs.cache, causal=True)
        runner.compare(inputs, out, lse).check()
        plain = dataclasses.replace(case, mask=MaskKind.NONE)
        plain = build(plain, seed=seed, device=target.device, index_device="cpu")
        if seed == 3:  # run() has the options of plan()
            assert torch.equal(plain.q, inputs.q)
            runner.compare(plain, *runner.run(wrapper, plain)).check()
    assert answers == [False, False, True, True]


def test_options_of_forward_are_read_in_every_call(target):
    """Equal numbers of another type are checked, other numbers count, tensors are read again."""
    inputs = build(PAGED, device=target.device)
    wrapper = runner.make_wrapper(PAGED, backend=target.backend, device=target.device)
    runner.plan(wrapper, inputs)
    scale = torch.tensor(0.3)
    for changed in (0.3, 0.3, 0.5, scale, scale):
        out, lse = wrapper.forward_return_lse(inputs.q, inputs.cache, causal=True, sm_scale=changed)
        case = dataclasses.replace(PAGED, sm_scale=float(changed))
        runner.compare(dataclasses.replace(inputs, case=case), out, lse).check()
        scale.add_(0.1)
    assert torch.equal(
        wrapper.forward(inputs.q, inputs.cache, True, sm_scale=0.5),
        wrapper.forward(inputs.q, inputs.cache, causal=True, sm_scale=0.5),
    )
    with pytest.raises(TypeError, match="causal"):
        wrapper.forward(inputs.q, inputs.cache, causal=1.0, sm_scale=0.5)
    plus, minus = (wrapper.forward(inputs.q, inputs.cache, v_scale=zero) for zero in (0.0, -0.0))
    assert not bool((plus.signbit() & minus.signbit()).any())  # 0.0 is not -0.0
    runner.plan(wrapper, inputs, window_left=3)  # forward() has its own
    again = wrapper.forward(inputs.q, inputs.cache, causal=True, sm_scale=0.5)
    assert torch.equal(again, wrapper.forward(inputs.q, inputs.cache, True, sm_scale=0.5))


def freed(value: torch.Tensor) -> torch.Tensor:
    value = value.clone()
    value.untyped_storage().resize_(0)
    return value


def too_long_for_its_storage(value: torch.Tensor) -> torch.Tensor:
    value = value.clone()
    value.untyped_storage().resize_(value.nbytes - 4)
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
    "freed": freed,
    "short of storage": too_long_for_its_storage,
    "shorter": lambda value: value[:-1],
    "part of a larger one": lambda value: torch.cat([value[:1], value, value[:1]])[1:-1],
    "negative": lambda value: -value,
}


@pytest.mark.parametrize("kind", UNUSUAL)
@pytest.mark.parametrize("name", ["qo_indptr", "kv_indptr", "indices", "last_page_len"])
def test_unusual_arrays(name, kind):
    """Served or refused as in a first plan()."""
    inputs, ends = build(PAGED), []
    unusual = dataclasses.replace(inputs, **{name: UNUSUAL[kind](getattr(inputs, name))})
    for plans in (1, 2):
        wrapper = runner.make_wrapper(PAGED, backend="cpu")
        if plans == 2:
            runner.plan(wrapper, inputs)
        try:
            runner.plan(wrapper, unusual)
            ends.append([x.tolist() for x in runner.run(wrapper, inputs)])
        except (TypeError, ValueError) as error:
            ends.append((type(error), str(error)))
    assert ends[0] == ends[1]


def test_many_page_indices(answers):
    """Each plan has its own, whichever memory they are in and whoever had that before."""
    wrappers = [BatchDecodeWithPagedKVCacheWrapper(runner.workspace()) for _ in range(2)]
    last = torch.tensor([7], dtype=torch.int32)
    for i, count in enumerate((20_000, 30_000, 16_383, 16_384, 70_000, 20_000)):
        wrapper, pages = wrappers[i % 2], torch.randperm(count, dtype=torch.int32)
        indptr = torch.tensor([0, count], dtype=torch.int32)
        wrapper.plan(indptr, pages, last, 4, 2, 64, 16)
        expected = pages.tolist()
        pages.fill_(-1)
        assert wrapper._paged_kv_indices_buf.tolist() == expected
        with pytest.raises(ValueError, match="indices holds -1;"):
            wrapper.plan(indptr, pages, last, 4, 2, 64, 16)
    assert answers.count(True) == 4


def test_an_interrupt_of_a_mode_is_not_lost():
    class Interrupting(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            raise KeyboardInterrupt

    inputs = build(PAGED)
    wrapper = runner.make_wrapper(PAGED, backend="cpu")
    runner.plan(wrapper, inputs)
    with pytest.raises(KeyboardInterrupt), Interrupting():
        runner.plan(wrapper, inputs)


def block_table(inputs, width: int, device) -> torch.Tensor:
    """[batch, width], of wider rows; entries that no request owns are no pages."""
    table = torch.full((inputs.case.batch_size, width + 3), -5, dtype=torch.int32)
    indptr = inputs.kv_indptr.tolist()
    for i, (begin, end) in enumerate(itertools.pairwise(indptr)):
        table[i, : end - begin] = inputs.indices[begin:end]
    return table.to(device)[:, :width]


def test_block_tables(target, answers):
    wrapper = runner.make_wrapper(PAGED, backend=target.backend, device=target.device)
    for seed, (lengths, width) in enumerate(zip(OTHERS[:3], (5, 15, 9), strict=True)):
        case = dataclasses.replace(PAGED, **lengths)
        inputs = build(case, seed=seed, device=target.device, index_device="cpu")
        table = block_table(inputs, width, target.device)
        runner.plan(wrapper, dataclasses.replace(inputs, indices=table))
        runner.compare(inputs, *runner.run(wrapper, inputs)).check()
    assert answers == [False, True, True]
    if target.device == "cpu":
        table[0, 0] = -1
        with pytest.raises(ValueError, match="holds -1"):
            runner.plan(wrapper, dataclasses.replace(inputs, indices=table))
        table[0, 0] = 10**6
        runner.plan(wrapper, dataclasses.replace(inputs, indices=table))
        with pytest.raises(ValueError, match="1000000"):
            runner.run(wrapper, inputs)
    with pytest.raises(ValueError, match="paged_kv_indices"):
        runner.plan(wrapper, dataclasses.replace(inputs, indices=table[:, :2]))


@pytest.mark.parametrize("as_table", [False, True])
def test_upper_bounds(as_table, target, answers):
    """The bounds are planned, the lengths are read when a run is: those of the last plan()."""
    wrapper = runner.make_wrapper(PAGED, backend=target.backend, device=target.device)
    for seed, lengths in enumerate(OTHERS[:2] * 2):
        case = dataclasses.replace(PAGED, **lengths)
        inputs = build(case, seed=seed, device=target.device, index_device="cpu")
        lens = torch.tensor(case.kv_lens, dtype=torch.int32, device=target.device)
        full = torch.full_like(inputs.last_page_len, case.page_size)
        given = dataclasses.replace(inputs, last_page_len=full)
        if as_table:
            given = dataclasses.replace(given, indices=block_table(inputs, 15, target.device))
        runner.plan(wrapper, given, seq_lens=lens, lengths_are_upper_bounds=True)
        runner.compare(inputs, *runner.run(wrapper, inputs)).check()
    assert answers == [False, True, True, True]
    with pytest.raises(ValueError, match="seq_lens"):
        runner.plan(wrapper, given, seq_lens=lens[:-1], lengths_are_upper_bounds=True)


def test_upper_bounds_of_graphs(target, recorder, answers):  # noqa: F811
    like = dataclasses.replace(PAGED, qo_lens=(), kv_lens=())
    stage = Stage(like, Limits(batch=3, rows=40, pages=90), target)
    lens = torch.zeros(3, dtype=torch.int32, device=target.device)
    graph = None
    for lengths in (
        ((9, 20, 3), (100, 90, 7)),
        ((3, 0, 9), (40, 0, 64)),
        ((1, 1, 1), (3, 200, 17)),
    ):
        inputs = stage.make(*lengths)
        full = torch.full_like(inputs.last_page_len, like.page_size)
        given = dataclasses.replace(inputs, last_page_len=full)
        stage.plan(given, seq_lens=lens, lengths_are_upper_bounds=True)
        lens.copy_(torch.tensor(lengths[1], dtype=torch.int32))
        if graph is None:
            graph = capture(recorder, target.device, stage.run)
        graph.replay()
        stage.check(inputs)
    assert answers == [False, False, True]
    with pytest.raises(ValueError, match="another seq_lens"):
        stage.plan(given, seq_lens=lens.clone(), lengths_are_upper_bounds=True)


OPTIONS = (
    {}, {"window_left": 5}, {"sm_scale": 0.3}, {"logits_soft_cap": 8.0}, {"causal": True},
    {"disable_split_kv": True}, {"fixed_split_size": 16}, {"pos_encoding_mode": "ROPE_LLAMA"},
)  # fmt: skip


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
        for one in (wrapper, other):
            getattr(one, way)(
                inputs.qo_indptr, inputs.kv_indptr, indices, inputs.last_page_len,
                4, 2, 64, 16, q_data_type=case.dtype, **options,
            )  # fmt: skip
        for _ in range(2):
            call, more = rng.choice(
                [("run", {}), ("run", {"window_left": 9}), ("run", {"k_scale": 0.5})]
                + [("forward", {"causal": c, "sm_scale": s}) for c in (0, 1) for s in (None, 0.2)]
            )
            if "causal" in more:
                more["causal"] = bool(more["causal"])
            got, expected = (
                getattr(one, call)(inputs.q, inputs.cache, **more) for one in (wrapper, other)
            )
            assert torch.equal(got, expected), (step, way, options, call, more)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


SMALL = (4, 2, 64, 16)


def test_fast_decode_plan_without_an_array_on_the_device(answers):
    """And with one that is the buffer itself, whose values are those of the override."""
    buffer = ints(0, 0, 0)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(
        runner.workspace(),
        "NHD",
        True,
        False,
        buffer,
        torch.zeros(9, dtype=torch.int32),
        ints(0, 0),
    )
    for indptr in (None, None, buffer, buffer):
        for on_host in (ints(0, 2, 4), ints(0, 1, 3)):
            fast_decode_plan(
                wrapper, indptr, ints(0, 1, 2, 3), ints(16, 16), *SMALL,
                q_data_type=torch.float16, global_override_indptr_cpu=on_host,
            )  # fmt: skip
            assert wrapper._paged_kv_indptr_buf.tolist() == on_host.tolist()
    assert answers == [False, True, True, True, False, True, True, True]


def test_other_queries_than_planned_read_the_lengths_of_the_last_plan():
    results = []
    cache = torch.randn(4, 2, 16, 2, 64, dtype=torch.float16)
    q = torch.randn(4, 4, 64, dtype=torch.float16)
    for plans in ((ints(30, 20),), (ints(5, 6), ints(30, 20)), (ints(5), ints(30, 20))):
        wrapper = BatchDecodeWithPagedKVCacheWrapper(runner.workspace())
        for lens in plans:
            n = lens.numel()
            wrapper.plan(
                ints(0, 2, 4)[: n + 1], ints(0, 1, 2, 3), ints(16, 16)[:n], *SMALL,
                q_data_type=torch.float16, seq_lens=lens, lengths_are_upper_bounds=True,
            )  # fmt: skip
        results.append(wrapper.run(q, cache, q_len_per_req=2))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_a_plan_that_was_too_large_is_split_again(answers):
    """A small int workspace takes a plan without split keys; the next one is as asked."""
    case = dataclasses.replace(DECODE, qo_lens=(1,), kv_lens=(4000,))
    sizes = []
    for first in (None, dataclasses.replace(DECODE, qo_lens=(1, 1), kv_lens=(4000, 4000))):
        wrapper = BatchDecodeWithPagedKVCacheWrapper(runner.workspace())
        wrapper.reset_workspace_buffer(
            runner.workspace(size=1 << 22), torch.zeros(2624, dtype=torch.uint8)
        )
        for one in filter(None, (first, case)):
            decode_plan(wrapper, build(one))
        sizes.append(wrapper._plan.primary.plan.float_bytes)
    assert sizes[0] == sizes[1] > 0


def test_debugging_from_the_second_plan_on(monkeypatch):
    wrapper = BatchDecodeWithPagedKVCacheWrapper(runner.workspace())

    def plan(*lens):
        wrapper.plan(
            ints(0, 2, 4), ints(0, 1, 2, 3), ints(16, 16), *SMALL, q_data_type=torch.float16,
            seq_lens=ints(*lens), lengths_are_upper_bounds=True,
        )  # fmt: skip

    plan(5, 6)
    monkeypatch.setenv("PREFLASH_DEBUG", "1")
    with pytest.raises(ValueError, match=r"seq_lens\[0\] = 99"):
        plan(99, 6)


def test_a_wrapper_that_an_array_owns_is_freed():
    inputs = build(PAGED)
    wrapper = runner.make_wrapper(PAGED, backend="cpu")
    runner.plan(wrapper, inputs)
    inputs.qo_indptr.owner = wrapper
    runner.plan(wrapper, inputs)
    gone = weakref.ref(wrapper)
    del wrapper, inputs
    gc.collect()
    assert gone() is None


def test_head_dim_by_its_other_name(answers):
    inputs = build(PAGED)
    wrapper = runner.make_wrapper(PAGED, backend="cpu")
    arrays = (inputs.qo_indptr, inputs.kv_indptr, inputs.indices, inputs.last_page_len)
    for _ in range(3):
        wrapper.plan(
            *arrays, 4, 2, head_dim_qk=64, page_size=16, causal=True, q_data_type=PAGED.dtype
        )
        runner.compare(inputs, *runner.run(wrapper, inputs)).check()
    assert answers == [False, True, True]


def test_another_layout_of_the_wrapper(answers):
    inputs = build(PAGED)
    wrapper = runner.make_wrapper(PAGED, backend="cpu")
    runner.plan(wrapper, inputs)
    wrapper._kv_layout = "HND"
    runner.plan(wrapper, inputs)
    assert answers == [False, False]


def test_forward_options_after_plans_of_other_options(monkeypatch):
    """Checked once for each plan's options, not for every layer."""
    inputs, checked = build(PAGED), []
    wrapper = runner.make_wrapper(PAGED, backend="cpu")
    kind = type(wrapper).__mro__[1]
    options_of = kind._forward_options
    monkeypatch.setattr(
        kind, "_forward_options", lambda self, a: checked.append(a) or options_of(self, a)
    )
    for window_left in (-1, 9):
        runner.plan(wrapper, inputs, window_left=window_left)
        for _ in range(5):
            wrapper.forward(inputs.q, inputs.cache, causal=True)
    assert len(checked) == 4  # by the call, and by what it keeps
