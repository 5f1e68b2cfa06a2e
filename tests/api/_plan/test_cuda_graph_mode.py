"""With use_cuda_graph=True plan() fills the buffers, and a captured run replays the last plan."""

import collections
import copy
import dataclasses
import itertools

import preflash
import pytest
import torch
from fuzz.pod_trial import plan_decode
from graph_stage import Limits, Stage, capture
from interrupts import interrupted
from planned_cases import table
from preflash.testing import Case, MaskKind, build, compare, reference, runner
from preflash.testing.oracle import Pipeline
from refusals import refused

PAGED = Case("paged", (), (), 4, 2, 64, page_size=16, mask=MaskKind.CAUSAL)
RAGGED = dataclasses.replace(PAGED, name="ragged", page_size=0)
HND = dataclasses.replace(PAGED, name="hnd", layout="HND", page_size=4)
RAGGED_HND = dataclasses.replace(RAGGED, name="ragged_hnd", layout="HND")
SPLIT = dataclasses.replace(PAGED, name="split", fixed_split_size=64)
MASKED = dataclasses.replace(PAGED, mask=MaskKind.CUSTOM)
CASES = pytest.mark.parametrize(
    "like", [PAGED, RAGGED, HND, RAGGED_HND, SPLIT], ids=lambda case: case.name
)
BOTH = pytest.mark.parametrize("like", [PAGED, RAGGED], ids=lambda case: case.name)
FIRST = ((30, 5, 0), (100, 90, 7))  # 35 rows
SMALLER = ((3, 0, 9), (40, 0, 64))
LARGER_KEYS = ((1, 33, 1), (300, 150, 1))
EMPTY = ((0, 0, 0), (0, 0, 0))


class Graphs(Stage):
    def __init__(self, like: Case, target, recorder=None, limits: Limits | None = None, **options):
        pages = 1500 // like.page_size if like.paged else 0
        limits = limits or Limits(batch=3, rows=40, pages=pages, tokens=0 if like.paged else 600)
        super().__init__(like, limits, target, **options)
        self.recorder = recorder

    def capture(self, run=None):
        run = run or self.run
        run()
        return capture(self.recorder, self.device, run)

    def started(self, *lengths):
        inputs = self.make(*(lengths or FIRST))
        self.plan(inputs)
        return inputs, self.capture()

    def check_run(self, inputs, graph=None, **options) -> None:
        self.load(inputs)
        self.run(**options) if graph is None else graph.replay()
        self.check(inputs)

    def check_plans(self, *batches, graph=None, **options) -> None:
        for seed, lengths in enumerate(batches):
            inputs = self.make(*lengths, seed, **options)
            self.plan(inputs)
            self.check_run(inputs, graph)

    def refuses(self, says: str, *lengths, **options) -> None:
        inputs = self.make(*lengths, **options)
        refused(says, runner.plan, self.wrapper, inputs)


def with_options(inputs, **changes):
    return dataclasses.replace(inputs, case=dataclasses.replace(inputs.case, **changes))


def for_graphs(target, **buffers):
    on = {"backend": target.backend, "device": target.device}
    return runner.make_wrapper(PAGED, use_cuda_graph=True, **on, **buffers)


@CASES
def test_plans_go_into_the_buffers(target, like):
    for where in sorted({"cpu", target.device}):
        stage = Graphs(like, target)
        for lengths in (FIRST, SMALLER, LARGER_KEYS, FIRST):
            inputs = stage.make(*lengths, on_host=where == "cpu")
            stage.plan(inputs)
            stage.check_run(inputs)
            arrays = (inputs.qo_indptr, *table(inputs))[: len(stage.buffers)]
            for (name, buffer), given in zip(stage.buffers.items(), arrays, strict=True):
                assert torch.equal(buffer[: given.numel()].cpu(), given.cpu()), name
                assert getattr(stage.wrapper, f"_{name}").data_ptr() == buffer.data_ptr()
                given.fill_(-1)
            stage.check_run(inputs)


@pytest.mark.parametrize("begin", [1, 60], ids=["inside", "over_256_bytes"])
def test_buffers_that_adjoin(target, begin):
    """One transfer writes them, and no memory around them."""
    memory = torch.full((80,), -9, dtype=torch.int32, device=target.device)
    before, *parts, _ = memory.split([begin, 4, 4, 3, 69 - begin])
    names = ("paged_kv_indptr_buf", "qo_indptr_buf", "paged_kv_last_page_len_buf")
    indices = torch.zeros(99, dtype=torch.int32, device=target.device)
    buffers = dict(zip(names, parts, strict=True), paged_kv_indices_buf=indices)
    wrapper = for_graphs(target, **buffers)
    for qo_lens, kv_lens in (FIRST, SMALLER, LARGER_KEYS):
        case = dataclasses.replace(PAGED, qo_lens=qo_lens, kv_lens=kv_lens)
        inputs = build(case, device=target.device)
        runner.plan(wrapper, inputs)
        wanted = (inputs.kv_indptr, inputs.qo_indptr, inputs.last_page_len)
        for part, given in zip(parts, wanted, strict=True):
            assert part.tolist() == given.tolist()
        assert set(before.tolist()) == set(memory[begin + 11 :].tolist()) == {-9}


def test_workspace_size_of_a_fixed_split(target):
    """workspace_size() returns what these lengths need, not what later lengths could need. The
    fuzzer runs in so many bytes."""
    case = dataclasses.replace(SPLIT, qo_lens=FIRST[0], kv_lens=FIRST[1])
    inputs = build(case, device=target.device)
    positional, options = runner.plan_arguments(inputs)
    plain = runner.make_wrapper(case, backend=target.backend, device=target.device)
    stage = Graphs(SPLIT, target)
    sizes = [one.workspace_size(*positional, **options) for one in (plain, stage.wrapper)]
    assert sizes[0][0] == sizes[1][0] > 0
    assert sizes[1][1] < 1 << 20


def test_the_buffers_themselves_as_arguments(target):
    """Engines write them and pass them; the indices are longer than any batch needs, or begin
    elsewhere in their buffer."""
    stage = Graphs(PAGED, target)
    for lengths in (FIRST, SMALLER):
        inputs = stage.make(*lengths, on_host=False)
        given = (inputs.qo_indptr, *table(inputs))
        stage.buffers["paged_kv_indices_buf"].fill_(10**6)
        for buffer, values in zip(stage.buffers.values(), given, strict=True):
            buffer[: values.numel()] = values
        options = {"causal": True, "q_data_type": PAGED.dtype}
        stage.wrapper.plan(*stage.buffers.values(), 4, 2, 64, 16, **options)
        stage.check_run(inputs)
    shifted = stage.buffers["paged_kv_indices_buf"][3 : 3 + inputs.indices.numel()]
    shifted.copy_(inputs.indices)
    stage.plan(dataclasses.replace(inputs, indices=shifted))
    stage.check_run(inputs)


def test_page_indices_in_their_buffer(target):
    """plan() copies no entries after the last request's pages, for which there may be no room.
    run() reads the buffer, where engines may write other pages on the device."""
    for where in sorted({"cpu", target.device}):
        stage = Graphs(PAGED, target)
        inputs = stage.make(*FIRST, on_host=where == "cpu")
        spare = torch.full((2 * stage.limits.pages,), -1).to(inputs.indices)
        stage.plan(dataclasses.replace(inputs, indices=torch.cat([inputs.indices, spare])))
        stage.check_run(inputs)
        buffer = stage.buffers["paged_kv_indices_buf"]
        assert set(buffer[inputs.indices.numel() :].tolist()) == {-7}
        page, free = int(inputs.indices[2]), stage.limits.pages - 1
        for pool in (stage.k, stage.v):
            pool[free] = pool[page]
            pool[page] = float("nan")
        buffer[2] = free
        stage.run()
        stage.check(inputs)


@BOTH
def test_lengths_changed_in_the_buffers(target, like, monkeypatch):
    """run() computes the lengths of plan(); PREFLASH_DEBUG=1 refuses buffers that hold others."""
    for debug in ("0", "1"):
        monkeypatch.setenv("PREFLASH_DEBUG", debug)
        stage = Graphs(like, target)
        inputs = stage.make(*FIRST, on_host=False)
        stage.plan(inputs)
        for name in set(stage.buffers) - {"paged_kv_indices_buf"}:
            buffer = stage.buffers[name]
            planned = int(buffer[1])
            buffer[1] = planned + 1
            if debug == "1":
                says = rf"{name}\[1\] = {planned + 1}, and plan\(\) read {planned}: .*call plan"
                refused(says, stage.run)
            else:
                stage.check_run(inputs)
            buffer[1] = planned
        stage.check_run(inputs)


def test_a_dense_mask_in_the_storage_of_its_buffer(target):
    """The buffer begins in the dense mask, so that bits would overwrite what is not packed yet."""
    stage = Graphs(dataclasses.replace(PAGED, mask=MaskKind.CUSTOM_UINT8), target, masked=True)
    inputs = stage.make(*FIRST)
    whole = torch.zeros(8192, dtype=torch.uint8, device=target.device)
    dense = whole[: inputs.custom_mask.numel()].copy_(inputs.custom_mask)
    stage.wrapper = for_graphs(target, **stage.buffers | {"custom_mask_buf": whole[16:]})
    stage.plan(dataclasses.replace(inputs, custom_mask=dense))
    stage.check_run(inputs)
    stage.check_plans(FIRST, mask=MaskKind.CAUSAL)  # forgets the mask


@CASES
def test_a_replay_computes_the_last_plan(target, like, recorder):
    """The smallest capture, of one key, sets no limit on keys. Two graphs have plan()'s own options
    and a window of run(); a plan with other options leaves them theirs, with the new lengths."""
    stage = Graphs(like, target, recorder)
    _, graph = stage.started((40, 0, 0), (1, 0, 0))
    windowed = stage.capture(lambda: stage.run(window_left=11))
    place = stage.wrapper._int_workspace_buffer.data_ptr()
    batches = [FIRST, SMALLER, LARGER_KEYS, EMPTY, ((35, 0, 0), (1, 90, 0))]
    batches += [((1, 1, 1), (1200, 9, 100))] * like.paged
    inputs = [stage.make(*lengths) for lengths in batches] + [stage.random(n) for n in range(12)]
    for number, one in enumerate(inputs):
        causal = number % 3 != 1
        stage.plan(one, causal=causal)
        stage.check_run(one if causal else with_options(one, mask=MaskKind.NONE))
        stage.check_run(one, graph)
        stage.check_run(with_options(one, window_left=11), windowed)
        assert not causal or stage.wrapper._int_workspace_buffer.data_ptr() == place


@BOTH
def test_masked_runs_replay_the_next_mask(target, recorder, like):
    """A capture with a mask needs one in every plan, and a capture without one takes none."""
    masked = dataclasses.replace(like, mask=MaskKind.CUSTOM)
    stage = Graphs(masked, target, recorder, masked=True)
    _, graph = stage.started()
    for mask in (MaskKind.CUSTOM, MaskKind.PACKED):
        stage.check_plans(SMALLER, LARGER_KEYS, FIRST, graph=graph, mask=mask)
    stage.refuses(r"captured a run\(\) with a custom mask", *FIRST, mask=MaskKind.CAUSAL)
    stage = Graphs(like, target, recorder, masked=True)
    inputs, graph = stage.started()
    stage.refuses("without one", *FIRST, mask=MaskKind.CUSTOM)
    stage.check_run(inputs, graph)


def plan_without_readback(wrapper, inputs, **changes) -> None:
    """Plans as SGLang does in place of begin_forward(): fills the buffers on the device and passes
    the lengths, which it knows on the host, to the wrapper's _cached_module."""
    case, w = inputs.case, wrapper
    known = {
        "qo_indptr_last": sum(case.qo_lens), "max_q_len": max(case.qo_lens),
        "max_kv_len": max(case.kv_lens), "batch_size": case.batch_size,
        "num_qo_heads": case.num_qo_heads, "num_kv_heads": case.num_kv_heads,
        "prefix_len_ptr": None, "token_pos_in_items_ptr": None, "max_item_len_ptr": None,
        "token_pos_in_items_len": 0, "cached_q_data_type": case.dtype,
        "cached_kv_data_type": case.dtype, "cached_o_data_type": None, "block_tables": None,
    }  # fmt: skip
    for name, value in known.items():
        setattr(w, f"_{name}", value)
    buffers = (w._qo_indptr_buf, w._paged_kv_indptr_buf, w._paged_kv_indices_buf,
               w._paged_kv_last_page_len_buf)  # fmt: skip
    for buffer, values in zip(buffers, (inputs.qo_indptr, *table(inputs)), strict=True):
        buffer[: values.numel()].copy_(values)
    heads = {"qo": case.num_qo_heads, "kv": case.num_kv_heads, "page_size": 16, **changes}
    w._plan_info = w._cached_module.plan(
        w._float_workspace_buffer, w._int_workspace_buffer, w._pin_memory_int_workspace_buffer,
        inputs.qo_indptr.cpu(), inputs.kv_indptr.cpu(),
        torch.tensor(case.kv_lens, dtype=torch.int32), w._max_total_num_rows, case.batch_size,
        *heads.values(), True, case.head_dim, case.dim_vo, True, -1, -1, False, 0,
    )  # fmt: skip


STEP = {"causal": True, "window_left": 20, "logits_soft_cap": 25.0, "sm_scale": 0.2}


@pytest.mark.parametrize("through", ["begin_forward", "_cached_module"])
def test_a_captured_forward_is_refreshed(target, recorder, through):
    """begin_forward() and SGLang's plan know no options; a captured forward() has them."""
    stage, outs = Graphs(PAGED, target, recorder), []

    def begin(inputs, through="begin_forward"):
        stage.load(inputs)
        if through == "_cached_module":
            plan_without_readback(stage.wrapper, inputs)
        else:
            positional, _ = runner.plan_arguments(inputs)
            stage.wrapper.begin_forward(*positional, q_data_type=inputs.case.dtype)

    begin(stage.make(*FIRST))
    graph = stage.capture(
        lambda: outs.append(stage.wrapper.forward(stage.q, *stage.cache(), **STEP))
    )
    pipeline = Pipeline(sm_scale=0.2, causal=True, window_left=20, soft_cap=25.0)
    for lengths in (SMALLER, EMPTY, FIRST, LARGER_KEYS):
        inputs = stage.make(*lengths)
        begin(inputs, through)
        graph.replay()
        expected = reference(inputs, pipeline=pipeline)
        compare(outs[-1][: inputs.q.shape[0]], None, expected, soft_cap=25.0).check()
    if through == "begin_forward":
        return
    stage.check_run(inputs)  # with the arguments of the plan
    says = "num_qo_heads, num_kv_heads, page_size = 8, 2, 16"
    refused(says, plan_without_readback, stage.wrapper, inputs, qo=8)
    for name, value, error, says in (
        ("_batch_size", 4, AttributeError, "_batch_size is 3"),
        ("_prefix_len_ptr", inputs.qo_indptr, NotImplementedError, "multi-item"),
    ):
        refused(says, setattr, stage.wrapper, name, value, error=error)


def test_masks_through_the_cached_module(target, recorder):
    """The bits that the engine has put into the buffer are those that count."""
    stage = Graphs(MASKED, target, recorder, masked=True)
    _, graph = stage.started()
    inputs = stage.make(*LARGER_KEYS, 3)
    bits = torch.cat([preflash.packbits(mask.flatten(), "little") for mask in inputs.masks])
    stage.wrapper._custom_mask_buf[: bits.numel()].copy_(bits)
    plan_without_readback(stage.wrapper, inputs)
    stage.check_run(inputs, graph)


# Lengths, and what is said of them.
GROWTH = [
    (((1,) * 4, (9,) * 4), "the batch has 4 requests; .* fixed at 3"),
    (((1,) * 2, (9,) * 2), "the batch has 2 requests; .* fixed at 3"),
    (((30, 6, 0), (100, 90, 7)), r"qo_indptr\[-1\] - qo_indptr\[0\] = 36.* 35"),
    (((1, 1, 1), (1000, 480, 40)), "paged_kv_indices_buf has room for 93"),
]


@pytest.mark.parametrize("captured", [False, True])
def test_refused_growth(target, captured, recorder):
    """The attributes are those that engines read. A refused first plan sets no limit of rows."""
    stage = Graphs(PAGED, target, recorder)
    inputs, wrapper = stage.make(*FIRST), stage.wrapper
    assert wrapper.is_cuda_graph_enabled is wrapper._use_cuda_graph is True
    stage.refuses("head_dim", (1, 0, 0), (9, 9, 9), head_dim=100)
    assert (wrapper._fixed_batch_size, wrapper._max_total_num_rows) == (3, None)
    stage.plan(inputs)
    graph = stage.capture() if captured else None
    for lengths, says in GROWTH:
        stage.refuses(says, *lengths)
        stage.check_run(inputs, graph)
    assert (wrapper._batch_size, wrapper._max_total_num_rows) == (3, 35)
    assert wrapper._custom_mask_buf is None


def test_captures_set_limits(target, recorder):
    """A graph holds q and the pool as they were; of several, the largest counts."""
    stage = Graphs(PAGED, target, recorder)
    stage.check_plans(FIRST, SMALLER)  # 12 rows
    graph = stage.capture(lambda: stage.run(rows=20))
    far, longer = stage.make(*SMALLER), ((20, 1, 0), (30, 30, 0))
    far.indices[0] = 93
    refused("93 pages", runner.plan, stage.wrapper, far)
    stage.refuses(r"qo_indptr\[-1\] = 21: .* 20 rows of q", *longer)
    stage.refuses(r"page_size=8: .* pages of 16", *SMALLER, page_size=8)
    for rows in (30, 12):
        stage.capture(lambda rows=rows: stage.run(rows=rows))
    runner.plan(stage.wrapper, stage.make(*longer))
    stage.refuses(r"qo_indptr\[-1\] = 31: .* 30 rows of q", (30, 1, 0), (30, 30, 0))
    stage.check_plans(SMALLER, graph=graph)


def test_captured_tokens_are_the_limit(target, recorder):
    stage = Graphs(RAGGED, target, recorder)
    stage.k, stage.v = stage.k[:200], stage.v[:200]
    inputs, graph = stage.started(*SMALLER)
    stage.refuses(r"kv_indptr\[-1\] = 201: .* 200 tokens", (3, 0, 9), (100, 101, 0))
    stage.check_run(inputs, graph)


def test_copies_and_workspaces_of_a_captured_wrapper(target, recorder):
    stage = Graphs(PAGED, target, recorder)
    inputs = stage.make(*FIRST)
    stage.plan(inputs)
    refused("a copy would overwrite", copy.copy, stage.wrapper, error=TypeError)
    work = [runner.workspace(target.device), runner.workspace(target.device)]
    stage.wrapper.reset_workspace_buffer(*work)
    stage.check_run(inputs)
    graph = stage.capture()
    refused("holds on to the workspaces", stage.wrapper.reset_workspace_buffer, *work)
    # Planned into the caller's memory, where later plans go alone.
    small = stage.make(*SMALLER)
    stage.plan(small, causal=False)
    stage.check_run(small, graph)


def test_masks_need_room(target):
    """The mask takes 375 + 57 bytes, and 8 after them."""
    stage = Graphs(MASKED, target, masked=True)
    whole = stage.buffers["custom_mask_buf"]
    for buffer, says in (
        (None, "needs custom_mask_buf"),
        (whole[:431], "custom_mask_buf has 431 bytes; .* 432, .* 8 bytes"),
        (whole[:439], "custom_mask_buf has 439 bytes; .* 432, .* 8 bytes"),
        (whole[:440], None),
    ):
        stage.wrapper = for_graphs(target, **stage.buffers | {"custom_mask_buf": buffer})
        stage.refuses(says, *FIRST) if says else stage.check_plans(FIRST)


@pytest.mark.parametrize("repeated", [False, True])
def test_a_plan_interrupted_anywhere(target, recorder, repeated):
    """An interrupted plan() leaves the old plan, the new one or none, never a part of one. On the
    CPU nothing interrupts a plan that C++ makes by itself."""
    options = {} if repeated else {"non_blocking": True}  # unlike those of the plan before
    stage = Graphs(PAGED, target, recorder)
    old, new = stage.make(*FIRST, 1), stage.make(*SMALLER, 2)
    stage.plan(old)
    graph, ends = stage.capture(), collections.Counter()
    expected = {30: (old, reference(old)), 3: (new, reference(new))}
    for step in itertools.count(0, 7):
        stage.plan(old)
        reached = interrupted(lambda: runner.plan(stage.wrapper, new, **options), step)
        first_rows = stage.wrapper.variant and int(stage.buffers["qo_indptr_buf"][1])
        ends[first_rows] += 1
        if first_rows is None:
            refused("before plan", stage.run)
            if ends[None] == 1:
                stage.check_plans(SMALLER, FIRST, graph=graph)
        else:
            inputs, result = expected[first_rows]
            stage.load(inputs)
            graph.replay()
            stage.check(inputs, expected=result)
        if not reached:
            break
    stage.refuses("36", (36, 0, 0), (9, 9, 9))  # the limit of rows is as before
    assert ends.keys() - {None} == {30, 3}, ends
    assert repeated or ends[None] > 0, ends


@pytest.mark.parametrize("by_class", [False, True], ids=["flag", "class"])
def test_decode(target, by_class, recorder):
    like = dataclasses.replace(PAGED, num_qo_heads=8, mask=MaskKind.NONE)
    stage = Graphs(like, target, recorder, Limits(batch=3, rows=3, pages=120))
    buffers = [
        stage.buffers[f"paged_kv_{name}_buf"] for name in ("indptr", "indices", "last_page_len")
    ]
    work = runner.workspace(target.device)
    if by_class:
        stage.wrapper = preflash.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(work, *buffers)
    else:
        make = preflash.BatchDecodeWithPagedKVCacheWrapper
        stage.wrapper = make(work, "NHD", True, False, *buffers, backend=target.backend)
    graph = None
    for seed, kv_lens in enumerate(((90, 33, 7), (1, 0, 17), (1000, 512, 100))):
        inputs = stage.make((1, 1, 1), kv_lens, seed, on_host=False)
        stage.load(inputs)
        plan_decode(stage.wrapper, inputs)
        graph = graph or stage.capture()
        stage.check_run(inputs, graph)
