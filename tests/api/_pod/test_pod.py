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
from pods import (
    BATCHES,
    BOTH,
    DECODE,
    PREFILL,
    PREFILLS,
    BatchPod,
    GraphPod,
    Pod,
    alike,
    captured,
    graph_buffers,
)
from preflash._device import backends
from preflash._pod import pod_plan
from preflash.testing import KvForm, MaskKind, runner
from preflash.testing.case import Position
from torch.fx.experimental.proxy_tensor import make_fx

FULL = dataclasses.replace(PREFILL, mask=MaskKind.NONE)
MASKED = dataclasses.replace(PREFILL, mask=MaskKind.CUSTOM, window_left=60)
LONE_ROW = dataclasses.replace(PREFILL, qo_lens=(1,), kv_lens=(700,))
LONG_ROWS = dataclasses.replace(PREFILL, qo_lens=(90,), kv_lens=(33,))
NO_ROWS = dataclasses.replace(PREFILL, qo_lens=(0,), kv_lens=(50,))
NO_DECODE = dataclasses.replace(DECODE, qo_lens=(), kv_lens=())
E4M3 = torch.float8_e4m3fn
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
    "HND": alike(BOTH, layout="HND"),
    "HND with NHD": (dataclasses.replace(PREFILL, layout="HND"), DECODE),
    "float16, 96": alike((MASKED, DECODE), dtype=torch.float16, head_dim=96),
    "512": alike(BOTH, head_dim=512),
    "group 7": alike(BOTH, num_qo_heads=7, num_kv_heads=1),
    "ALiBi of decode": (PREFILL, dataclasses.replace(DECODE, position=Position.ALIBI)),
    "RoPE": alike(BOTH, position=Position.ROPE),
    "fp8 cache": (PREFILL, dataclasses.replace(DECODE, kv_dtype=E4M3)),
    "fp8 queries": alike(BOTH, dtype=E4M3),
}
PLAIN = {"causal", "full", "masked", "one row", "window", "page 1", "HND", "group 7"}
TWO_LAUNCHES = {"no prefill", "no decode", "neither"}
MASKED_BATCHES = (dataclasses.replace(PREFILLS, mask=MaskKind.CUSTOM), DECODE)
SEVERAL_ROWS = {"qo_lens": (1, 0, 5, 2, 3), "kv_lens": (90, 5, 17, 2, 1333)}
BATCH_PAIRS = {
    "causal": BATCHES,
    "decode of several rows": (PREFILLS, dataclasses.replace(DECODE, **SEVERAL_ROWS)),
    "fp8 caches": alike(BATCHES, kv_dtype=E4M3),
    "no prefill": (dataclasses.replace(PREFILLS, qo_lens=(), kv_lens=()), DECODE),
    "no decode": (PREFILLS, NO_DECODE),
}
BOTH_KINDS = pytest.mark.parametrize("kind", [Pod, BatchPod])


def planned(target, pair=None, kind=Pod, **options):
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
        assert pod.wrapper.launches is None
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
    pod.check(custom_mask_p=mask.int() * 256)
    pod.check(causal_p=True)


def test_one_plan_of_batches_serves_every_mask(target):
    """causal_p and the masks are options of run()."""
    pod = planned(target, MASKED_BATCHES, BatchPod)
    masked, none = pod.prefill, dict.fromkeys(("masks", "custom_mask", "packed_custom_mask"))
    unmasked = {
        causal: dataclasses.replace(masked, case=dataclasses.replace(PREFILLS, mask=kind), **none)
        for causal, kind in ((True, MaskKind.CAUSAL), (False, MaskKind.NONE))
    }
    for pod.prefill in (unmasked[True], unmasked[False], masked, unmasked[True]):
        pod.check(causal_p=pod.prefill is not unmasked[False])


def test_other_names_of_run(target):
    pod = planned(target)
    given = {**pod.tensors(), "causal_p": True}
    (out_p, lse_p), (out_d, lse_d) = pod.wrapper.run_return_lse(**given)
    assert (lse_p.shape, lse_d.shape) == ((150, 8), (5, 8))
    assert all(map(torch.equal, pod.wrapper.forward(**given), (out_p, out_d)))


def test_prefills_of_other_lengths_and_layers(target):
    """Each kind of prefill is planned once, and its plan serves the next layers."""
    pod = Pod(target)
    cases = [dataclasses.replace(PREFILL, qo_lens=(n,), kv_lens=(n + 31,)) for n in (3, 77, 20)]
    for lens in (DECODE.kv_lens, (5, 700, 64, 65, 16)):
        pod.decode = pod.built(dataclasses.replace(DECODE, kv_lens=lens), 9)
        pod.plan()
        for seed, case in enumerate(cases * 2):
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


@pytest.mark.parametrize("installed", [False, True], ids=["before", "after"])
@BOTH_KINDS
def test_an_interrupted_plan(target, kind, installed):
    """The sides that run are both of the old plan or both of the new one, also in workspaces that
    are replaced."""

    def made_memory():
        return [runner.workspace(target.device, 1 << n) for n in (25, 21)]

    prefills = dataclasses.replace(PREFILLS, qo_lens=(64,) * 5, kv_lens=(200,) * 5)
    decode = dataclasses.replace(DECODE, qo_lens=(1,) * 40, kv_lens=(70,) * 40)
    for runs_before in (0, 1):
        pod = kind(target)
        pod.wrapper.reset_workspace_buffer(*made_memory())
        pod.plan(batch_invariant=True)
        for _ in range(runs_before):
            pod.check()
        old, install = (pod.prefill, pod.decode), pod.wrapper._decode._install

        def interrupt(*plan, install=install):
            if installed:
                install(*plan)
            raise KeyboardInterrupt

        # plan() of one prefill is of the decode side.
        new = (pod.prefill if kind is Pod else pod.built(prefills), pod.built(decode, 1))
        pod.prefill, pod.decode = new
        patched = mock.patch.object(pod.wrapper._decode, "_install", interrupt)
        with patched, pytest.raises(KeyboardInterrupt):
            pod.plan(batch_invariant=True)
        pod.prefill, pod.decode = new if installed else old
        pod.check()
        pod.wrapper.reset_workspace_buffer(*made_memory())
        pod.check()
        pod.plan()
        pod.check()


def test_graphs_replay_the_last_plan(target, recorder):
    """A plan() with other options than a capture's changes the lengths that it replays, and what
    later runs do."""
    pod, graphs = GraphPod(target), {}
    batches = [(1, 2, 3, 4, 500), DECODE.kv_lens, (0,) * 5, (900,) * 3 + (7, 64), (7, 0, 9, 64, 16)]
    for seed, lens in enumerate(batches):
        planned_window = (-1, 64)[seed % 2]
        pod.load(lens, seed, window_left=planned_window)
        pod.plan()
        if planned_window not in graphs:
            graphs[planned_window] = captured(pod, recorder)
        for window in (63 - planned_window, planned_window):
            if window in graphs:
                pod.load(lens, seed, window_left=window)
                pod.check_replay(*graphs[window])
        pod.check()
    work = [runner.workspace(target.device) for _ in range(2)]
    with pytest.raises(ValueError, match="a CUDA graph has captured a run"):
        pod.wrapper.reset_workspace_buffer(*work)
    pod.decode = pod.built(dataclasses.replace(DECODE, qo_lens=(1,), kv_lens=(9,)))
    with pytest.raises(ValueError, match="batch size is fixed"):
        pod.plan()


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
    """Several prefills are captured with one decode batch, which has one work list at a time."""
    options = {"use_cuda_graph": True, **graph_buffers(target.device)} if for_graphs else {}
    monkeypatch.setattr(pod_plan, "_forced_apart", True)  # unlike batch-invariant sides, may split
    pod, graphs = Pod(target, **options), []
    for case in (PREFILL, LONE_ROW, PREFILL):  # the last one is planned in the place of the first
        pod.plan()
        pod.prefill = pod.built(case, 1)
        made = captured(pod, recorder)
        graphs.append((pod.prefill, made, weakref.ref(pod.wrapper._pod_plans.last.launch)))
    pod.plan()
    gc.collect()
    for prefill, made, launch in graphs:
        assert launch() is not None, "its work list is freed memory"
        pod.prefill = prefill
        pod.check_replay(*made)


def test_attributes_copies_and_recording(target):
    pod = Pod(target)
    wrapper = pod.wrapper
    assert (wrapper.variant, wrapper.launches, wrapper.is_cuda_graph_enabled) == (None, None, False)
    pod.plan(window_left=9)
    assert "no run yet" in repr(wrapper)
    assert (wrapper._window_left, wrapper._logits_soft_cap, wrapper._kv_layout) == (9, 0.0, "NHD")
    wrapper.end_forward()
    with pytest.raises(TypeError, match="cannot be pickled"):
        copy.copy(wrapper)
    given = pod.tensors()
    with pytest.raises(NotImplementedError, match="cannot be recorded"):
        make_fx(lambda q: wrapper.run(**{**given, "q_p": q})[0])(given["q_p"])
