"""Prefill with decode, in one launch or two, computes both sides as the oracle does."""

import copy
import dataclasses
import gc
import itertools
import weakref

import pytest
import torch
from graph_stage import capture
from interrupts import interrupted
from pods import (
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
from preflash.testing import KvForm, MaskKind, runner
from refusals import refused
from torch.fx.experimental.proxy_tensor import make_fx

FULL = dataclasses.replace(PREFILL, mask=MaskKind.NONE)
MASKED = dataclasses.replace(PREFILL, mask=MaskKind.CUSTOM, window_left=60)
LONE_ROW = dataclasses.replace(PREFILL, qo_lens=(1,), kv_lens=(700,))
NO_ROWS = dataclasses.replace(PREFILL, qo_lens=(0,), kv_lens=(50,))
NO_DECODE = dataclasses.replace(DECODE, qo_lens=(), kv_lens=())
PAIRS = {
    "causal": BOTH,
    "full": (FULL, DECODE),
    "masked": (MASKED, DECODE),
    "one row": (LONE_ROW, DECODE),
    "no prefill": (NO_ROWS, DECODE),
    "no decode": (PREFILL, NO_DECODE),
    "neither": (NO_ROWS, NO_DECODE),
    "window": (PREFILL, dataclasses.replace(DECODE, window_left=100)),
    "page 1": (PREFILL, dataclasses.replace(DECODE, page_size=1, form=KvForm.FLAT)),
    "HND": alike(BOTH, layout="HND"),
    "group 7": alike(BOTH, num_qo_heads=7, num_kv_heads=1),
}
PLAIN = {"causal", "full", "masked", "one row", "window", "page 1", "HND", "group 7"}
TWO_LAUNCHES = {"no prefill", "no decode", "neither"}
MASKED_BATCHES = (dataclasses.replace(PREFILLS, mask=MaskKind.CUSTOM), DECODE)
FEW_KEYS = dataclasses.replace(DECODE, kv_lens=(9, 0, 17, 1, 5))
SHORT = {
    Pod: (dataclasses.replace(PREFILL, qo_lens=(3,), kv_lens=(9,)), FEW_KEYS),
    BatchPod: (
        dataclasses.replace(PREFILLS, qo_lens=(3, 0, 9, 5), kv_lens=(9, 9, 9, 30)),
        FEW_KEYS,
    ),
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


@pytest.mark.parametrize("invariant", [False, True])
def test_launches(target, invariant):
    """Batch-invariant sides are two launches; test_pod_cost.py has when two are faster."""
    pod = Pod(target)
    assert (pod.wrapper.variant, pod.wrapper.launches) == (None, None)
    for _ in range(2):
        pod.plan(batch_invariant=invariant)
        assert pod.wrapper.launches is None
        assert "no run yet" in repr(pod.wrapper)
        pod.check()
        if invariant or target.backend == "cpu":
            assert pod.wrapper.launches == 1 + invariant
        assert f"launches={pod.wrapper.launches}" in repr(pod.wrapper)
        assert pod.wrapper.variant.count(", ") == pod.wrapper.launches - 1


def test_masks_of_other_kinds(target):
    """A mask takes precedence over causal_p; integers other than 0 are True."""
    pod = planned(target, PAIRS["masked"])
    pod.check(custom_mask_p=pod.prefill.masks[0].int() * 256, causal_p=True)


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
    """Each kind of prefill is planned once, and its plan serves the next layers, but none that is
    equal but for a mask."""
    pod = Pod(target)
    cases = [dataclasses.replace(PREFILL, qo_lens=(n,), kv_lens=(n + 31,)) for n in (3, 77, 20)]
    cases += [dataclasses.replace(cases[0], mask=kind) for kind in (MaskKind.CUSTOM, MaskKind.NONE)]
    for lens in (DECODE.kv_lens, (5, 700, 64, 65, 16)):
        pod.decode = pod.built(dataclasses.replace(DECODE, kv_lens=lens), 9)
        pod.plan()
        for seed, case in enumerate(cases * 2):
            pod.prefill = pod.built(case, seed)
            pod.check()


@BOTH_KINDS
def test_an_interrupted_plan(target, kind):
    """The sides that run are both of the old plan or both of the new one, also in workspaces that
    are replaced."""
    pod, ends = kind(target, SHORT[kind]), set()

    def results_of(*plans):
        for window_left in plans:
            pod.plan(window_left=window_left)
        return [t.clone() for side in pod.run() for t in side]

    expected = {window: results_of(window) for window in (-1, 3)}
    for step in itertools.count(step=11):
        results_of(-1)
        if not interrupted(lambda: pod.plan(window_left=3), step):
            break
        for _ in range(2):
            results = results_of()
            (planned,) = (w for w in expected if all(map(torch.equal, expected[w], results)))
            ends.add(planned)
            memory = (runner.workspace(target.device, 1 << n) for n in (22, 20))
            pod.wrapper.reset_workspace_buffer(*memory)
    assert ends == expected.keys()


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
    refused("a CUDA graph has captured a run", pod.wrapper.reset_workspace_buffer, *work)
    pod.decode = pod.built(dataclasses.replace(DECODE, qo_lens=(1,), kv_lens=(9,)))
    refused("batch size is fixed", pod.plan)


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
    refused("decode side: paged_kv_indices holds", pod.run, paged_kv_cache_d=few.cache)


@pytest.mark.parametrize("for_graphs", [True, False], ids=["use_cuda_graph", "without"])
def test_graphs_of_two_launches_keep_their_prefills(target, recorder, for_graphs):
    """Several prefills are captured with one decode batch, which has one work list at a time."""
    options = {"use_cuda_graph": True, **graph_buffers(target.device)} if for_graphs else {}
    pod, graphs = Pod(target, **options), []
    for case in (PREFILL, LONE_ROW, PREFILL):  # the last one is planned in the place of the first
        pod.plan(batch_invariant=True)
        pod.prefill = pod.built(case, 1)
        made = captured(pod, recorder)
        graphs.append((pod.prefill, made, weakref.ref(pod.wrapper._pod_plans.last.launch)))
    pod.plan(batch_invariant=True)
    gc.collect()
    for pod.prefill, made, launch in graphs:
        assert launch() is not None, "its work list is freed memory"
        pod.check_replay(*made)


def test_attributes_copies_and_recording(target):
    pod = planned(target, window_left=9)
    wrapper = pod.wrapper
    assert wrapper.is_cuda_graph_enabled is False
    assert (wrapper._window_left, wrapper._logits_soft_cap, wrapper._kv_layout) == (9, 0.0, "NHD")
    wrapper.end_forward()
    refused("cannot be pickled", copy.copy, wrapper, error=TypeError)
    given = pod.tensors()
    with pytest.raises(NotImplementedError, match="cannot be recorded"):
        make_fx(lambda q: wrapper.run(**{**given, "q_p": q})[0])(given["q_p"])
