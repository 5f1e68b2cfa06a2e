"""Prefill beside decode: both sides against the oracle, by every option, and what is refused."""

import dataclasses
import gc
import inspect
import random
import weakref
from unittest import mock

import preflash
import pytest
import torch
from fuzz.pod_trial import note_variants, plan_decode
from graph_stage import capture, recorder  # noqa: F401
from preflash._device import backends
from preflash._pod import pod_plan
from preflash.testing import Case, KvForm, MaskKind, build, compare, poison, reference, runner
from preflash.testing.case import Position
from preflash.testing.oracle import Pipeline

PREFILL = Case("prefill", (150,), (333,), 8, 2, 128, mask=MaskKind.CAUSAL)
DECODE = Case("decode", (1,) * 5, (90, 0, 17, 1, 1333), 8, 2, 128, page_size=16)
FULL = dataclasses.replace(PREFILL, name="full", mask=MaskKind.NONE)
MASKED = dataclasses.replace(PREFILL, name="masked", mask=MaskKind.CUSTOM, window_left=60)
LONE_ROW = dataclasses.replace(PREFILL, name="row", qo_lens=(1,), kv_lens=(700,))
KEYLESS = dataclasses.replace(PREFILL, name="keyless", qo_lens=(40,), kv_lens=(0,))
ABSENT = dataclasses.replace(PREFILL, name="absent", qo_lens=(0,), kv_lens=(50,))
LONG_ROWS = dataclasses.replace(PREFILL, name="rows", qo_lens=(90,), kv_lens=(33,))
PAIRS = {
    "causal": (PREFILL, DECODE),
    "full": (FULL, DECODE),
    "masked": (MASKED, DECODE),
    "one row": (LONE_ROW, DECODE),
    "no keys": (KEYLESS, DECODE),
    "more rows than keys": (LONG_ROWS, DECODE),
    "no prefill": (ABSENT, DECODE),
    "no decode": (PREFILL, dataclasses.replace(DECODE, qo_lens=(), kv_lens=())),
    "neither": (ABSENT, dataclasses.replace(DECODE, qo_lens=(), kv_lens=())),
    "window": (PREFILL, dataclasses.replace(DECODE, window_left=100)),
    "page 1": (PREFILL, dataclasses.replace(DECODE, page_size=1, form=KvForm.FLAT)),
    "page 7": (FULL, dataclasses.replace(DECODE, page_size=7, form=KvForm.COMBINED)),
    "HND": tuple(dataclasses.replace(one, layout="HND") for one in (PREFILL, DECODE)),
    "HND beside NHD": (dataclasses.replace(PREFILL, layout="HND"), DECODE),
    "float16, 96": tuple(
        dataclasses.replace(one, dtype=torch.float16, head_dim=96) for one in (MASKED, DECODE)
    ),
    "64": tuple(dataclasses.replace(one, head_dim=64) for one in (PREFILL, DECODE)),
    "256": tuple(dataclasses.replace(one, head_dim=256) for one in (MASKED, DECODE)),
    "512": tuple(dataclasses.replace(one, head_dim=512) for one in (PREFILL, DECODE)),
    "group 7": tuple(
        dataclasses.replace(one, num_qo_heads=7, num_kv_heads=1) for one in (PREFILL, DECODE)
    ),
    "group 1": tuple(
        dataclasses.replace(one, num_qo_heads=3, num_kv_heads=3) for one in (MASKED, DECODE)
    ),
    "ALiBi": tuple(dataclasses.replace(one, position=Position.ALIBI) for one in (PREFILL, DECODE)),
    "ALiBi beside none": (PREFILL, dataclasses.replace(DECODE, position=Position.ALIBI)),
    "RoPE": tuple(dataclasses.replace(one, position=Position.ROPE) for one in (PREFILL, DECODE)),
    "fp8 cache": (PREFILL, dataclasses.replace(DECODE, kv_dtype=torch.float8_e4m3fn)),
    "fp8 caches": tuple(
        dataclasses.replace(one, dtype=torch.float16, kv_dtype=torch.float8_e5m2)
        for one in (FULL, DECODE)
    ),
    "fp8 queries": tuple(
        dataclasses.replace(one, dtype=torch.float8_e4m3fn) for one in (PREFILL, DECODE)
    ),
}
PLAIN = {"causal", "full", "masked", "one row", "window", "page 1", "page 7", "HND", "group 7"}
TWO_LAUNCHES = {"no prefill", "no decode", "neither"}


def made(target, decode, **options):
    return preflash.PODWithPagedKVCacheWrapper(
        runner.workspace(target.device), decode.layout, backend=target.backend, **options
    )


def plan(wrapper, inputs, **options):
    arrays = (inputs.kv_indptr, inputs.indices, inputs.last_page_len)
    plan_decode(wrapper, inputs.case, arrays, **options)


def prefill_tensors(inputs) -> tuple:
    tokens = 0 if inputs.case.layout == "NHD" else 1
    kv_len = inputs.case.kv_lens[0]
    return (inputs.q, inputs.k.narrow(tokens, 0, kv_len), inputs.v.narrow(tokens, 0, kv_len))


def prefill_options(inputs) -> dict:
    case = inputs.case
    return {
        "custom_mask_p": None if inputs.masks is None else inputs.masks[0],
        "causal_p": inputs.pipeline.causal,
        "kv_layout_p": case.layout,
        "pos_encoding_mode_p": case.position.value,
        "sm_scale_p": case.sm_scale,
        "window_left_p": case.window_left,
        "rope_scale_p": case.rope_scale,
        "rope_theta_p": case.rope_theta,
    }


def poisoned(inputs, side) -> dict:
    case, shape = inputs.case, (inputs.q.shape[0], inputs.case.num_qo_heads)
    device = inputs.q.device
    return {
        f"out_{side}": poison((*shape, case.head_dim), case.dtype_o, device),
        f"lse_{side}": poison(shape, torch.float32, device),
    }


def run(wrapper, prefill, decode, **options):
    given = {
        "return_lse_p": True,
        "return_lse_d": True,
        **poisoned(prefill, "p"),
        **poisoned(decode, "d"),
        **prefill_options(prefill),
    }
    tensors = prefill_tensors(prefill)
    results = wrapper.run(*tensors, decode.q, decode.cache, **{**given, **options})
    note_variants(wrapper, prefill, decode)
    return results


def check_sides(both, results):
    for inputs, (out, lse) in zip(both, results, strict=True):
        if sum(inputs.case.qo_lens) > 0:
            runner.compare(inputs, out, lse).check()


def built(pair, target):
    return [build(case, seed=i, device=target.device) for i, case in enumerate(pair)]


@pytest.mark.parametrize("name", PAIRS)
def test_pairs(target, name):
    """Pairs that a kernel of two segments supports run as one launch; on the CPU, all but those
    with an empty side."""
    both = built(PAIRS[name], target)
    wrapper = made(target, both[1].case)
    plan(wrapper, both[1])
    first = run(wrapper, *both)
    check_sides(both, first)
    again = run(wrapper, *both)
    for one, other in zip(first, again, strict=True):
        assert all(map(torch.equal, one, other)), "two runs of one plan differ"
    # Which of them fa3 has is for its own tests.
    served = {"cpu": set(PAIRS) - TWO_LAUNCHES, "fa2": PLAIN, "fa3": set()}[target.backend]
    if name in served:
        assert "launches=1" in repr(wrapper)
        assert wrapper.variant.count("+" if target.backend == "cpu" else "_two") == 1


@pytest.mark.parametrize("pair", [PAIRS["masked"], PAIRS["causal"]], ids=["masked", "causal"])
def test_two_launches_agree(target, monkeypatch, pair):
    """Two launches, as for a pair that no kernel of two segments takes, agree up to rounding."""
    both = built(pair, target)
    monkeypatch.setattr(pod_plan, "_forced_apart", True)
    wrapper = made(target, both[1].case)
    plan(wrapper, both[1])
    check_sides(both, run(wrapper, *both))
    assert "launches=2" in repr(wrapper)
    assert wrapper.variant.count(", ") == 1
    check_sides(both, run(wrapper, *both))


def test_two_launches_where_those_are_faster(target, monkeypatch):
    """The backend decides by the work of both sides, and results are those of one launch."""
    both = built((PREFILL, DECODE), target)
    asked = []

    def prefer_two_launches(self, *sides):
        asked.extend(sides)
        return len(asked) == 2

    monkeypatch.setattr(backends.Backend, "prefer_two_launches", prefer_two_launches)
    for launches in (2, 1):
        wrapper = made(target, both[1].case)
        plan(wrapper, both[1])
        check_sides(both, run(wrapper, *both))
        assert f"launches={launches}" in repr(wrapper)
    [prefill, decode] = asked[:2]
    assert (prefill.options.causal, prefill.batch.max_qo_len) == (True, 150)
    assert (decode.options.causal, decode.batch.num_requests) == (False, 5)


def test_a_packed_mask_takes_precedence(target):
    both = built(PAIRS["masked"], target)
    wrapper = made(target, both[1].case)
    plan(wrapper, both[1])
    zeros = torch.zeros_like(both[0].masks[0])
    packed = both[0].packed_custom_mask
    if packed is None:
        packed = preflash.packbits(both[0].masks[0].flatten(), bitorder="little")
    results = run(wrapper, *both, custom_mask_p=zeros, packed_custom_mask_p=packed)
    check_sides(both, results)
    check_sides(both, run(wrapper, *both, custom_mask_p=None, packed_custom_mask_p=packed))


def test_a_dense_mask_is_no_packed_one(target):
    both = built(PAIRS["masked"], target)
    wrapper = made(target, both[1].case)
    plan(wrapper, both[1])
    dense = both[0].masks[0].to(torch.uint8)
    with pytest.raises(ValueError, match=r"packed_custom_mask has .* custom_mask="):
        run(wrapper, *both, custom_mask_p=None, packed_custom_mask_p=dense)


def test_a_mask_of_integers(target):
    both = built(PAIRS["masked"], target)
    wrapper = made(target, both[1].case)
    plan(wrapper, both[1])
    check_sides(both, run(wrapper, *both, custom_mask_p=both[0].masks[0].int() * 256))


def test_returns_what_is_asked_for(target):
    both = built((PREFILL, DECODE), target)
    wrapper = made(target, DECODE)
    plan(wrapper, both[1])
    tensors = (*prefill_tensors(both[0]), both[1].q, both[1].cache)
    out_p, out_d = wrapper.run(*tensors, causal_p=True)
    assert (out_p.shape, out_d.shape) == (both[0].q.shape, both[1].q.shape)
    (with_p, lse_p), only_d = wrapper.run(*tensors, causal_p=True, return_lse_p=True)
    assert lse_p.shape == (150, 8)
    only_p, (with_d, lse_d) = wrapper.run(*tensors, causal_p=True, return_lse_d=True)
    for one, other in ((out_p, with_p), (out_p, only_p), (out_d, only_d), (out_d, with_d)):
        assert torch.equal(one, other)
    natural = wrapper.run_return_lse(*tensors, causal_p=True, lse_base="ln", lse_layout="HN")
    for (_, lse), other in zip(natural, (lse_p, lse_d), strict=True):
        torch.testing.assert_close(lse.T, other * torch.log(torch.tensor(2.0)))
    assert torch.equal(wrapper.forward(*tensors, causal_p=True)[0], out_p)


def test_scales_are_those_of_the_decode_side(target):
    both = built((PREFILL, DECODE), target)
    wrapper = made(target, DECODE)
    plan(wrapper, both[1], sm_scale=0.2)
    scales = {"q_scale": 0.5, "k_scale": torch.tensor([2.0]), "v_scale": 3.0}
    results = run(wrapper, *both, **scales, sm_scale_p=0.07)
    for inputs, result, pipeline in (
        (both[0], results[0], Pipeline(0.07, True, -1)),
        (both[1], results[1], Pipeline(0.2, False, -1, out_scale=3.0)),
    ):
        compare(*result, reference(inputs, pipeline=pipeline)).check()


def test_prefills_of_other_lengths_and_layers(target):
    """Whatever prefill comes is planned once, and no plan of one reaches another."""
    cases = [dataclasses.replace(PREFILL, qo_lens=(n,), kv_lens=(n + 31,)) for n in (3, 200, 77)]
    decode = build(DECODE, seed=9, device=target.device)
    wrapper = made(target, DECODE)
    for lens in ((90, 0, 17, 1, 1333), (5, 700, 64, 65, 16)):
        decode = build(dataclasses.replace(DECODE, kv_lens=lens), seed=9, device=target.device)
        plan(wrapper, decode)
        for _ in range(2):
            for seed, case in enumerate(cases):
                prefill = build(case, seed=seed, device=target.device)
                check_sides((prefill, decode), run(wrapper, prefill, decode))
    assert len(wrapper._pod_plans._kept) == len(cases)


def test_few_plans_are_kept(target):
    wrapper = made(target, DECODE)
    decode = build(DECODE, device=target.device)
    plan(wrapper, decode)
    for n in range(1, pod_plan._PLANS_KEPT + 9):
        prefill = build(dataclasses.replace(PREFILL, qo_lens=(n,)), device=target.device)
        run(wrapper, prefill, decode)
    assert len(wrapper._pod_plans._kept) == pod_plan._PLANS_KEPT


def test_reset_workspace_buffer(target):
    both = built((PREFILL, DECODE), target)
    wrapper = made(target, DECODE)
    plan(wrapper, both[1])
    run(wrapper, *both)
    device = target.device
    wrapper.reset_workspace_buffer(runner.workspace(device, 1 << 20), runner.workspace(device))
    check_sides(both, run(wrapper, *both))
    plan(wrapper, both[1])
    check_sides(both, run(wrapper, *both))


def refused(target, error, match, **options):
    both = built((PREFILL, DECODE), target)
    wrapper = made(target, DECODE)
    plan(wrapper, both[1], sm_scale=0.1)
    with pytest.raises(error, match=match):
        run(wrapper, *both, **options)
    runner.compare(both[0], *run(wrapper, *both)[0]).check()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"kv_layout_d": "HND"}, "kv_layout_d='HND': the decode side was planned with 'NHD'"),
        ({"pos_encoding_mode_d": "ALIBI"}, "pos_encoding_mode_d='ALIBI'.* planned with 'NONE'"),
        ({"sm_scale_d": 0.3}, "sm_scale_d=0.3: the decode side was planned with 0.1"),
        ({"window_left_d": 5}, "window_left_d=5: .* planned with -1; leave it out"),
        ({"rope_scale_d": 2.0}, "rope_scale_d=2.0: .* planned with 1.0"),
        ({"rope_theta_d": 5e5}, "rope_theta_d=500000.0: .* planned with 10000.0"),
        ({"custom_mask_d": torch.ones(3)}, "custom_mask_d: plan.. made the decode side without"),
        ({"packed_custom_mask_d": torch.ones(3)}, "packed_custom_mask_d: plan"),
        ({"kv_layout_p": "DHN"}, "prefill side: kv_layout='DHN'"),
        ({"window_left_p": -2}, "prefill side: window_left=-2"),
        ({"q_scale": torch.ones(2)}, "q_scale has 2 elements"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_refusals_of_run(target, options, match):
    refused(target, ValueError, match, **options)


def test_repeated_options_are_accepted(target):
    both = built((PREFILL, DECODE), target)
    wrapper = made(target, DECODE)
    plan(wrapper, both[1], sm_scale=0.1)
    repeated = {
        "causal_d": True,
        "kv_layout_d": "NHD",
        "pos_encoding_mode_d": "NONE",
        "sm_scale_d": 0.1,
        "window_left_d": -1,
        "rope_scale_d": 1.0,
        "rope_theta_d": 1e4,
        "use_fp16_qk_reduction": True,
        "enable_pdl": True,
    }
    run(wrapper, *both, **repeated)


def test_wrong_tensors(target):
    both = built((PREFILL, DECODE), target)
    wrapper = made(target, DECODE)
    q, k, v = prefill_tensors(both[0])
    cache = both[1].cache
    with pytest.raises(ValueError, match="before plan"):
        wrapper.run(q, k, v, both[1].q, cache)
    plan(wrapper, both[1])
    with pytest.raises(ValueError, match="prefill side: num_qo_heads = 4"):
        wrapper.run(q[:, :4], k, v, both[1].q, cache)
    with pytest.raises(TypeError, match="prefill side: q_p"):
        wrapper.run(None, k, v, both[1].q, cache)
    with pytest.raises(ValueError, match=r"prefill side: v has \d+ tokens and k"):
        wrapper.run(q, k, v[:-1], both[1].q, cache)
    with pytest.raises(ValueError, match="decode side: q has 4 rows"):
        wrapper.run(q, k, v, both[1].q[:-1], cache)
    with pytest.raises(TypeError, match="decode side: q is torch"):
        wrapper.run(q, k, v, both[1].q.half(), cache)
    with pytest.raises(TypeError, match="positional arguments too many"):
        wrapper.run(q, k, v, both[1].q, cache, *([None] * 25), 7)
    out = both[1].q.new_empty(both[1].q.shape)
    with pytest.raises(ValueError, match="shares memory with"):
        wrapper.run(q, k, v, out, cache, out_p=q, lse_p=None, out_d=q[:5])


def test_refusals_of_plan(target):
    both = built((PREFILL, DECODE), target)
    wrapper = made(target, DECODE)
    plan(wrapper, both[1])
    with pytest.raises(ValueError, match="window_left"):
        plan(wrapper, both[1], window_left=-7)
    with pytest.raises(ValueError, match="pos_encoding_mode"):
        plan(wrapper, both[1], pos_encoding_mode="SPIN")
    check_sides(both, run(wrapper, *both))
    with pytest.raises(NotImplementedError, match="jit_args"):
        made(target, DECODE, jit_args=[1])


def test_recording_is_refused(target):
    both = built((PREFILL, DECODE), target)
    wrapper = made(target, DECODE)
    plan(wrapper, both[1])
    tensors = (*prefill_tensors(both[0]), both[1].q, both[1].cache)
    from torch.fx.experimental.proxy_tensor import make_fx

    with pytest.raises(NotImplementedError, match="cannot be recorded"):
        make_fx(lambda q: wrapper.run(q, *tensors[1:])[0])(tensors[0])
    with pytest.raises(RuntimeError, match="grad"):
        wrapper.run(tensors[0].clone().requires_grad_(), *tensors[1:])


def test_what_it_tells(target):
    wrapper = made(target, DECODE)
    assert "not planned" in repr(wrapper)
    assert wrapper.variant is None
    plan(wrapper, build(DECODE, device=target.device), window_left=9)
    assert "no run yet" in repr(wrapper)
    assert (wrapper._window_left, wrapper._logits_soft_cap, wrapper._kv_layout) == (9, 0.0, "NHD")
    assert not wrapper.is_cuda_graph_enabled
    wrapper.end_forward()
    with pytest.raises(TypeError, match="cannot be pickled"):
        __import__("copy").copy(wrapper)


class GraphStage:
    """Buffers that never move, and a prefill beside any decode batch."""

    def __init__(self, target, case):
        device = target.device
        self.device = device
        batch = len(case.kv_lens)
        buffers = [
            torch.zeros(n, dtype=torch.int32, device=device) for n in (batch + 1, 400, batch)
        ]
        self.wrapper = made_for_graphs(target, case, buffers)
        self.prefill = build(PREFILL, seed=1, device=device)
        self.outputs = {**poisoned(self.prefill, "p")}
        self.results = None

    def decode(self, lens, seed):
        case = dataclasses.replace(DECODE, kv_lens=lens)
        return build(case, seed=seed, device=self.device)


def made_for_graphs(target, case, buffers):
    return made(
        target,
        case,
        use_cuda_graph=True,
        paged_kv_indptr_buffer=buffers[0],
        paged_kv_indices_buffer=buffers[1],
        paged_kv_last_page_len_buffer=buffers[2],
    )


def test_graphs_replay_what_was_planned_last(target, recorder):  # noqa: F811
    stage = GraphStage(target, DECODE)
    wrapper, prefill = stage.wrapper, stage.prefill
    first = stage.decode((90, 0, 17, 1, 1333), 2)
    pages = 200
    shape = (2, pages, 16, 2, 128)
    pool = torch.zeros(shape, dtype=DECODE.dtype, device=target.device)

    def load(decode):
        for place, one in zip(pool, decode.cache, strict=True):
            place[: one.shape[0]].copy_(one)
        q.copy_(decode.q)

    q = torch.empty_like(first.q)
    load(first)
    outputs = {**poisoned(prefill, "p"), **poisoned(first, "d")}
    options = {**prefill_options(prefill), **outputs, "return_lse_p": True, "return_lse_d": True}

    def attend():
        return wrapper.run(*prefill_tensors(prefill), q, tuple(pool), **options)

    plan(wrapper, first)
    check_sides((prefill, first), attend())
    graph = capture(recorder, target.device, attend)
    for seed, lens in enumerate(
        [(90, 0, 17, 1, 1333), (1, 2, 3, 4, 5), (0, 0, 0, 0, 0), (900,) * 3 + (7, 64)]
    ):
        decode = stage.decode(lens, 10 + seed)
        load(decode)
        plan(wrapper, decode)
        for value in outputs.values():
            value.fill_(float("nan"))
        graph.replay()
        results = [(outputs[f"out_{side}"], outputs[f"lse_{side}"]) for side in "pd"]
        check_sides((prefill, decode), results)
    with pytest.raises(ValueError, match="a CUDA graph has captured a run"):
        wrapper.reset_workspace_buffer(
            runner.workspace(target.device), runner.workspace(target.device)
        )
    with pytest.raises(ValueError, match="batch size is fixed"):
        plan(
            wrapper,
            build(dataclasses.replace(DECODE, qo_lens=(1,), kv_lens=(9,)), device=target.device),
        )


def test_graphs_keep_the_options_that_they_captured(target, recorder):  # noqa: F811
    """A plan() with others changes the lengths that they replay, and what runs from then on."""
    stage = GraphStage(target, DECODE)
    wrapper, prefill = stage.wrapper, stage.prefill
    pool = torch.zeros((2, 200, 16, 2, 128), dtype=DECODE.dtype, device=target.device)
    q = torch.empty_like(stage.decode(DECODE.kv_lens, 0).q)
    options = {**prefill_options(prefill), "return_lse_p": True, "return_lse_d": True}

    def load(lens, window_left, seed):
        case = dataclasses.replace(DECODE, kv_lens=lens, window_left=window_left)
        decode = build(case, seed=seed, device=target.device)
        for place, one in zip(pool, decode.cache, strict=True):
            place[: one.shape[0]].copy_(one)
        q.copy_(decode.q)
        return decode

    def attend(outputs):
        return wrapper.run(*prefill_tensors(prefill), q, tuple(pool), **options, **outputs)

    graphs = {}
    batches = [(90, 0, 17, 1, 1333), (1, 2, 3, 4, 500), (300,) * 5, (7, 0, 900, 64, 16)]
    for seed, lens in enumerate(batches):
        window_left = (-1, 64)[seed % 2]
        decode = load(lens, window_left, seed)
        plan(wrapper, decode)
        fresh = {**poisoned(prefill, "p"), **poisoned(decode, "d")}
        check_sides((prefill, decode), attend(fresh))
        if window_left not in graphs:
            graphs[window_left] = (capture(recorder, target.device, lambda: attend(fresh)), fresh)  # noqa: B023
        for captured, (graph, outputs) in graphs.items():
            for value in outputs.values():
                value.fill_(float("nan"))
            graph.replay()
            results = [(outputs[f"out_{side}"], outputs[f"lse_{side}"]) for side in "pd"]
            check_sides((prefill, load(lens, captured, seed)), results)


def test_a_pool_is_compared_with_the_last_plan(target, recorder, monkeypatch):  # noqa: F811
    """Also one of a run beside graphs that was large enough for the plan before."""
    monkeypatch.setenv("PREFLASH_DEBUG", "1")
    stage = GraphStage(target, DECODE)
    few, many = stage.decode((1, 2, 3, 4, 5), 2), stage.decode((90, 0, 17, 1, 1333), 2)

    def attend(decode, cache):
        both = (*prefill_tensors(stage.prefill), decode.q, cache)
        return stage.wrapper.run(*both, **prefill_options(stage.prefill))

    plan(stage.wrapper, few)
    attend(few, few.cache)
    capture(recorder, target.device, lambda: attend(few, many.cache))
    plan(stage.wrapper, many)
    with pytest.raises(ValueError, match="decode side: paged_kv_indices holds"):
        attend(many, few.cache)


@pytest.mark.parametrize("for_graphs", [True, False], ids=["use_cuda_graph", "without"])
def test_graphs_of_two_launches_keep_their_prefills(target, recorder, monkeypatch, for_graphs):  # noqa: F811
    """Several are captured beside one decode batch, whose part of them has one place."""
    monkeypatch.setattr(pod_plan, "_forced_apart", True)
    decode = build(DECODE, seed=2, device=target.device)
    wrapper = GraphStage(target, DECODE).wrapper if for_graphs else made(target, DECODE)
    plan(wrapper, decode)
    captured = []
    for case in (PREFILL, LONE_ROW, LONG_ROWS):
        prefill = build(case, seed=1, device=target.device)
        outputs = {**poisoned(prefill, "p"), **poisoned(decode, "d")}

        def attend(prefill=prefill, outputs=outputs):
            return run(wrapper, prefill, decode, **outputs)

        attend()
        graph = capture(recorder, target.device, attend)
        captured.append((prefill, outputs, graph, weakref.ref(wrapper._pod_plans.last.launch)))
    plan(wrapper, decode)
    gc.collect()
    for prefill, outputs, graph, launch in captured:
        assert launch() is not None, "its work list is memory of somebody else by now"
        for value in outputs.values():
            value.fill_(float("nan"))
        graph.replay()
        results = [(outputs[f"out_{side}"], outputs[f"lse_{side}"]) for side in "pd"]
        check_sides((prefill, decode), results)


# Batches of prefills.

PREFILLS = Case(
    "prefills", (37, 0, 150, 5), (100, 9, 150, 300), 8, 2, 128, page_size=16, mask=MaskKind.CAUSAL
)
BATCHES = {
    "causal": (PREFILLS, DECODE),
    "full": (dataclasses.replace(PREFILLS, mask=MaskKind.NONE), DECODE),
    "masked": (dataclasses.replace(PREFILLS, mask=MaskKind.CUSTOM), DECODE),
    "decode of several rows": (
        PREFILLS,
        dataclasses.replace(DECODE, qo_lens=(1, 0, 4, 2, 3), kv_lens=(90, 5, 17, 2, 1333)),
    ),
    "page 1": tuple(
        dataclasses.replace(one, page_size=1, form=KvForm.FLAT) for one in (PREFILLS, DECODE)
    ),
    "HND": tuple(
        dataclasses.replace(one, layout="HND", form=KvForm.COMBINED) for one in (PREFILLS, DECODE)
    ),
    "window": tuple(dataclasses.replace(one, window_left=64) for one in (PREFILLS, DECODE)),
    "ALiBi": tuple(dataclasses.replace(one, position=Position.ALIBI) for one in (PREFILLS, DECODE)),
    "RoPE": tuple(dataclasses.replace(one, position=Position.ROPE) for one in (PREFILLS, DECODE)),
    "fp8 caches": tuple(
        dataclasses.replace(one, kv_dtype=torch.float8_e4m3fn) for one in (PREFILLS, DECODE)
    ),
    "no prefill": (dataclasses.replace(PREFILLS, qo_lens=(), kv_lens=()), DECODE),
    "no decode": (PREFILLS, dataclasses.replace(DECODE, qo_lens=(), kv_lens=())),
}


def table(inputs) -> tuple:
    return (inputs.qo_indptr, inputs.kv_indptr, inputs.indices, inputs.last_page_len)


def plan_batches(wrapper, prefill, decode, **options):
    case = prefill.case
    heads = (case.num_qo_heads, case.num_kv_heads, case.head_dim, case.page_size)
    given = {
        "pos_encoding_mode": case.position.value,
        "window_left": case.window_left,
        "q_data_type": case.dtype,
        "kv_data_type": case.dtype_kv,
    }
    wrapper.plan(*table(prefill), *table(decode), *heads, **{**given, **options})


def run_batches(wrapper, prefill, decode, **options):
    given = {
        "custom_mask_p": prefill.custom_mask,
        "packed_custom_mask_p": prefill.packed_custom_mask,
        "causal_p": prefill.pipeline.causal,
        "return_lse": True,
        **poisoned(prefill, "p"),
        **poisoned(decode, "d"),
    }
    sides = (prefill.q, prefill.cache, decode.q, decode.cache)
    return wrapper.run(*sides, **{**given, **options})


def made_of_batches(target, case):
    return preflash.BatchPODWithPagedKVCacheWrapper(
        runner.workspace(target.device), case.layout, backend=target.backend
    )


@pytest.mark.parametrize("pair", BATCHES.values(), ids=BATCHES)
def test_batches(target, pair):
    both = built(pair, target)
    wrapper = made_of_batches(target, pair[0])
    plan_batches(wrapper, *both)
    for _ in range(2):
        check_sides(both, run_batches(wrapper, *both))


@pytest.mark.parametrize("installed", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("runs_before", [0, 1])
def test_an_interrupted_plan_of_batches(target, monkeypatch, installed, runs_before):
    """Both sides of the old plan or both of the new one, also where work lists have one place."""
    wrapper = made_of_batches(target, PREFILLS)
    memory = [runner.workspace(target.device, 1 << n) for n in (27, 21)]
    wrapper.reset_workspace_buffer(*memory)
    old = built(BATCHES["causal"], target)
    longer = dataclasses.replace(PREFILLS, qo_lens=(64,) * 5, kv_lens=(200,) * 5)
    decode = dataclasses.replace(DECODE, qo_lens=(1,) * 40, kv_lens=(70,) * 40)
    new = built((longer, decode), target)

    install = wrapper._decode._install

    def interrupt(drafted):
        if installed:
            install(drafted)
        raise KeyboardInterrupt

    with mock.patch.object(pod_plan, "_forced_apart", True):
        plan_batches(wrapper, *old)
        for _ in range(runs_before):
            check_sides(old, run_batches(wrapper, *old))
        with monkeypatch.context() as patch:
            patch.setattr(wrapper._decode, "_install", interrupt)
            with pytest.raises(KeyboardInterrupt):
                plan_batches(wrapper, *new)
        both = new if installed else old
        check_sides(both, run_batches(wrapper, *both))
        wrapper.reset_workspace_buffer(*memory)
        check_sides(both, run_batches(wrapper, *both))


def test_one_plan_serves_every_mask(target):
    """causal_p and the masks are of run()."""
    wrapper = made_of_batches(target, PREFILLS)
    both = masked, decode = built(BATCHES["masked"], target)
    plan_batches(wrapper, *both)
    for kind in (MaskKind.CAUSAL, MaskKind.NONE, MaskKind.CUSTOM, MaskKind.CAUSAL):
        prefill = masked
        if kind is not MaskKind.CUSTOM:
            case = dataclasses.replace(PREFILLS, mask=kind)
            prefill = dataclasses.replace(
                masked, case=case, masks=None, custom_mask=None, packed_custom_mask=None
            )
        check_sides((prefill, decode), run_batches(wrapper, prefill, decode))
    with pytest.raises(ValueError, match="prefill side: custom_mask has shape"):
        run_batches(wrapper, *both, custom_mask_p=torch.ones(7, dtype=torch.bool))
    with pytest.raises((TypeError, ValueError), match="causal_p"):
        run_batches(wrapper, *both, causal_p="yes")


def test_batches_without_lse_and_with_scales(target):
    both = built(BATCHES["causal"], target)
    wrapper = made_of_batches(target, PREFILLS)
    with pytest.raises(ValueError, match="before plan"):
        run_batches(wrapper, *both)
    plan_batches(wrapper, *both, sm_scale=0.2)
    out_p, out_d = wrapper.run(
        both[0].q, both[0].cache, both[1].q, both[1].cache, causal_p=True, k_scale=2.0, v_scale=0.5
    )
    (_, lse_p), (_, lse_d) = run_batches(wrapper, *both, k_scale=2.0, v_scale=0.5)
    compare(out_p, lse_p, reference(both[0], pipeline=Pipeline(0.2, True, -1))).check()
    scaled = Pipeline(0.4, False, -1, out_scale=0.5)
    compare(out_d, lse_d, reference(both[1], pipeline=scaled)).check()
    device = target.device
    wrapper.reset_workspace_buffer(runner.workspace(device), runner.workspace(device))
    again, _ = run_batches(wrapper, *both, k_scale=2.0, v_scale=0.5)
    assert torch.equal(again[0], out_p)


def test_refused_batches(target):
    both = built(BATCHES["causal"], target)
    wrapper = made_of_batches(target, PREFILLS)
    plan_batches(wrapper, *both)
    arrays = [*table(both[0]), *table(both[1])]
    heads = (8, 2, 128, 16)
    for place, side in ((1, "prefill"), (5, "decode")):
        bad = list(arrays)
        bad[place] = bad[place].flip(0).contiguous()
        with pytest.raises(ValueError, match=f"{side} side: .*indptr"):
            wrapper.plan(*bad, *heads, q_data_type=torch.bfloat16)
    check_sides(both, run_batches(wrapper, *both))


def test_signatures():
    """The documented parameters come first, in the documented order."""
    single = list(inspect.signature(preflash.PODWithPagedKVCacheWrapper.run).parameters)
    assert single[1:6] == ["q_p", "k_p", "v_p", "q_d", "paged_kv_cache_d"]
    assert single[-7:] == ["args", "out_p", "lse_p", "out_d", "lse_d", "lse_base", "lse_layout"]
    assert single.index("return_lse_d") == single.index("use_fp16_qk_reduction") - 1
    batch = list(inspect.signature(preflash.BatchPODWithPagedKVCacheWrapper.run).parameters)
    assert batch[1:8] == [
        "q_p",
        "paged_kv_cache_p",
        "q_d",
        "paged_kv_cache_d",
        "custom_mask_p",
        "packed_custom_mask_p",
        "causal_p",
    ]
    assert list(inspect.signature(preflash.PODWithPagedKVCacheWrapper.plan).parameters)[1:] == [
        "indptr",
        "indices",
        "last_page_len",
        "num_qo_heads",
        "num_kv_heads",
        "head_dim",
        "page_size",
        "pos_encoding_mode",
        "window_left",
        "q_data_type",
        "kv_data_type",
        "data_type",
        "sm_scale",
        "rope_scale",
        "rope_theta",
        "non_blocking",
        "batch_invariant",
        "seq_lens",
        "lengths_are_upper_bounds",
    ]


@pytest.mark.parametrize("seed", range(24))
def test_random_pairs(target, seed):
    """Any prefill beside any decode batch of the same heads."""
    rng = random.Random(seed)
    kv_heads = rng.choice([1, 2, 3])
    shared = {
        "num_qo_heads": kv_heads * rng.choice([1, 4, 5]),
        "num_kv_heads": kv_heads,
        "head_dim": rng.choice([64, 80, 128, 200]),
        "dtype": rng.choice([torch.float16, torch.bfloat16]),
    }
    shared["layout"] = rng.choice(["NHD", "HND"])
    prefill = Case(
        "prefill",
        (rng.choice([0, 1, 7, 65, 130, 200]),),
        (rng.choice([0, 1, 64, 99, 300]),),
        mask=rng.choice(list(MaskKind)),
        window_left=rng.choice([-1, -1, 0, 50]),
        **shared,
    )
    kv_lens = tuple(rng.choice([0, 1, 15, 64, 257, 1000]) for _ in range(rng.randrange(6)))
    decode = Case(
        "decode",
        (1,) * len(kv_lens),
        kv_lens,
        page_size=rng.choice([1, 3, 8, 16, 64]),
        window_left=rng.choice([-1, -1, 0, 100]),
        **shared,
    )
    both = built((prefill, decode), target)
    wrapper = made(target, decode)
    plan(wrapper, both[1])
    check_sides(both, run(wrapper, *both))
