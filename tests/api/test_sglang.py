"""preflash's backend of SGLang on stand-ins for SGLang. tests/engines runs it on SGLang's own
files."""

from __future__ import annotations

import enum
import importlib
import subprocess
import sys
import types
from types import SimpleNamespace

import pytest
import torch
from engine_modules import add_modules
from preflash import _core
from preflash.integrations import sglang as integration
from sglang_stand_ins import (
    KV_HEADS,
    MAX_TOKENS,
    NUM_STEPS,
    Algorithm,
    AttentionType,
    D,
    Drafts,
    Engine,
    Graph,
    Layer,
    Mode,
    Request,
    WriteLoc,
    close,
    reference,
)  # fmt: skip

CHOICES = "sglang.srt.arg_groups.choices"
REGISTRY = "sglang.srt.layers.attention.attention_registry"
HOOKS = "sglang.srt.plugins.hook_registry"
OURS = tuple(
    f"preflash.integrations.sglang.{name}"
    for name in ("tables", "layers", "limits", "steps", "plans", "backend", "draft")
)


# The name.


@pytest.fixture
def registry(monkeypatch):
    """SGLang's lists of backends, and its hooks."""
    factories, choices, deterministic, registered = {}, ["fa3"], ["triton"], []
    hook_type = enum.Enum("HookType", "BEFORE AFTER")
    add_modules(
        monkeypatch,
        {
            CHOICES: {
                "add_attention_backend_choices": choices.extend,
                "add_deterministic_attention_backend_choices": deterministic.extend,
            },
            REGISTRY: {
                "register_attention_backend": lambda name: (
                    lambda make: factories.setdefault(name, make)
                )
            },
            HOOKS: {
                "HookType": hook_type,
                "HookRegistry": SimpleNamespace(register=lambda *given: registered.append(given)),
            },
        },
    )
    monkeypatch.setattr(integration.registration, "_registered", False)
    return SimpleNamespace(
        factories=factories,
        choices=choices,
        deterministic=deterministic,
        hooks=registered,
        before=hook_type.BEFORE,
    )


def test_the_name_is_registered_once(registry):
    integration.load_plugin()
    integration.register()
    assert list(registry.factories) == ["preflash"]
    assert registry.choices == ["fa3", "preflash"]
    assert registry.deterministic == ["triton", "preflash"]
    ((target, _, kind),) = registry.hooks
    assert target == "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend"
    assert kind is registry.before


def test_the_hook_adds_a_draft_backend(registry, monkeypatch):
    integration.load_plugin()
    ((_, hook, _),) = registry.hooks
    backend = types.ModuleType("backend")
    backend.PreflashAttnBackend = lambda runner: ("extend", runner)
    draft = types.ModuleType("draft")
    draft.PreflashMultiStepDraftBackend = lambda *given: ("decode", *given)
    monkeypatch.setitem(sys.modules, f"{integration.__name__}.backend", backend)
    monkeypatch.setitem(sys.modules, f"{integration.__name__}.draft", draft)
    assert registry.factories["preflash"]("target") == ("extend", "target")
    factory = SimpleNamespace(draft_model_runner="draft", topk=4, speculative_num_steps=3)
    theirs = {"fa3": lambda: None}
    arguments, named = hook(factory, "prefill_attention_backend", theirs, "not {backend_type}")
    assert arguments[:2] == (factory, "prefill_attention_backend")
    assert arguments[3] == "not {backend_type}"
    assert named == {"stamps_children": False}
    assert list(theirs) == ["fa3"]
    assert arguments[2]["fa3"] is theirs["fa3"]
    assert arguments[2]["preflash"]() == ("preflash", ("extend", "draft"))
    arguments, named = hook(factory, "decode_attention_backend", theirs, "", stamps_children=True)
    assert named == {"stamps_children": True}
    assert arguments[2]["preflash"]() == ("preflash", ("decode", "draft", 4, 3))


def test_without_sglang(monkeypatch, capsys):
    monkeypatch.setattr(integration.registration, "_registered", False)
    monkeypatch.setitem(sys.modules, "sglang", None)
    integration.load_plugin()
    assert "no attention backend preflash in SGLang: " in capsys.readouterr().err
    with pytest.raises(ImportError):
        integration.register()


def test_the_package_imports_nothing_of_sglang():
    code = "import sys, preflash.integrations.sglang; print('sglang' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# The backend.


@pytest.fixture
def sglang(monkeypatch, target):
    """The backend's classes on stand-ins, for the target's device."""
    monkeypatch.setenv("PREFLASH_BACKEND", target.backend)
    parallel = SimpleNamespace(attn_dcp_size=1, attn_cp_size=1)
    spec = SimpleNamespace(speculative_eagle_topk=None, speculative_num_draft_tokens=None)
    state = SimpleNamespace(window=(0, 0))
    deterministic = SimpleNamespace(enable_deterministic_inference=False)
    attention = "sglang.srt.layers.attention"
    add_modules(
        monkeypatch,
        {
            f"{attention}.base_attn_backend": {"AttentionBackend": type("Base", (), {})},
            f"{attention}.verify_mask": {
                "VerifyMask": object,
                "maybe_create_verify_mask": lambda **given: given,
            },
            "sglang.srt.layers.radix_attention": {
                "AttentionType": AttentionType,
                "RadixAttention": Layer,
            },
            "sglang.srt.mem_cache.memory_pool": {"KVWriteLoc": WriteLoc},
            "sglang.srt.runtime_context": {
                "get_exec": lambda: SimpleNamespace(deterministic=deterministic),
                "get_parallel": lambda: parallel,
                "get_spec": lambda: spec,
            },
            "sglang.srt.speculative.spec_utils": {
                "resolve_draft_decode_window": lambda _runner: state.window
            },
        },
    )
    for name in OURS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    modules = {name.rpartition(".")[2]: importlib.import_module(name) for name in OURS}
    yield SimpleNamespace(
        backend=modules["backend"].PreflashAttnBackend,
        draft=modules["draft"].PreflashMultiStepDraftBackend,
        parallel=parallel,
        spec=spec,
        state=state,
        deterministic=deterministic,
        device=torch.device(target.device),
    )
    for name in OURS:
        sys.modules.pop(name, None)


MIXED = (Request(1, 40), Request(7, 7), Request(3, 50), Request(1, 17))
DECODES = tuple(Request(1, n) for n in (40, 7, 50, 17))


PAGES = pytest.mark.parametrize("page_size", [1, 16])


@PAGES
def test_prefills_and_decodes(sglang, page_size):
    engine = Engine(sglang, page_size=page_size)
    engine.check(MIXED)
    engine.check(DECODES, Mode.DECODE, seed=1)
    engine.check((Request(20, 20), Request(64, 64)), seed=2)
    engine.check(MIXED[::-1], seed=3)


@PAGES
@pytest.mark.parametrize(
    "layer",
    [
        {"sliding_window_size": 8},
        {"logit_cap": 3.0},
        {"scaling": 0.05},
        {"head_dim": 192, "v_head_dim": 128},
        {"head_dim": 256, "v_head_dim": 256},
        {"head_dim": 512, "v_head_dim": 512},
    ],
    ids=lambda layer: "_".join(f"{key}{value}" for key, value in layer.items()),
)
def test_an_option_of_a_layer(sglang, page_size, layer):
    engine = Engine(sglang, layer, page_size=page_size)
    engine.check(MIXED)
    engine.check(DECODES, Mode.DECODE, seed=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sinks(sglang, dtype):
    engine = Engine(sglang)
    sinks = torch.tensor([0.5, 1.0, 2.0, -1.0]).to(dtype)
    engine.check(MIXED, sinks=sinks)
    engine.check(DECODES, Mode.DECODE, sinks=sinks)


@PAGES
def test_windows_have_a_pool_of_their_own(sglang, page_size):
    engine = Engine(sglang, {}, {"sliding_window_size": 8}, page_size=page_size, window_pool=True)
    engine.check(MIXED)
    engine.check(DECODES, Mode.DECODE, seed=1)
    engine.check(MIXED, seed=2)


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_an_fp8_cache_with_scales(sglang, kv_dtype):
    scales = {"k_scale": 2.0, "k_scale_float": 2.0, "v_scale": 0.5, "v_scale_float": 0.5}
    engine = Engine(sglang, scales, {**scales, "logit_cap": 3.0}, kv_dtype=kv_dtype, page_size=16)
    engine.check(MIXED)
    engine.check(DECODES, Mode.DECODE, seed=1)


def test_scales_beside_a_16_bit_cache(sglang):
    """A checkpoint has scales whatever --kv-cache-dtype is; SGLang writes such a cache without."""
    scales = {"k_scale": 0.05, "k_scale_float": 0.05, "v_scale": 0.05, "v_scale_float": 0.05}
    engine = Engine(sglang, scales, page_size=16)
    engine.check(MIXED)
    engine.check(DECODES, Mode.DECODE, seed=1)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("page_size", [1, 16])
def test_cross_attention(sglang, page_size, known):
    """Text begins inside of a page; the encoders' lengths may be on the device alone."""
    engine = Engine(
        sglang, {}, {"is_cross_attention": True}, page_size=page_size, encoder_decoder=True
    )
    requests = (Request(4, 4, encoder=21), Request(9, 9, encoder=0), Request(2, 30, encoder=33))
    changed = {} if known else {"encoder_lens_cpu": None}
    engine.check(requests, **changed)


def test_an_encoder(sglang):
    engine = Engine(sglang, {"attn_type": AttentionType.ENCODER_ONLY})
    engine.check((Request(9, 9), Request(33, 33)))
    assert engine.pool.pairs[0][0].isnan().all()  # it has no cache


def test_lengths_on_the_device_alone(sglang):
    engine = Engine(sglang, {}, {"sliding_window_size": 8}, page_size=16)
    engine.check(DECODES, Mode.DECODE, seq_lens_cpu=None)


def test_bounds_that_are_larger_than_the_lengths(sglang):
    engine = Engine(sglang, page_size=16)
    bounds = torch.tensor([request.total + 37 for request in MIXED])
    engine.check(MIXED, seq_lens_cpu=bounds)
    engine.check(MIXED, seq_lens_cpu=bounds + MAX_TOKENS, seed=1)


def test_keys_that_are_in_the_cache_already(sglang):
    engine = Engine(sglang)
    engine.allocate(DECODES)
    ((q, pairs),) = engine.inputs(DECODES)
    for row, (k, v) in enumerate(pairs, 1):
        engine.write(engine.layers[0], engine.table[row, : len(k)], k, v)
    batch = engine.batch(DECODES, Mode.DECODE)
    engine.backend.init_forward_metadata(batch)
    wanted = reference(q, pairs, DECODES, engine.layers[0], engine)
    close(engine.forward(0, q, None, None, batch), wanted)
    junk = torch.full((4, KV_HEADS, D), float("nan"))
    close(engine.forward(0, q, junk, junk, batch, save_kv_cache=False), wanted)


def test_deterministic_inference(sglang):
    """A decode step has the bits of the last row of a chunk."""
    sglang.deterministic.enable_deterministic_inference = True
    engine = Engine(sglang, page_size=16)
    chunks, steps = (Request(7, 50), Request(30, 70)), (Request(1, 50), Request(1, 70))
    engine.allocate(chunks)
    ((q, pairs),) = engine.inputs(chunks)
    for row, (k, v) in enumerate(pairs, 1):
        engine.write(engine.layers[0], engine.table[row, : len(k)], k, v)
    last, out = [6, 36], []
    for requests, mode, rows in ((chunks, Mode.EXTEND, q), (steps, Mode.DECODE, q[last])):
        batch = engine.batch(requests, mode)
        engine.backend.init_forward_metadata(batch)
        out.append(engine.forward(0, rows, None, None, batch))
    assert torch.equal(out[0][last], out[1])


def test_rows_of_padding_are_zero(sglang):
    engine = Engine(sglang)
    engine.allocate(DECODES)
    inputs = engine.inputs(DECODES)
    engine.fill(DECODES, inputs)
    ((q, pairs),) = inputs
    batch = engine.batch(DECODES, Mode.DECODE)
    engine.backend.init_forward_metadata(batch)
    padded = torch.cat([q, torch.full_like(q, float("nan"))])
    out = engine.forward(0, padded, *engine.new_keys(0, DECODES, pairs), batch)
    close(out[:4], reference(q, pairs, DECODES, engine.layers[0], engine))
    assert (out[4:] == 0.0).all()


def test_a_step_is_planned_in_cpp_once_for_each_form(sglang, monkeypatch):
    found, again = [], _core.plan_again
    monkeypatch.setattr(
        _core, "plan_again", lambda *given: found.append(again(*given)) or found[-1]
    )
    engine = Engine(sglang, {}, {}, {"sliding_window_size": 9})
    for requests in (MIXED, DECODES, MIXED[:2]):
        engine.check(requests)
    assert found == [False] * 2 + [True] * 4


def test_trees_leave_the_plans_of_other_steps_in_cpp(sglang, monkeypatch):
    engine = Engine(sglang, **speculative(sglang, topk=4))
    engine.check(MIXED)
    masks = tree_masks(VERIFIED)
    info = spec_info(5, [mask.to(sglang.device) for mask in masks])
    engine.check(VERIFIED, Mode.TARGET_VERIFY, masks=masks, spec_info=info)
    found, again = [], _core.plan_again
    monkeypatch.setattr(
        _core, "plan_again", lambda *given: found.append(again(*given)) or found[-1]
    )
    engine.check(MIXED, seed=1)
    assert found == [True]


def test_a_layer_that_is_no_module_of_the_model(sglang):
    engine = Engine(sglang, {}, {"logit_cap": 3.0})
    engine.runner.model = torch.nn.ModuleList(engine.layers[:1])
    engine.check(MIXED)
    engine.check(DECODES, Mode.DECODE)


def test_a_layer_that_is_no_module_of_the_model_may_be_refused(sglang):
    engine = Engine(sglang, {}, {"logit_cap": 3.0, "xai_temperature_len": 8})
    engine.runner.model = torch.nn.ModuleList(engine.layers[:1])
    with pytest.raises(NotImplementedError, match="layer 1: preflash does not scale the logits"):
        engine.check(MIXED)


def test_an_idle_step_has_no_plan(sglang):
    engine = Engine(sglang)
    engine.backend.init_forward_metadata(SimpleNamespace(forward_mode=Mode.IDLE))


# Speculative decoding.


def speculative(sglang, algorithm="EAGLE", topk=1):
    sglang.spec.speculative_eagle_topk, sglang.spec.speculative_num_draft_tokens = topk, 5
    return {"spec_algorithm": Algorithm(algorithm)}


def spec_info(new, masks=None, **values):
    mask = None if masks is None else torch.cat([mask.flatten() for mask in masks])
    return SimpleNamespace(
        draft_token_num=new,
        num_tokens_per_req=new,
        custom_mask=mask,
        ragged_verify_layout=None,
        **values,
    )


def tree_masks(requests, seed=0):
    """Every draft sees the tokens before the drafts, itself, and some of the drafts before it."""
    generator = torch.Generator().manual_seed(seed)
    masks = []
    for request in requests:
        drafts = torch.rand(request.new, request.new, generator=generator) < 0.5
        drafts = drafts.tril() | torch.eye(request.new, dtype=torch.bool)
        before = torch.ones(request.new, request.total - request.new, dtype=torch.bool)
        masks.append(torch.cat([before, drafts], 1))
    return masks


VERIFIED = (Request(5, 40), Request(5, 21), Request(5, 100))


@PAGES
def test_a_chain_is_verified_with_causal_masking(sglang, page_size):
    engine = Engine(
        sglang, {}, {"sliding_window_size": 8}, page_size=page_size, **speculative(sglang)
    )
    unread = torch.zeros(75, dtype=torch.bool, device=sglang.device)
    info = spec_info(5)
    info.custom_mask = unread
    engine.check(VERIFIED, Mode.TARGET_VERIFY, spec_info=info)
    engine.backend.update_verify_buffers_to_fill_after_draft(info, None)


@PAGES
@pytest.mark.parametrize(("algorithm", "topk"), [("EAGLE", 4), ("NGRAM", 1)])
def test_a_tree_is_verified_with_its_mask(sglang, page_size, algorithm, topk):
    config = speculative(sglang, algorithm, topk)
    engine = Engine(sglang, {}, {"logit_cap": 3.0}, page_size=page_size, **config)
    for seed in (0, 1):
        masks = tree_masks(VERIFIED, seed)
        info = spec_info(5, [mask.to(sglang.device) for mask in masks])
        engine.check(VERIFIED, Mode.TARGET_VERIFY, seed=seed, masks=masks, spec_info=info)
        engine.check(MIXED, seed=seed)
    with pytest.raises(NotImplementedError, match="SGLANG_ENABLE_OVERLAP_PLAN_STREAM"):
        engine.backend.update_verify_buffers_to_fill_after_draft(info, None)


def test_a_draft_extend_step(sglang):
    engine = Engine(sglang, page_size=16, is_draft_worker=True, **speculative(sglang, topk=4))
    engine.check(VERIFIED, Mode.DRAFT_EXTEND_V2, spec_info=spec_info(5))
    engine.check(
        VERIFIED, Mode.DRAFT_EXTEND_V2, seed=1, spec_info=spec_info(5), extend_seq_lens_cpu=None
    )


@pytest.mark.parametrize("topk", [1, 3])
@PAGES
@pytest.mark.parametrize("window_pool", [False, True])
def test_draft_steps(sglang, topk, page_size, window_pool):
    engine = Engine(
        sglang, {}, {"sliding_window_size": 8}, page_size=page_size, is_draft_worker=True,
        window_pool=window_pool, **speculative(sglang, topk=topk),
    )  # fmt: skip
    backend = sglang.draft(engine.runner, topk, NUM_STEPS)
    assert backend.kv_index_translator is engine.runner.kv_index_translator
    assert len(backend.attn_backends) == NUM_STEPS - 1
    for seed, lengths in enumerate(((40, 7, 50), (16, 100))):
        drafts = Drafts(engine, topk, lengths, seed)
        batch = drafts.batch()
        backend.init_forward_metadata(batch)
        for step, each in enumerate(backend.attn_backends):
            for index, layer in enumerate(engine.layers):
                q, k, v, batch.out_cache_loc = drafts.new_token(layer, step)
                each.init_forward_metadata_in_graph(batch)
                out = engine.forward(index, q, k, v, batch, each)
                close(out, drafts.wanted(layer, q, step))


def test_no_step_waits_for_the_device(sglang):
    if sglang.device.type != "cuda":
        pytest.skip("the CPU has no queue to wait for")
    engine = Engine(sglang, page_size=16, **speculative(sglang, topk=4))
    masks = tree_masks(VERIFIED)
    info = spec_info(5, [mask.to(sglang.device) for mask in masks])
    steps = [(MIXED, Mode.EXTEND, {}), (DECODES, Mode.DECODE, {})]
    steps += [(VERIFIED, Mode.TARGET_VERIFY, {"masks": masks, "spec_info": info})]
    begun = []
    for requests, mode, given in steps:
        batch = engine.check(requests, mode, **given)
        begun.append((engine.backend.init_forward_metadata, batch))
    draft = Engine(
        sglang, {}, {"sliding_window_size": 8}, window_pool=True, is_draft_worker=True,
        **speculative(sglang, topk=4),
    )  # fmt: skip
    backend = sglang.draft(draft.runner, 4, NUM_STEPS)
    batch = Drafts(draft, 4, (40, 7, 50)).batch()
    backend.init_forward_metadata(batch)
    begun.append((backend.init_forward_metadata, batch))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for begin, batch in begun:
            begin(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# CUDA graphs; on the CPU a run takes the place of a replay.


def graph_kinds():
    steps = [
        tuple(Request(1, n) for n in (40, 7, 50, 170)),
        tuple(Request(1, n) for n in (3, 200)),
    ]
    verified = [VERIFIED, (Request(5, 200),), (Request(5, 6), Request(5, 80))]
    verified.append((Request(5, 250),) * 4)  # as many bits of a mask as there may be
    return [
        pytest.param(Mode.DECODE, 1, steps, 1, id="decode"),
        pytest.param(Mode.TARGET_VERIFY, 5, verified, 1, id="chain"),
        pytest.param(Mode.TARGET_VERIFY, 5, verified, 4, id="tree"),
        pytest.param(Mode.DRAFT_EXTEND_V2, 5, verified, 1, id="draft-extend"),
    ]


@pytest.mark.parametrize(("mode", "rows", "steps", "topk"), graph_kinds())
@PAGES
@pytest.mark.parametrize(
    ("layer", "window_pool"),
    [({}, False), ({"sliding_window_size": 8}, False), ({"sliding_window_size": 8}, True)],
    ids=["full", "window", "window-pool"],
)
def test_replays(sglang, mode, rows, steps, topk, page_size, layer, window_pool):
    if topk > 1 and layer:
        pytest.skip("a window over a tree is refused")
    size = 4
    engine = Engine(
        sglang, layer, page_size=page_size, window_pool=window_pool,
        **speculative(sglang, topk=topk),
    )  # fmt: skip
    backend = engine.backend
    backend.init_cuda_graph_state(size + 2, (size + 2) * rows)
    assert (backend.verify_mask is None) == (topk > 1)
    ones = torch.ones(size * rows * (rows + 1), dtype=torch.bool, device=sglang.device)
    info = spec_info(rows)
    info.custom_mask = ones
    lengths = [1] * size  # of padding, too, also where a request has more query rows
    captured = SimpleNamespace(
        forward_mode=mode,
        batch_size=size,
        req_pool_indices=engine.tensor([0] * size),
        seq_lens=engine.tensor(lengths),
        seq_lens_cpu=torch.tensor(lengths),
        spec_info=info,
    )
    backend.init_forward_metadata_out_graph(captured, in_capture=True)
    graph = Graph(engine, size * rows, backend, captured)
    for seed, requests in enumerate(steps):
        engine.allocate(requests)
        inputs = engine.inputs(requests, seed)
        engine.fill(requests, inputs)
        masks = tree_masks(requests, seed) if topk > 1 else None
        info = spec_info(rows, masks and [mask.to(sglang.device) for mask in masks])
        batch = engine.batch(
            requests, mode, size - len(requests), spec_info=info, extend_seq_lens_cpu=None
        )
        backend.init_forward_metadata_out_graph(batch)
        assert all(w.is_cuda_graph_enabled for w in backend.plans.wrappers.values())
        ((q, pairs),) = inputs
        out = graph.replay(q, *engine.new_keys(0, requests, pairs), batch.out_cache_loc)
        close(out, reference(q, pairs, requests, engine.layers[0], engine, masks))


@pytest.mark.parametrize("topk", [1, 3])
@PAGES
def test_replays_of_draft_steps(sglang, topk, page_size):
    size = 3
    engine = Engine(
        sglang, page_size=page_size, is_draft_worker=True, **speculative(sglang, topk=topk)
    )
    backend = sglang.draft(engine.runner, topk, NUM_STEPS)
    backend.init_cuda_graph_state(size + 1, (size + 1) * topk)
    captured = SimpleNamespace(
        forward_mode=Mode.DECODE,
        batch_size=size,
        req_pool_indices=engine.tensor([0] * size),
        seq_lens=engine.tensor([1] * size),
        seq_lens_cpu=torch.tensor([1] * size),
    )
    backend.init_forward_metadata_out_graph(captured, in_capture=True)
    graphs = [Graph(engine, size * topk, each, captured) for each in backend.attn_backends]
    for seed, lengths in enumerate(((40, 7, 50), (16, 100))):
        drafts = Drafts(engine, topk, lengths, seed)
        backend.init_forward_metadata_out_graph(drafts.batch(size - len(lengths)))
        for step, graph in enumerate(graphs):
            q, k, v, locs = drafts.new_token(engine.layers[0], step)
            close(graph.replay(q, k, v, locs), drafts.wanted(engine.layers[0], q, step))


def captured_decodes(engine):
    engine.allocate(DECODES)
    batch = engine.batch(DECODES, Mode.DECODE)
    engine.backend.init_forward_metadata_out_graph(batch, in_capture=True)
    return batch, dict(engine.backend.plans.wrappers)


def test_two_graphs_of_one_size_share_their_plan(sglang):
    """SGLang captures a size with and without LoRA, and plans once before it replays either."""
    engine = Engine(sglang, {}, {"sliding_window_size": 8})
    engine.backend.init_cuda_graph_state(4, 4)
    _, first = captured_decodes(engine)
    _, second = captured_decodes(engine)
    assert len(first) == 2
    assert first == second
    engine.backend.init_cuda_graph_state(4, 4)  # other memory: every graph is captured again
    _, third = captured_decodes(engine)
    assert not set(first.values()) & set(third.values())


def test_scales_that_are_updated_after_a_capture(sglang):
    scales = {"k_scale": 2.0, "k_scale_float": 2.0, "v_scale": 0.5, "v_scale_float": 0.5}
    for kv_dtype in (torch.float16, torch.float8_e4m3fn):
        engine = Engine(sglang, scales, kv_dtype=kv_dtype)
        engine.backend.init_cuda_graph_state(4, 4)
        batch, _ = captured_decodes(engine)
        engine.backend.init_forward_metadata_out_graph(batch)
        engine.layers[0].v_scale_float = 0.25
        if kv_dtype is torch.float16:
            engine.backend.init_forward_metadata_out_graph(batch)
            continue
        with pytest.raises(RuntimeError, match="scales of k and v are not those that CUDA graphs"):
            engine.backend.init_forward_metadata_out_graph(batch)


def test_a_layer_found_in_the_warm_up_is_captured(sglang):
    engine = Engine(sglang, {}, {"scaling": 0.05})
    engine.runner.model = torch.nn.ModuleList(engine.layers[:1])
    engine.allocate(DECODES)
    backend, inputs = engine.backend, engine.inputs(DECODES)
    engine.fill(DECODES, inputs)
    backend.init_cuda_graph_state(4, 4)
    batch = engine.batch(DECODES, Mode.DECODE)
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    assert len(backend.plans.wrappers) == 1
    for index, (q, pairs) in enumerate(inputs):
        out = engine.forward(index, q, *engine.new_keys(index, DECODES, pairs), batch)
        close(out, reference(q, pairs, DECODES, engine.layers[index], engine))
    assert len(backend.plans.wrappers) == 2
    assert all(w.is_cuda_graph_enabled for w in backend.plans.wrappers.values())


# Refusals.


@pytest.mark.parametrize(
    ("layer", "says"),
    [
        ({"head_dim": 576, "v_head_dim": 512}, "multiples of 8 up to 512, not 576"),
        ({"v_head_dim": 100}, "multiples of 8 up to 512, not 100"),
        ({"attn_type": AttentionType.DECODER_BIDIRECTIONAL}, "sees later tokens"),
        (
            {"attn_type": AttentionType.ENCODER_ONLY, "sliding_window_size": 8},
            "window without causal masking has two sides",
        ),
        ({"pos_encoding_mode": "ROPE_LLAMA"}, "pos_encoding_mode='NONE'"),
        ({"logit_capping_method": "sigmoid"}, "logit_capping_method='tanh'"),
        ({"xai_temperature_len": 1024}, "xai_temperature_len"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_layers_that_are_refused(sglang, layer, says):
    with pytest.raises(NotImplementedError, match=f"layer 1: .*{says}"):
        _ = Engine(sglang, {}, layer).backend


def test_head_sizes_of_an_fp8_cache(sglang):
    engine = Engine(sglang, {"head_dim": 72, "v_head_dim": 72}, kv_dtype=torch.float8_e4m3fn)
    with pytest.raises(NotImplementedError, match="multiples of 16, not 72"):
        _ = engine.backend


def test_a_window_over_a_tree_is_refused(sglang):
    layers = ({}, {"sliding_window_size": 8})
    engine = Engine(sglang, *layers, **speculative(sglang, topk=4))
    with pytest.raises(NotImplementedError, match=r"layer 1: .*--speculative-eagle-topk 1"):
        _ = engine.backend
    _ = Engine(sglang, *layers, is_draft_worker=True, **speculative(sglang, topk=4)).backend


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"use_mla_backend": True}, "no MLA backend"),
        ({"dtype": torch.float32}, "float16 and bfloat16, not in torch.float32"),
        ({"kv_cache_dtype": torch.bfloat16}, "in the model's dtype torch.float16"),
        (
            {"kv_cache_dtype": torch.float8_e4m3fn, "kv_cache_dtype_str": "mxfp8"},
            "not --kv-cache-dtype mxfp8",
        ),
        (
            {"kv_index_translator": SimpleNamespace(reads_are_translated=True)},
            "--enable-unified-memory",
        ),
        ({"attention_chunk_size": 8192}, "chunked local attention"),
        ({"token_to_kv_pool": SimpleNamespace(kv_cache_layout="hnd")}, "SGLANG_USE_HND_KVCACHE"),
        (
            {
                "token_to_kv_pool": SimpleNamespace(
                    full_kv_pool=SimpleNamespace(kv_cache_layout="hnd")
                )
            },
            "layout hnd",
        ),
        ({"spec_algorithm": Algorithm("DFLASH")}, "NGRAM in SGLang, not DFLASH"),
        ({"spec_algorithm": Algorithm("FROZEN_KV_MTP")}, "not FROZEN_KV_MTP"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_configurations_that_are_refused(sglang, changed, says):
    with pytest.raises(NotImplementedError, match=says):
        _ = Engine(sglang, **changed).backend


@pytest.mark.parametrize("name", ["attn_dcp_size", "attn_cp_size"])
def test_context_parallelism_is_refused(sglang, name):
    setattr(sglang.parallel, name, 2)
    with pytest.raises(NotImplementedError, match="context parallelism"):
        _ = Engine(sglang).backend


def test_a_draft_window_is_refused(sglang):
    sglang.state.window = (512, 4)
    with pytest.raises(NotImplementedError, match="--speculative-draft-window-size"):
        sglang.draft(Engine(sglang, is_draft_worker=True).runner, 1, NUM_STEPS)


def test_steps_that_are_refused(sglang):
    engine = Engine(sglang, **speculative(sglang, topk=4))
    backend = engine.backend
    backend.init_cuda_graph_state(4, 20)
    with pytest.raises(NotImplementedError, match="prefill runs between graphs"):
        backend.init_forward_metadata_out_graph(engine.batch(MIXED, Mode.EXTEND))
    with pytest.raises(NotImplementedError, match="diffusion"):
        backend.init_forward_metadata(engine.batch(MIXED, Mode.DLLM_EXTEND))
    batch = engine.batch(MIXED, Mode.EXTEND, cross_attention_custom_mask=torch.ones(3))
    with pytest.raises(NotImplementedError, match="mask over encoder tokens"):
        backend.init_forward_metadata(batch)
    info = spec_info(5, tree_masks(VERIFIED))
    batch = engine.batch(VERIFIED, Mode.TARGET_VERIFY, spec_info=info, seq_lens_cpu=None)
    with pytest.raises(ValueError, match="needs seq_lens_cpu"):
        backend.init_forward_metadata(batch)
    info.ragged_verify_layout = object()
    with pytest.raises(NotImplementedError, match="SGLANG_RAGGED_VERIFY_MODE"):
        backend.init_forward_metadata(engine.batch(VERIFIED, Mode.TARGET_VERIFY, spec_info=info))
    draft = sglang.draft(Engine(sglang, is_draft_worker=True).runner, 1, NUM_STEPS)
    with pytest.raises(ValueError, match="need seq_lens_cpu"):
        draft.init_forward_metadata(SimpleNamespace(seq_lens_cpu=None))
    encoder = Engine(sglang, {"attn_type": AttentionType.ENCODER_ONLY})
    encoder.backend.init_cuda_graph_state(4, 4)
    with pytest.raises(NotImplementedError, match="outside of CUDA graphs"):
        encoder.backend.init_forward_metadata_out_graph(
            encoder.batch(DECODES, Mode.DECODE), in_capture=True
        )
