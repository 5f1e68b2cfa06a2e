"""use_cuda_graph=True: what plan() keeps where, what a captured run replays, what is refused."""

import copy
import dataclasses

import preflash
import pytest
import torch
from graph_stage import Limits, Stage, capture, recorder  # noqa: F401
from preflash import _core
from preflash._wrappers import graph as _graph
from preflash.testing import Case, MaskKind, build, compare, reference, runner
from preflash.testing.oracle import Pipeline
from test_interrupts import interrupted

PAGED = Case("paged", (), (), 4, 2, 64, page_size=16, mask=MaskKind.CAUSAL)
RAGGED = dataclasses.replace(PAGED, name="ragged", page_size=0)
HND = dataclasses.replace(PAGED, name="hnd", layout="HND", page_size=4)
RAGGED_HND = dataclasses.replace(RAGGED, name="ragged_hnd", layout="HND")
SPLIT = dataclasses.replace(PAGED, name="split", fixed_split_size=64)
CASES = pytest.mark.parametrize(
    "like", [PAGED, RAGGED, HND, RAGGED_HND, SPLIT], ids=lambda case: case.name
)
FIRST = ((30, 5, 0), (100, 90, 7))  # 35 rows
SMALLER = ((3, 0, 9), (40, 0, 64))
LARGER_KEYS = ((1, 33, 1), (300, 150, 1))


def limits_of(like: Case) -> Limits:
    if like.paged:
        return Limits(batch=3, rows=40, pages=1500 // like.page_size)
    return Limits(batch=3, rows=40, tokens=600)


def staged(like: Case, target, **options) -> Stage:
    return Stage(like, limits_of(like), target, **options)


# --- plan() and the buffers --------------------------------------------------


@pytest.mark.parametrize("on_host", [True, False], ids=["host", "device"])
@CASES
def test_plans_go_into_the_buffers(target, like, on_host):
    stage = staged(like, target)
    for lengths in (FIRST, SMALLER, LARGER_KEYS, FIRST):
        inputs = stage.make(*lengths, on_host=on_host)
        stage.plan(inputs)
        stage.run()
        stage.check(inputs)
        arrays = {"qo_indptr_buf": inputs.qo_indptr}
        if like.paged:
            arrays["paged_kv_indptr_buf"] = inputs.kv_indptr
            arrays["paged_kv_indices_buf"] = inputs.indices
            arrays["paged_kv_last_page_len_buf"] = inputs.last_page_len
        else:
            arrays["kv_indptr_buf"] = inputs.kv_indptr
        for name, given in arrays.items():
            buffer = stage.buffers[name]
            assert torch.equal(buffer[: given.numel()].cpu(), given.cpu()), name
            assert getattr(stage.wrapper, f"_{name}").data_ptr() == buffer.data_ptr()


@pytest.mark.parametrize("begin", [1, 60], ids=["inside", "over_256_bytes"])
def test_buffers_that_adjoin(target, begin):
    """They are written in one transfer, which keeps to them."""
    memory = torch.full((80,), -9, dtype=torch.int32, device=target.device)
    before, *parts, _ = memory.split([begin, 4, 4, 3, 69 - begin])
    names = ("paged_kv_indptr", "qo_indptr", "paged_kv_last_page_len")
    wrapper = preflash.BatchPrefillWithPagedKVCacheWrapper(
        runner.workspace(target.device),
        backend=target.backend,
        use_cuda_graph=True,
        paged_kv_indices_buf=torch.zeros(99, dtype=torch.int32, device=target.device),
        **{f"{name}_buf": part for name, part in zip(names, parts, strict=True)},
    )
    for lengths in (FIRST, SMALLER, LARGER_KEYS):
        inputs = build(
            dataclasses.replace(PAGED, qo_lens=lengths[0], kv_lens=lengths[1]),
            device=target.device,
        )
        runner.plan(wrapper, inputs)
        wanted = (inputs.kv_indptr, inputs.qo_indptr, inputs.last_page_len)
        for part, given in zip(parts, wanted, strict=True):
            assert part.tolist() == given.tolist()
        assert set(before.tolist()) == set(memory[begin + 11 :].tolist()) == {-9}


def test_workspace_size_of_a_fixed_split(target):
    """workspace_size() is what these lengths need, not all that later lengths could need."""
    sizes = []
    for use_cuda_graph in (False, True):
        stage = staged(SPLIT, target) if use_cuda_graph else None
        inputs = build(dataclasses.replace(SPLIT, qo_lens=FIRST[0], kv_lens=FIRST[1]))
        wrapper = runner.make_wrapper(inputs.case, backend=target.backend, device=target.device)
        wrapper = stage.wrapper if use_cuda_graph else wrapper
        positional, options = runner.plan_arguments(inputs)
        sizes.append(wrapper.workspace_size(*positional, **options))
    assert sizes[0][0] == sizes[1][0] > 0
    assert sizes[1][1] < 1 << 20
    exact = runner.workspace(target.device, sizes[1][0])
    device = target.device
    buffers = [
        torch.zeros(n, dtype=torch.int32, device=device) for n in (4, 4, inputs.indices.numel(), 3)
    ]
    wrapper = preflash.BatchPrefillWithPagedKVCacheWrapper(
        exact, "NHD", True, *buffers, backend=target.backend
    )
    inputs = build(inputs.case, device=device)
    runner.plan(wrapper, inputs)
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()


def test_later_changes_of_the_arguments_do_not_count(target):
    stage = staged(PAGED, target)
    inputs = stage.make(*FIRST)
    given = dataclasses.replace(inputs, indices=inputs.indices.clone())
    stage.plan(given)
    given.indices.zero_()
    stage.run()
    stage.check(inputs)


def test_the_buffers_themselves_as_arguments(target):
    """Engines write them and pass them; the indices are longer than any batch needs."""
    stage = staged(PAGED, target)
    for lengths in (FIRST, SMALLER):
        inputs = stage.make(*lengths, on_host=False)
        stage.load(inputs)
        w, buffers = stage.wrapper, stage.buffers
        buffers["qo_indptr_buf"].copy_(inputs.qo_indptr)
        buffers["paged_kv_indptr_buf"].copy_(inputs.kv_indptr)
        buffers["paged_kv_indices_buf"].fill_(10**6)
        buffers["paged_kv_indices_buf"][: inputs.indices.numel()] = inputs.indices
        buffers["paged_kv_last_page_len_buf"].copy_(inputs.last_page_len)
        w.plan(w._qo_indptr_buf, w._paged_kv_indptr_buf, w._paged_kv_indices_buf,
               w._paged_kv_last_page_len_buf, 4, 2, 64, 16, causal=True,
               q_data_type=PAGED.dtype)  # fmt: skip
        stage.run()
        stage.check(inputs)


def test_another_part_of_a_buffer_as_argument(target):
    stage = staged(PAGED, target)
    inputs = stage.make(*FIRST)
    buffer = stage.buffers["paged_kv_indices_buf"]
    shifted = buffer[3 : 3 + inputs.indices.numel()]
    shifted.copy_(inputs.indices)
    stage.plan(dataclasses.replace(inputs, indices=shifted))
    stage.run()
    stage.check(inputs)


def test_page_indices_are_read_when_a_run_is(target):
    """A page that moves between plan() and run(), as engines write indices on the device."""
    stage = staged(PAGED, target)
    inputs = stage.make(*FIRST)
    stage.plan(inputs)
    page = int(inputs.indices[2])
    free = stage.limits.pages - 1
    for pool in (stage.k, stage.v):
        pool[free] = pool[page]
        pool[page] = float("nan")
    stage.buffers["paged_kv_indices_buf"][2] = free
    stage.run()
    stage.check(inputs)


@CASES
def test_lengths_changed_in_the_buffers(target, like, monkeypatch):
    """run() computes the lengths of plan(); PREFLASH_DEBUG=1 refuses buffers that hold others."""
    names = ["qo_indptr_buf", "paged_kv_indptr_buf" if like.paged else "kv_indptr_buf"]
    names += ["paged_kv_last_page_len_buf"] * like.paged
    for debug in ("0", "1"):
        monkeypatch.setenv("PREFLASH_DEBUG", debug)
        stage = staged(like, target)
        inputs = stage.make(*FIRST, on_host=False)
        stage.plan(inputs)
        for name in names:
            buffer = stage.buffers[name]
            planned = int(buffer[1])
            buffer[1] = planned + 1
            if debug == "1":
                match = rf"{name}\[1\] = {planned + 1}, and plan\(\) read {planned}: .*call plan"
                with pytest.raises(ValueError, match=match):
                    stage.run()
            else:
                stage.run()
                stage.check(inputs)
            buffer[1] = planned
        stage.run()
        stage.check(inputs)


@pytest.mark.parametrize("kind", [MaskKind.CUSTOM, MaskKind.CUSTOM_UINT8, MaskKind.PACKED])
@pytest.mark.parametrize("like", [PAGED, RAGGED], ids=lambda case: case.name)
def test_masks_in_their_buffers(target, like, kind):
    stage = staged(dataclasses.replace(like, mask=kind), target, masked=True)
    for lengths in (FIRST, SMALLER, FIRST):
        inputs = stage.make(*lengths)
        stage.plan(inputs)
        stage.run()
        stage.check(inputs)
    packed = torch.cat([_packed(mask) for mask in inputs.masks])
    assert torch.equal(stage.buffers["custom_mask_buf"][: packed.numel()].cpu(), packed.cpu())
    begins = stage.buffers["mask_indptr_buf"].tolist()
    assert begins == [0, (30 * 100 + 7) // 8, (30 * 100 + 7) // 8 + (5 * 90 + 7) // 8,
                      (30 * 100 + 7) // 8 + (5 * 90 + 7) // 8]  # fmt: skip


def _packed(mask: torch.Tensor) -> torch.Tensor:
    return preflash.packbits(mask.flatten(), bitorder="little")


def test_a_plan_without_a_mask_forgets_the_one_before(target):
    stage = staged(dataclasses.replace(PAGED, mask=MaskKind.CUSTOM), target, masked=True)
    stage.plan(stage.make(*FIRST))
    inputs = stage.make(*FIRST, mask=MaskKind.CAUSAL)
    stage.plan(inputs)
    stage.run()
    stage.check(inputs)


# --- captured runs -----------------------------------------------------------


@CASES
def test_a_replay_computes_what_was_planned_last(target, like, recorder):  # noqa: F811
    stage = staged(like, target)
    inputs = stage.make(*FIRST)
    stage.plan(inputs)
    stage.run()
    graph = capture(recorder, target.device, stage.run)
    before = stage.wrapper._int_workspace_buffer.data_ptr()
    batches = [FIRST, SMALLER, LARGER_KEYS, ((0, 0, 0), (0, 0, 0)), ((35, 0, 0), (1, 90, 0))]
    for lengths in batches:
        inputs = stage.make(*lengths)
        stage.plan(inputs)
        graph.replay()
        stage.check(inputs)
    assert stage.wrapper._int_workspace_buffer.data_ptr() == before
    stage.run()
    stage.check(inputs)


@pytest.mark.parametrize("like", [PAGED, RAGGED, SPLIT], ids=lambda case: case.name)
def test_random_plans(target, like, recorder):  # noqa: F811
    limits = Limits(5, 60, pages=90) if like.paged else Limits(5, 60, tokens=900)
    stage = Stage(like, limits, target)
    stage.plan(stage.make((60, 0, 0, 0, 0), (10,) * 5))
    stage.run()
    graph = capture(recorder, target.device, stage.run)
    for seed in range(25):
        inputs = stage.random(seed)
        stage.plan(inputs)
        graph.replay()
        stage.check(inputs)


def test_the_smallest_capture_sets_no_limit_on_keys(target, recorder):  # noqa: F811
    """Captured with one key, replayed with as many as there is memory for."""
    stage = staged(PAGED, target)
    stage.plan(stage.make((35, 0, 0), (1, 0, 0)))
    stage.run()
    graph = capture(recorder, target.device, stage.run)
    inputs = stage.make((1, 1, 1), (1200, 9, 100))
    stage.plan(inputs)
    graph.replay()
    stage.check(inputs)


def forward(stage: Stage, **options) -> None:
    out = stage.wrapper.forward(stage.q, *stage.cache(), **options)
    stage.out.copy_(out)


STEP = {"causal": True, "window_left": 20, "logits_soft_cap": 25.0, "sm_scale": 0.2}


def begin_forward(stage: Stage, inputs) -> None:
    stage.load(inputs)
    positional, _ = runner.plan_arguments(inputs)
    stage.wrapper.begin_forward(*positional, q_data_type=inputs.case.dtype)


def check_step(stage: Stage, inputs, out=None) -> None:
    out = stage.out if out is None else out
    pipeline = Pipeline(sm_scale=0.2, causal=True, window_left=20, soft_cap=25.0)
    expected = reference(inputs, pipeline=pipeline)
    compare(out[: inputs.q.shape[0]], None, expected, soft_cap=25.0).check()


def test_forward_is_refreshed_by_begin_forward(target, recorder):  # noqa: F811
    """begin_forward() knows no options; a captured forward() has them."""
    stage = staged(PAGED, target)
    begin_forward(stage, stage.make(*FIRST))
    forward(stage, **STEP)
    outs = []

    def captured():
        outs.append(stage.wrapper.forward(stage.q, *stage.cache(), **STEP))

    graph = capture(recorder, target.device, captured)
    for lengths in (SMALLER, LARGER_KEYS, FIRST):
        inputs = stage.make(*lengths)
        begin_forward(stage, inputs)
        graph.replay()
        check_step(stage, inputs, outs[0])


def test_every_captured_variant_is_refreshed(target, recorder):  # noqa: F811
    """Two graphs of one wrapper: plan()'s own options, and a window of run()."""
    stage = staged(PAGED, target)
    stage.plan(stage.make(*FIRST))
    stage.run()
    stage.run(window_left=11)
    usual = capture(recorder, target.device, stage.run)
    windowed = capture(recorder, target.device, lambda: stage.run(window_left=11))
    for lengths in (SMALLER, LARGER_KEYS):
        inputs = stage.make(*lengths)
        stage.plan(inputs)
        windowed.replay()
        stage.check(dataclasses.replace(
            inputs, case=dataclasses.replace(inputs.case, window_left=11)))  # fmt: skip
        usual.replay()
        stage.check(inputs)
    # A plan with other options leaves both as they were captured, with the new lengths.
    inputs = stage.make(*FIRST)
    stage.plan(inputs, causal=False)
    stage.run()
    stage.check(_with(inputs, mask=MaskKind.NONE))
    usual.replay()
    stage.check(inputs)
    windowed.replay()
    stage.check(_with(inputs, window_left=11))


def _with(inputs, **changes):
    return dataclasses.replace(inputs, case=dataclasses.replace(inputs.case, **changes))


def test_masked_runs_replay_the_next_mask(target, recorder):  # noqa: F811
    stage = staged(dataclasses.replace(PAGED, mask=MaskKind.CUSTOM), target, masked=True)
    stage.plan(stage.make(*FIRST))
    stage.run()
    graph = capture(recorder, target.device, stage.run)
    for seed, lengths in enumerate((SMALLER, LARGER_KEYS, FIRST)):
        inputs = stage.make(*lengths, seed, mask=(MaskKind.CUSTOM, MaskKind.PACKED)[seed % 2])
        stage.plan(inputs)
        graph.replay()
        stage.check(inputs)
    with pytest.raises(ValueError, match=r"captured a run\(\) with a custom mask"):
        stage.plan(stage.make(*FIRST, mask=MaskKind.CAUSAL))


def test_a_mask_where_none_was_captured(target, recorder):  # noqa: F811
    stage = staged(PAGED, target, masked=True)
    inputs = stage.make(*FIRST)
    stage.plan(inputs)
    stage.run()
    graph = capture(recorder, target.device, stage.run)
    with pytest.raises(ValueError, match="without one"):
        runner.plan(stage.wrapper, stage.make(*FIRST, mask=MaskKind.CUSTOM))
    graph.replay()
    stage.check(inputs)


def test_wrappers_that_share_a_workspace(target, recorder):  # noqa: F811
    """Split keys, so that both use it; their runs do not overlap."""
    workspace = runner.workspace(target.device)
    stages = [staged(like, target, workspace=workspace) for like in (SPLIT, SPLIT)]
    graphs = []
    for stage in stages:
        stage.plan(stage.make(*FIRST))
        stage.run()
        graphs.append(capture(recorder, target.device, stage.run))
    for lengths in (SMALLER, LARGER_KEYS):
        made = [stage.make(*lengths, seed) for seed, stage in enumerate(stages)]
        for stage, inputs in zip(stages, made, strict=True):
            stage.plan(inputs)
        for stage, inputs, graph in zip(stages, made, graphs, strict=True):
            graph.replay()
            stage.check(inputs)


# --- plans that engines make by themselves -----------------------------------


def plan_without_readback(wrapper, inputs, **options) -> None:
    """Plans as SGLang does in place of begin_forward(): fills the buffers on the device and passes
    the lengths, which it knows on the host, to the wrapper's _cached_module."""
    case = inputs.case
    assert wrapper.is_cuda_graph_enabled
    wrapper._qo_indptr_last = sum(case.qo_lens)
    wrapper._max_q_len, wrapper._max_kv_len = max(case.qo_lens), max(case.kv_lens)
    wrapper._batch_size = case.batch_size
    wrapper._num_qo_heads, wrapper._num_kv_heads = case.num_qo_heads, case.num_kv_heads
    wrapper._prefix_len_ptr = wrapper._token_pos_in_items_ptr = wrapper._max_item_len_ptr = None
    wrapper._token_pos_in_items_len = 0
    wrapper._qo_indptr_buf.copy_(inputs.qo_indptr)
    wrapper._paged_kv_indptr_buf.copy_(inputs.kv_indptr)
    wrapper._paged_kv_last_page_len_buf.copy_(inputs.last_page_len)
    wrapper._paged_kv_indices_buf[: inputs.indices.numel()].copy_(inputs.indices)
    wrapper._cached_q_data_type = wrapper._cached_kv_data_type = case.dtype
    wrapper._cached_o_data_type = wrapper._block_tables = None
    lens = torch.tensor(case.kv_lens, dtype=torch.int32)
    wrapper._plan_info = wrapper._cached_module.plan(
        wrapper._float_workspace_buffer,
        wrapper._int_workspace_buffer,
        wrapper._pin_memory_int_workspace_buffer,
        inputs.qo_indptr.cpu(),
        inputs.kv_indptr.cpu(),
        lens,
        wrapper._max_total_num_rows,
        case.batch_size,
        options.get("num_qo_heads", case.num_qo_heads),
        case.num_kv_heads,
        options.get("page_size", case.page_size),
        True,
        case.head_dim,
        case.dim_vo,
        True,
        -1,
        -1,
        False,
        0,
    )


def test_a_plan_through_the_cached_module(target, recorder):  # noqa: F811
    stage = staged(PAGED, target)
    begin_forward(stage, stage.make(*FIRST))
    forward(stage, **STEP)
    outs = []

    def captured():
        outs.append(stage.wrapper.forward(stage.q, *stage.cache(), **STEP))

    graph = capture(recorder, target.device, captured)
    for lengths in (SMALLER, ((0, 0, 0), (0, 0, 0)), LARGER_KEYS):
        inputs = stage.make(*lengths)
        stage.load(inputs)
        plan_without_readback(stage.wrapper, inputs)
        graph.replay()
        check_step(stage, inputs, outs[0])
    # run() means the arguments of the plan.
    stage.run()
    stage.check(inputs)
    with pytest.raises(ValueError, match="num_qo_heads, num_kv_heads, page_size = 8, 2, 16"):
        plan_without_readback(stage.wrapper, inputs, num_qo_heads=8)
    with pytest.raises(AttributeError, match="_batch_size is 3"):
        stage.wrapper._batch_size = 4
    with pytest.raises(NotImplementedError, match="multi-item"):
        stage.wrapper._prefix_len_ptr = inputs.qo_indptr


def test_masks_through_the_cached_module(target, recorder):  # noqa: F811
    """The bits that the engine has put into the buffer are those that count."""
    stage = staged(dataclasses.replace(PAGED, mask=MaskKind.CUSTOM), target, masked=True)
    stage.plan(stage.make(*FIRST))
    stage.run()
    graph = capture(recorder, target.device, stage.run)
    inputs = stage.make(*LARGER_KEYS, 3)
    stage.load(inputs)
    packed = torch.cat([_packed(mask) for mask in inputs.masks])
    stage.wrapper._custom_mask_buf[: packed.numel()].copy_(packed)
    plan_without_readback(stage.wrapper, inputs)
    graph.replay()
    stage.check(inputs)


# --- refusals ----------------------------------------------------------------


def check_still_planned(stage: Stage, inputs, graph=None) -> None:
    stage.load(inputs)
    stage.run() if graph is None else graph.replay()
    stage.check(inputs)


REFUSED_PLANS = {
    "more requests": (((1,) * 4, (9,) * 4), r"batch size is fixed.* 3"),
    "fewer requests": (((1,) * 2, (9,) * 2), r"batch size is fixed.* 3"),
    "more rows": (((30, 6, 0), (100, 90, 7)), r"qo_indptr\[-1\] - qo_indptr\[0\] = 36.* 35"),
    "more pages": (((1, 1, 1), (1000, 480, 40)), "paged_kv_indices_buf has room for 93"),
}


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize(("lengths", "match"), REFUSED_PLANS.values(), ids=REFUSED_PLANS)
def test_refused_growth(target, lengths, match, captured, recorder):  # noqa: F811
    stage = staged(PAGED, target)
    inputs = stage.make(*FIRST)
    stage.plan(inputs)
    stage.run()
    graph = capture(recorder, target.device, stage.run) if captured else None
    with pytest.raises(ValueError, match=match):
        runner.plan(stage.wrapper, stage.make(*lengths))
    check_still_planned(stage, inputs, graph)
    assert stage.wrapper._max_total_num_rows == 35


def test_a_refused_first_plan_sets_no_limit(target):
    stage = staged(PAGED, target)
    with pytest.raises(ValueError, match="window_left"):
        runner.plan(stage.wrapper, stage.make((1, 0, 0), (9, 9, 9)), window_left=-3)
    assert stage.wrapper._max_total_num_rows is None
    inputs = stage.make(*FIRST)
    stage.plan(inputs)
    stage.run()
    stage.check(inputs)


def test_what_was_captured_is_the_limit(target, recorder):  # noqa: F811
    """A graph holds q, k and v as long as they were."""
    stage = staged(PAGED, target)
    stage.plan(stage.make(*FIRST))
    inputs = stage.make(*SMALLER)  # 12 rows
    stage.plan(inputs)
    stage.run(rows=20)
    graph = capture(recorder, target.device, lambda: stage.run(rows=20))
    with pytest.raises(ValueError, match=r"qo_indptr\[-1\] = 21: .* 20 rows of q"):
        runner.plan(stage.wrapper, stage.make((20, 1, 0), (30, 30, 0)))
    far = stage.make(*SMALLER)
    far.indices[0] = 93
    with pytest.raises(ValueError, match="93 pages"):
        runner.plan(stage.wrapper, far)
    # Several graphs, one for every number of rows: the largest counts.
    capture(recorder, target.device, lambda: stage.run(rows=30))
    capture(recorder, target.device, lambda: stage.run(rows=12))
    runner.plan(stage.wrapper, stage.make((20, 1, 0), (30, 30, 0)))
    with pytest.raises(ValueError, match=r"qo_indptr\[-1\] = 31: .* 30 rows of q"):
        runner.plan(stage.wrapper, stage.make((30, 1, 0), (30, 30, 0)))
    stage.plan(inputs)
    with pytest.raises(ValueError, match=r"page_size=8: .* pages of 16"):
        runner.plan(stage.wrapper, stage.make(*SMALLER, page_size=8))
    check_still_planned(stage, inputs, graph)


def test_captured_tokens_are_the_limit(target, recorder):  # noqa: F811
    stage = staged(RAGGED, target)
    stage.k, stage.v = stage.k[:200], stage.v[:200]
    inputs = stage.make(*SMALLER)
    stage.plan(stage.make((12, 0, 0), (9, 9, 9)))
    stage.plan(inputs)
    stage.run()
    graph = capture(recorder, target.device, stage.run)
    with pytest.raises(ValueError, match=r"kv_indptr\[-1\] = 201: .* 200 tokens"):
        runner.plan(stage.wrapper, stage.make((3, 0, 9), (100, 101, 0)))
    check_still_planned(stage, inputs, graph)


def test_what_a_captured_wrapper_cannot_do(target, recorder):  # noqa: F811
    stage = staged(PAGED, target)
    inputs = stage.make(*FIRST)
    stage.plan(inputs)
    with pytest.raises(TypeError, match="a copy would overwrite"):
        copy.copy(stage.wrapper)
    work = [runner.workspace(target.device), runner.workspace(target.device)]
    stage.wrapper.reset_workspace_buffer(*work)
    check_still_planned(stage, inputs)
    graph = capture(recorder, target.device, stage.run)
    with pytest.raises(ValueError, match="holds on to the workspaces"):
        stage.wrapper.reset_workspace_buffer(*work)
    # Planned into the caller's memory, where nothing else goes from now on.
    small = stage.make(*SMALLER)
    stage.plan(small, causal=False)
    graph.replay()
    stage.check(small)


def test_an_interrupted_plan(target, recorder, monkeypatch):  # noqa: F811
    """Half of the buffers are written: there is no plan until there is another one."""
    stage = staged(PAGED, target)
    inputs = stage.make(*FIRST)
    stage.plan(inputs)
    stage.run()
    graph = capture(recorder, target.device, stage.run)
    copy_in = _graph.GraphMode.copy_in

    def interrupted(*arguments):
        copy_in(*arguments)
        raise KeyboardInterrupt

    inputs = stage.make(*SMALLER)
    with monkeypatch.context() as patch:
        patch.setattr(_graph.GraphMode, "copy_in", interrupted)
        with pytest.raises(KeyboardInterrupt):
            stage.plan(inputs)
    with pytest.raises(ValueError, match="before plan"):
        stage.run()
    for lengths in (SMALLER, FIRST):
        inputs = stage.make(*lengths)
        stage.plan(inputs)
        graph.replay()
        stage.check(inputs)
    with pytest.raises(ValueError, match="36"):
        runner.plan(stage.wrapper, stage.make((36, 0, 0), (9, 9, 9)))


@pytest.mark.parametrize("repeated", [False, True])
def test_a_plan_interrupted_anywhere(target, recorder, repeated, monkeypatch):  # noqa: F811
    """An interrupted plan() leaves the old plan, the new one or none, never a part of one. On the
    CPU nothing interrupts one that C++ makes by itself."""
    if not repeated:
        monkeypatch.setattr(_core, "plan_again", lambda *given: False)
    stage = staged(PAGED, target)
    old, new = stage.make(*FIRST, 1), stage.make(*SMALLER, 2)
    stage.plan(old)
    stage.run()
    graph = capture(recorder, target.device, stage.run)
    step, ends = 0, dict.fromkeys(("old", "new", "none"), 0)
    while True:
        stage.plan(old)
        before = stage.wrapper._plan
        ended = not interrupted(lambda: runner.plan(stage.wrapper, new), step)
        after = stage.wrapper._plan
        which = "old" if after is before else "none" if after.request is None else "new"
        ends[which] += 1
        if which == "none":
            with pytest.raises(ValueError, match="before plan"):
                stage.run()
        else:
            inputs = old if which == "old" else new
            stage.load(inputs)
            graph.replay()
            stage.check(inputs)
        if ended:
            break
        step += 5
    if repeated:
        assert min(ends["old"], ends["new"]) > 0, ends
    else:
        assert min(ends.values()) > 0, ends


def test_masks_need_room(target):
    like = dataclasses.replace(PAGED, mask=MaskKind.CUSTOM)
    stage = staged(like, target)
    with pytest.raises(ValueError, match="needs custom_mask_buf"):
        stage.plan(stage.make(*FIRST))
    stage = staged(like, target, masked=True)
    inputs = stage.make(*FIRST)
    stage.plan(inputs)
    small = stage.wrapper._custom_mask_buf[:431]  # 375 + 57 bytes are needed, and 8 behind them
    other = preflash.BatchPrefillWithPagedKVCacheWrapper(
        runner.workspace(target.device),
        use_cuda_graph=True,
        backend=target.backend,
        **stage.buffers | {"custom_mask_buf": small},
    )
    with pytest.raises(ValueError, match=r"custom_mask_buf has 431 bytes; .* 432, .* 8 bytes"):
        runner.plan(other, inputs)


def test_attributes(target):
    stage = staged(PAGED, target)
    wrapper = stage.wrapper
    assert wrapper.is_cuda_graph_enabled is wrapper._use_cuda_graph is True
    assert wrapper._fixed_batch_size == 3
    assert wrapper._max_total_num_rows is None
    assert wrapper._custom_mask_buf is None
    stage.plan(stage.make(*FIRST))
    stage.plan(stage.make(*SMALLER))
    assert wrapper._max_total_num_rows == 35
    assert wrapper._batch_size == 3


# --- decode and cascade ------------------------------------------------------

DECODE = Case("decode", (1,) * 3, (90, 33, 7), 8, 2, 64, page_size=16)


@pytest.mark.parametrize("by_class", [False, True], ids=["flag", "class"])
def test_decode(target, by_class, recorder):  # noqa: F811
    device = target.device
    pages = 120
    ints = {"dtype": torch.int32, "device": device}
    buffers = (torch.zeros(4, **ints), torch.zeros(pages, **ints), torch.zeros(3, **ints))
    work = runner.workspace(device)
    if by_class:
        wrapper = preflash.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(work, *buffers)
    else:
        wrapper = preflash.BatchDecodeWithPagedKVCacheWrapper(
            work, "NHD", True, False, *buffers, backend=target.backend
        )
    pool = torch.empty(2, pages, 16, 2, 64, dtype=DECODE.dtype, device=device)
    q = torch.empty(3, 8, 64, dtype=DECODE.dtype, device=device)
    out, graph = torch.empty_like(q), None
    for seed, kv_lens in enumerate(((90, 33, 7), (1, 0, 17), (1000, 512, 100))):
        case = dataclasses.replace(DECODE, kv_lens=kv_lens)
        inputs = build(case, device=device, seed=seed)
        q.copy_(inputs.q)
        pool.fill_(float("nan"))
        pool[0, : inputs.k.shape[0]], pool[1, : inputs.v.shape[0]] = inputs.k, inputs.v
        wrapper.plan(inputs.kv_indptr, inputs.indices, inputs.last_page_len, 8, 2, 64, 16,
                     q_data_type=case.dtype)  # fmt: skip

        def run():
            wrapper.run(q, (pool[0], pool[1]), out=out)

        if graph is None:
            run()
            graph = capture(recorder, device, run)
        out.fill_(float("nan"))
        graph.replay()
        runner.compare(inputs, out, None).check()
    assert wrapper._fixed_batch_size == 3
    with pytest.raises(ValueError, match="batch size is fixed"):
        wrapper.plan(inputs.kv_indptr[:3], inputs.indices, inputs.last_page_len[:2], 8, 2, 64, 16,
                     q_data_type=case.dtype)  # fmt: skip
