"""Prefill with decode, in one launch or two, computes both sides as the oracle does."""

import copy
import dataclasses
import gc
import weakref
from unittest import mock

import preflash
import pytest
import torch
from fuzz import pod_problems, pod_trial
from fuzz.random_cases import Limits
from graph_stage import capture
from interpreter_steps import interpreter_steps
from pods import DECODE, PREFILL, PREFILLS, BatchPod, GraphPod, Pod, alike, captured, graph_buffers
from preflash._device import backends
from preflash._pod import pod_plan
from preflash.testing import KvForm, MaskKind, compare, reference, runner
from preflash.testing.case import Position
from preflash.testing.oracle import Pipeline
from torch.fx.experimental.proxy_tensor import make_fx

BOTH = (PREFILL, DECODE)
FULL = dataclasses.replace(PREFILL, mask=MaskKind.NONE)
MASKED = dataclasses.replace(PREFILL, mask=MaskKind.CUSTOM, window_left=60)
LONE_ROW = dataclasses.replace(PREFILL, qo_lens=(1,), kv_lens=(700,))
LONG_ROWS = dataclasses.replace(PREFILL, qo_lens=(90,), kv_lens=(33,))
NO_ROWS = dataclasses.replace(PREFILL, qo_lens=(0,), kv_lens=(50,))
NO_DECODE = dataclasses.replace(DECODE, qo_lens=(), kv_lens=())
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
PAIRS = {
    "causal": BOTH,
    "full": (FULL, DECODE),
    "masked": (MASKED, DECODE),
    "one row": (LONE_ROW, DECODE),
    "no keys": (dataclasses.replace(PREFILL, qo_lens=(40,), kv_lens=(0,)), DECODE),
    "more rows than keys": (LONG_ROWS, DECODE),
    "no prefill": (NO_ROWS, DECODE),
    "no decode": (PREFILL, NO_DECODE),
    "neither": (NO_ROWS, NO_DECODE),
    "window": (PREFILL, dataclasses.replace(DECODE, window_left=100)),
    "page 1": (PREFILL, dataclasses.replace(DECODE, page_size=1, form=KvForm.FLAT)),
    "page 7": (FULL, dataclasses.replace(DECODE, page_size=7, form=KvForm.COMBINED)),
    "HND": alike(BOTH, layout="HND"),
    "HND with NHD": (dataclasses.replace(PREFILL, layout="HND"), DECODE),
    "float16, 96": alike((MASKED, DECODE), dtype=torch.float16, head_dim=96),
    "64": alike(BOTH, head_dim=64),
    "256": alike((MASKED, DECODE), head_dim=256),
    "512": alike(BOTH, head_dim=512),
    "group 7": alike(BOTH, num_qo_heads=7, num_kv_heads=1),
    "group 1": alike((MASKED, DECODE), num_qo_heads=3, num_kv_heads=3),
    "ALiBi": alike(BOTH, position=Position.ALIBI),
    "ALiBi of decode": (PREFILL, dataclasses.replace(DECODE, position=Position.ALIBI)),
    "RoPE": alike(BOTH, position=Position.ROPE),
    "fp8 cache": (PREFILL, dataclasses.replace(DECODE, kv_dtype=E4M3)),
    "fp8 caches": alike((FULL, DECODE), dtype=torch.float16, kv_dtype=E5M2),
    "fp8 queries": alike(BOTH, dtype=E4M3),
}
PLAIN = {"causal", "full", "masked", "one row", "window", "page 1", "page 7", "HND", "group 7"}
TWO_LAUNCHES = {"no prefill", "no decode", "neither"}
BATCHES = (PREFILLS, DECODE)
BATCH_PAIRS = {
    "causal": BATCHES,
    "full": (dataclasses.replace(PREFILLS, mask=MaskKind.NONE), DECODE),
    "masked": (dataclasses.replace(PREFILLS, mask=MaskKind.CUSTOM), DECODE),
    "decode of several rows": (
        PREFILLS,
        dataclasses.replace(DECODE, qo_lens=(1, 0, 5, 2, 3), kv_lens=(90, 5, 17, 2, 1333)),
    ),
    "page 1": alike(BATCHES, page_size=1, form=KvForm.FLAT),
    "HND": alike(BATCHES, layout="HND", form=KvForm.COMBINED),
    "window": alike(BATCHES, window_left=64),
    "ALiBi": alike(BATCHES, position=Position.ALIBI),
    "RoPE": alike(BATCHES, position=Position.ROPE),
    "fp8 caches": alike(BATCHES, kv_dtype=E4M3),
    "no prefill": (dataclasses.replace(PREFILLS, qo_lens=(), kv_lens=()), DECODE),
    "no decode": (PREFILLS, NO_DECODE),
}


def planned(target, pair=BOTH, kind=Pod, **options):
    pod = kind(target, pair)
    pod.plan(**options)
    return pod


@pytest.mark.parametrize("name", PAIRS)
def test_pairs(target, name):
    """Pairs that a kernel of two segments supports run as one launch; on the CPU, all but those
    with an empty side."""
    pod = planned(target, PAIRS[name])
    for one, other in zip(pod.check(), pod.check(), strict=True):
        assert all(map(torch.equal, one, other)), "two runs of one plan differ"
    # The tests of fa3 list its pairs.
    served = {"cpu": set(PAIRS) - TWO_LAUNCHES, "fa2": PLAIN, "fa3": set()}[target.backend]
    if name in served:
        assert pod.wrapper.launches == 1
        assert pod.wrapper.variant.count("+" if target.backend == "cpu" else "_two") == 1


@pytest.mark.parametrize("pair", BATCH_PAIRS.values(), ids=BATCH_PAIRS)
def test_batches(target, pair):
    pod = planned(target, pair, BatchPod)
    for _ in range(2):
        pod.check()


@pytest.mark.parametrize("seed", range(24))
def test_random_pairs(target, seed):
    """Problems of the fuzzer: both wrappers, any prefill with any decode batch."""
    problem = pod_problems.draw(seed, 0, Limits(work=2e7, fp8=False))
    verdict = pod_trial.examine(problem, backend=target.backend, device=target.device)
    if verdict.not_compiled:
        raise NotImplementedError(verdict.not_compiled)
    assert verdict.failures == []


def test_two_launches_if_they_are_faster(target, monkeypatch):
    """The backend decides by the work of both sides, once for each plan."""
    pod, calls = Pod(target), []

    def prefer_two_launches(self, *sides):
        calls.append(sides)
        return len(calls) == 1

    monkeypatch.setattr(backends.Backend, "prefer_two_launches", prefer_two_launches)
    for launches in (2, 1):
        pod.plan()
        pod.check()
        assert pod.wrapper.launches == launches
        assert f"launches={launches}" in repr(pod.wrapper)
        assert pod.wrapper.variant.count(", ") == launches - 1
    prefill, decode = calls[0]
    assert (prefill.options.causal, prefill.batch.max_qo_len) == (True, 150)
    assert (decode.options.causal, decode.batch.num_requests) == (False, 5)


def test_masks_of_other_kinds(target):
    """A packed mask takes precedence, any mask over causal_p; integers other than 0 are True."""
    pod = planned(target, PAIRS["masked"])
    mask = pod.prefill.masks[0]
    packed = preflash.packbits(mask.flatten(), bitorder="little")
    pod.check(custom_mask_p=torch.zeros_like(mask), packed_custom_mask_p=packed)
    pod.check(custom_mask_p=None, packed_custom_mask_p=packed)
    pod.check(custom_mask_p=mask.int() * 256)
    pod.check(causal_p=True)


def test_one_plan_of_batches_serves_every_mask(target):
    """causal_p and the masks are options of run()."""
    pod = planned(target, BATCH_PAIRS["masked"], BatchPod)
    masked = pod.prefill
    for kind in (MaskKind.CAUSAL, MaskKind.NONE, MaskKind.CUSTOM, MaskKind.CAUSAL):
        pod.prefill = masked
        if kind is not MaskKind.CUSTOM:
            case = dataclasses.replace(PREFILLS, mask=kind)
            none = dict.fromkeys(("masks", "custom_mask", "packed_custom_mask"))
            pod.prefill = dataclasses.replace(masked, case=case, **none)
        pod.check(causal_p=kind is not MaskKind.NONE)


def test_returns_of_run(target):
    pod = planned(target)
    given = {**pod.tensors(), "causal_p": True}
    out_p, out_d = pod.wrapper.run(**given)
    assert (out_p.shape, out_d.shape) == (pod.prefill.q.shape, pod.decode.q.shape)
    (with_p, lse_p), only_d = pod.wrapper.run(**given, return_lse_p=True)
    assert lse_p.shape == (150, 8)
    only_p, (with_d, lse_d) = pod.wrapper.run(**given, return_lse_d=True)
    for one, other in ((out_p, with_p), (out_p, only_p), (out_d, only_d), (out_d, with_d)):
        assert torch.equal(one, other)
    natural = pod.wrapper.run_return_lse(**given, lse_base="ln", lse_layout="HN")
    for (_, lse), other in zip(natural, (lse_p, lse_d), strict=True):
        torch.testing.assert_close(lse.T, other * torch.log(torch.tensor(2.0)))
    assert torch.equal(pod.wrapper.forward(**given)[0], out_p)


@pytest.mark.parametrize("kind", [Pod, BatchPod])
def test_scales_are_those_of_the_decode_side(target, kind):
    pod = planned(target, (PREFILL if kind is Pod else PREFILLS, DECODE), kind, sm_scale=0.2)
    scales = {"q_scale": 0.5, "k_scale": torch.tensor([5.0]), "v_scale": 3.0}
    prefill_scale = 0.2 if kind is BatchPod else 0.07
    results = pod.run(**scales, **({"sm_scale_p": 0.07} if kind is Pod else {}))
    for inputs, result, pipeline in (
        (pod.prefill, results[0], Pipeline(prefill_scale, True, -1)),
        (pod.decode, results[1], Pipeline(0.5, False, -1, out_scale=3.0)),
    ):
        compare(*result, reference(inputs, pipeline=pipeline)).check()
    if kind is BatchPod:
        out_p, out_d = pod.wrapper.run(**pod.tensors(), **scales, causal_p=True)
        assert torch.equal(out_p, results[0][0])
        assert torch.equal(out_d, results[1][0])


def test_prefills_of_other_lengths_and_layers(target):
    """Each kind of prefill is planned once, and its plan serves the next layers."""
    pod = Pod(target)
    cases = [dataclasses.replace(PREFILL, qo_lens=(n,), kv_lens=(n + 31,)) for n in (3, 200, 77)]
    for lens in (DECODE.kv_lens, (5, 700, 64, 65, 16)):
        pod.decode = pod.built(dataclasses.replace(DECODE, kv_lens=lens), 9)
        pod.plan()
        for _ in range(2):
            for seed, case in enumerate(cases):
                pod.prefill = pod.built(case, seed)
                pod.check()


def test_few_plans_are_kept(target):
    """A kind of prefill is planned again after many others, and a repeated one is not."""
    pod = planned(target)

    def steps(rows: int) -> int:
        pod.prefill = pod.built(dataclasses.replace(PREFILL, qo_lens=(rows,)))
        tensors = pod.tensors()
        return interpreter_steps(lambda: pod.wrapper.run(**tensors))

    first, _, third = (steps(1) for _ in range(3))
    assert third < first / 4
    for rows in range(2, 80):
        steps(rows)
    assert steps(1) > 4 * third


@pytest.mark.parametrize("kind", [Pod, BatchPod])
def test_reset_workspace_buffer(target, kind):
    pod = planned(target, (PREFILL if kind is Pod else PREFILLS, DECODE), kind)
    pod.check()
    memory = [runner.workspace(target.device, 1 << n) for n in (20, 25)]
    pod.wrapper.reset_workspace_buffer(*memory)
    pod.check()
    pod.plan()
    pod.check()


@pytest.mark.parametrize("installed", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("runs_before", [0, 1])
@pytest.mark.parametrize("kind", [Pod, BatchPod])
def test_an_interrupted_plan(target, kind, installed, runs_before):
    """The sides that run are both of the old plan or both of the new one."""
    pod = kind(target)
    memory = [runner.workspace(target.device, 1 << n) for n in (27, 21)]
    pod.wrapper.reset_workspace_buffer(*memory)
    pod.plan(batch_invariant=True)
    for _ in range(runs_before):
        pod.check()
    old = pod.prefill, pod.decode
    new = [
        pod.built(dataclasses.replace(case, qo_lens=(rows,) * batch, kv_lens=(keys,) * batch), seed)
        for seed, (case, rows, keys, batch) in enumerate(
            ((PREFILLS, 64, 200, 5), (DECODE, 1, 70, 40))
        )
    ]
    install = pod.wrapper._decode._install

    def interrupt(*plan):
        if installed:
            install(*plan)
        raise KeyboardInterrupt

    if kind is Pod:  # whose plan() is of the decode side
        new[0] = pod.prefill
    pod.prefill, pod.decode = new
    with (
        mock.patch.object(pod.wrapper._decode, "_install", interrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        pod.plan(batch_invariant=True)
    pod.prefill, pod.decode = new if installed else old
    pod.check()
    pod.wrapper.reset_workspace_buffer(*memory)
    pod.check()


def test_graphs_replay_the_last_plan(target, recorder):
    pod = GraphPod(target)
    pod.load(DECODE.kv_lens, 2)
    pod.plan()
    graph, outputs = captured(pod, recorder)
    batches = [DECODE.kv_lens, (1, 2, 3, 4, 5), (0,) * 5, (900,) * 3 + (7, 64)]
    for seed, lens in enumerate(batches):
        pod.load(lens, 10 + seed)
        pod.plan()
        pod.check_replay(graph, outputs)
    work = [runner.workspace(target.device) for _ in range(2)]
    with pytest.raises(ValueError, match="a CUDA graph has captured a run"):
        pod.wrapper.reset_workspace_buffer(*work)
    pod.decode = pod.built(dataclasses.replace(DECODE, qo_lens=(1,), kv_lens=(9,)))
    with pytest.raises(ValueError, match="batch size is fixed"):
        pod.plan()


def test_graphs_keep_the_options_of_their_capture(target, recorder):
    """A plan() with other options changes the lengths that they replay, and what later runs do."""
    pod, graphs = GraphPod(target), {}
    batches = [DECODE.kv_lens, (1, 2, 3, 4, 500), (300,) * 5, (7, 0, 900, 64, 16)]
    for seed, lens in enumerate(batches):
        window_left = (-1, 64)[seed % 2]
        pod.load(lens, seed, window_left=window_left)
        pod.plan()
        if window_left not in graphs:
            graphs[window_left] = captured(pod, recorder)
        pod.check()
        for window, (graph, outputs) in graphs.items():
            pod.load(lens, seed, window_left=window)
            pod.check_replay(graph, outputs)


def test_a_pool_is_compared_with_the_last_plan(target, recorder, monkeypatch):
    """A pool that was large enough for the plan before is too small for the last one."""
    monkeypatch.setenv("PREFLASH_DEBUG", "1")
    pod = Pod(target, use_cuda_graph=True, **graph_buffers(target.device))
    many, few = pod.decode, pod.built(dataclasses.replace(DECODE, kv_lens=(1, 2, 3, 4, 5)), 2)
    pod.decode = few
    pod.plan()
    pod.run()
    capture(recorder, target.device, lambda: pod.run(paged_kv_cache_d=many.cache))
    pod.decode = many
    pod.plan()
    with pytest.raises(ValueError, match="decode side: paged_kv_indices holds"):
        pod.run(paged_kv_cache_d=few.cache)


@pytest.mark.parametrize("for_graphs", [True, False], ids=["use_cuda_graph", "without"])
def test_graphs_of_two_launches_keep_their_prefills(target, recorder, monkeypatch, for_graphs):
    """Several are captured with one decode batch, which has one work list."""
    options = {"use_cuda_graph": True, **graph_buffers(target.device)} if for_graphs else {}
    monkeypatch.setattr(pod_plan, "_forced_apart", True)  # unlike batch-invariant sides, may split
    pod, graphs = Pod(target, **options), []
    pod.plan()
    for case in (PREFILL, LONE_ROW, LONG_ROWS):
        pod.prefill = pod.built(case, 1)
        made = captured(pod, recorder)
        graphs.append((pod.prefill, made, weakref.ref(pod.wrapper._pod_plans.last.launch)))
    pod.plan()
    gc.collect()
    for prefill, made, launch in graphs:
        assert launch() is not None, "its work list is freed memory"
        pod.prefill = prefill
        pod.check_replay(*made)


def test_repr_and_attributes(target):
    pod = Pod(target)
    wrapper = pod.wrapper
    assert "not planned" in repr(wrapper)
    assert (wrapper.variant, wrapper.launches) == (None, None)
    pod.plan(window_left=9)
    assert "no run yet" in repr(wrapper)
    assert (wrapper._window_left, wrapper._logits_soft_cap, wrapper._kv_layout) == (9, 0.0, "NHD")
    assert not wrapper.is_cuda_graph_enabled
    wrapper.end_forward()
    with pytest.raises(TypeError, match="cannot be pickled"):
        copy.copy(wrapper)


def test_recording_is_refused(target):
    pod = planned(target)
    given = pod.tensors()
    with pytest.raises(NotImplementedError, match="cannot be recorded"):
        make_fx(lambda q: pod.wrapper.run(**{**given, "q_p": q})[0])(given["q_p"])
