"""SGLang's attention backend preflash runs on stand-ins for SGLang, and in tests/engines on its own
files."""

import importlib
import sys
from types import SimpleNamespace

import pytest
import torch
from engine_modules import (
    DECODES,
    MIXED,
    Request,
    close,
    recorded_plans,  # noqa: F401
    stand_ins,
)
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
    WriteLoc,
    reference,
)


@pytest.fixture
def sglang(monkeypatch, target):
    """Imports the backend's classes on stand-ins, for the target's device."""
    monkeypatch.setenv("PREFLASH_BACKEND", target.backend)
    found = SimpleNamespace(
        parallel=SimpleNamespace(attn_dcp_size=1, attn_cp_size=1),
        spec=SimpleNamespace(speculative_num_draft_tokens=5),
        state=SimpleNamespace(window=(0, 0)),
        deterministic=SimpleNamespace(enable_deterministic_inference=False),
        device=torch.device(target.device),
    )
    modules = {
        "srt.layers.radix_attention": {"AttentionType": AttentionType, "RadixAttention": Layer},
        "srt.mem_cache.memory_pool": {"KVWriteLoc": WriteLoc},
        "srt.runtime_context": {
            "get_exec": lambda: SimpleNamespace(deterministic=found.deterministic),
            "get_parallel": lambda: found.parallel,
            "get_spec": lambda: found.spec,
        },
        "srt.speculative.spec_utils": {"resolve_draft_decode_window": lambda _: found.state.window},
    }
    integration = ("backend", "draft", "registration")
    with stand_ins("sglang", modules, integration) as (backend, draft, found.registration):
        found.backend = backend.PreflashAttnBackend
        found.draft = draft.PreflashMultiStepDraftBackend
        yield found


def test_the_name_and_the_hook(sglang):
    """Both are registered once; the hook adds draft backends to SGLang's own."""
    factories, names, deterministic, hooks = [], [], [], []
    choices, registry, plugins = (
        importlib.import_module(f"sglang.srt.{name}")
        for name in (
            "arg_groups.choices", "layers.attention.attention_registry", "plugins.hook_registry"
        )
    )  # fmt: skip
    choices.add_attention_backend_choices = names.extend
    choices.add_deterministic_attention_backend_choices = deterministic.extend
    registry.register_attention_backend = lambda name: lambda make: factories.append((name, make))
    plugins.HookRegistry.register = lambda *given: hooks.append(given)
    sglang.registration.load_plugin()
    sglang.registration.register()
    assert names == deterministic == ["preflash"]
    ((name, make),) = factories
    ((place, hook, kind),) = hooks
    assert (name, kind) == ("preflash", plugins.HookType.BEFORE)
    assert place == "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend"
    runner, theirs = Engine(sglang).runner, {"fa3": lambda: None}
    assert type(make(runner)) is sglang.backend
    factory = SimpleNamespace(draft_model_runner=runner, topk=2, speculative_num_steps=4)
    for stamps, made in (({}, sglang.backend), ({"stamps_children": True}, sglang.draft)):
        arguments, named = hook(factory, "some_backend", theirs, "not {backend_type}", **stamps)
        assert named == {"stamps_children": False, **stamps}
        assert (*arguments[:2], arguments[3]) == (factory, "some_backend", "not {backend_type}")
        assert arguments[2]["fa3"] is theirs["fa3"]
        name, backend = arguments[2]["preflash"]()
        assert (name, type(backend)) == ("preflash", made)
    assert (backend.topk, backend.speculative_num_steps) == (2, 4)
    assert list(theirs) == ["fa3"]


def test_without_sglang(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "sglang", None)
    integration.load_plugin()
    assert "no attention backend preflash in SGLang: " in capsys.readouterr().err
    with pytest.raises(ImportError):
        integration.register()


PAGES = pytest.mark.parametrize("page_size", [1, 16])


def scales(k, v):
    return {"k_scale": k, "k_scale_float": k, "v_scale": v, "v_scale_float": v}


WINDOW, CAP = {"sliding_window_size": 8}, {"logit_cap": 3.0}
SINKS = torch.tensor([0.5, 1.0, 2.0, -1.0])
ENCODER = {"attn_type": AttentionType.ENCODER_ONLY}
TWO_SCALED = [scales(2.0, 0.5), {**scales(2.0, 0.5), **CAP}]
# Layers, options of the engine, and options of a step.
ENGINES = {
    "plain": ([{}], {}, {}),
    "window": ([WINDOW], {}, {}),
    "window_pool": ([{}, WINDOW], {"window_pool": True}, {}),
    "cap": ([CAP], {}, {}),
    "head_dim_192_128": ([{"head_dim": 192, "v_head_dim": 128}], {}, {}),
    "head_dim_512": ([{"head_dim": 512, "v_head_dim": 512}], {}, {}),
    "sinks": ([{}], {}, {"sinks": SINKS}),
    "sinks_of_bfloat16": ([{}], {}, {"sinks": SINKS.bfloat16()}),
    "cache_of_e4m3": (TWO_SCALED, {"kv_dtype": torch.float8_e4m3fn}, {}),
    "cache_of_e5m2": (TWO_SCALED, {"kv_dtype": torch.float8_e5m2}, {}),
    "lengths_on_the_device_alone": ([{}, WINDOW], {}, {"seq_lens_cpu": None}),
    # A checkpoint has scales whatever --kv-cache-dtype is; SGLang writes a 16-bit cache without.
    "scales_without_fp8": ([scales(0.05, 0.05)], {}, {}),
}


@PAGES
@pytest.mark.parametrize("name", ENGINES)
def test_prefills_and_decodes(sglang, page_size, name):
    layers, options, step = ENGINES[name]
    engine = Engine(sglang, *layers, page_size=page_size, **options)
    engine.check(MIXED, **step)
    engine.check(DECODES, Mode.DECODE, seed=1, **step)
    engine.check((Request(20, 20), Request(64, 64)), seed=2, **step)
    engine.check(MIXED[::-1], seed=3, **step)


@pytest.mark.parametrize("known", [True, False])
def test_cross_attention(sglang, known):
    """Text begins inside of a page; the encoders' lengths may be on the device alone."""
    engine = Engine(sglang, {}, {"is_cross_attention": True}, page_size=16, encoder_decoder=True)
    requests = (Request(4, 4, encoder=21), Request(9, 9, encoder=0), Request(2, 30, encoder=33))
    changed = {} if known else {"encoder_lens_cpu": None}
    engine.check(requests, **changed)


def test_an_encoder(sglang):
    engine = Engine(sglang, ENCODER)
    engine.check((Request(9, 9), Request(33, 33)))
    assert engine.pool.pairs[0][0].isnan().all()  # it has no cache


@pytest.mark.parametrize("more", [37, MAX_TOKENS])
def test_bounds_that_are_larger_than_the_lengths(sglang, more):
    bounds = torch.tensor([request.total + more for request in MIXED])
    Engine(sglang, page_size=16).check(MIXED, seq_lens_cpu=bounds)


def cached(engine, requests):
    """Returns q of one layer, and keys that are all in the cache."""
    engine.allocate(requests)
    ((q, pairs),) = engine.inputs(requests)
    for row, (k, v) in enumerate(pairs, 1):
        engine.write(engine.layers[0], engine.table[row, : len(k)], k, v)
    return q, pairs


def test_keys_in_the_cache_already_and_rows_of_padding(sglang):
    engine = Engine(sglang)
    q, pairs = cached(engine, DECODES)
    batch = engine.begun(DECODES, Mode.DECODE)
    wanted = reference(q, pairs, DECODES, engine.layers[0], engine)
    close(engine.forward(0, q, None, None, batch), wanted)
    junk = torch.full((4, KV_HEADS, D), float("nan"))
    close(engine.forward(0, q, junk, junk, batch, save_kv_cache=False), wanted)
    out = engine.forward(0, torch.cat([q, torch.full_like(q, float("nan"))]), None, None, batch)
    close(out[:4], wanted)
    assert (out[4:] == 0.0).all()


def test_deterministic_inference(sglang):
    """A decode step has the bits of the last row of a chunk."""
    sglang.deterministic.enable_deterministic_inference = True
    engine = Engine(sglang, page_size=16)
    chunks, steps = (Request(7, 50), Request(30, 70)), (Request(1, 50), Request(1, 70))
    q, _ = cached(engine, chunks)
    last = [6, 36]
    whole = engine.forward(0, q, None, None, engine.begun(chunks))
    alone = engine.forward(0, q[last], None, None, engine.begun(steps, Mode.DECODE))
    assert torch.equal(whole[last], alone)


@pytest.mark.parametrize("topk", [None, 4])
def test_layers_of_one_form_share_a_plan(sglang, topk, plans):
    """Trees that are verified between steps leave the plans of other steps."""
    engine = Engine(sglang, {}, {}, {} if topk else WINDOW, topk=topk)
    for seed, requests in enumerate((MIXED, DECODES, MIXED[:2])):
        plans.clear()
        engine.check(requests, seed=seed)
        assert len(engine.backend.plans.wrappers) == len(plans) == (1 if topk else 2)
        if topk:
            check_tree(engine)


def with_one_module(sglang, **layer):
    """Makes an engine of two layers, of which the model has the first as a module."""
    engine = Engine(sglang, {}, layer)
    engine.runner.model = torch.nn.ModuleList(engine.layers[:1])
    return engine


def test_a_layer_that_is_no_module_of_the_model(sglang):
    engine = with_one_module(sglang, **CAP)
    engine.check(MIXED)
    engine.check(DECODES, Mode.DECODE)


def test_an_idle_step_has_no_plan(sglang):
    Engine(sglang).backend.init_forward_metadata(SimpleNamespace(forward_mode=Mode.IDLE))


def spec_info(new, masks=None, layout=None):
    mask = None if masks is None else torch.cat([mask.flatten() for mask in masks])
    return SimpleNamespace(
        draft_token_num=new, num_tokens_per_req=new, custom_mask=mask, ragged_verify_layout=layout
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


def check_tree(engine, seed=0):
    """Checks a step that verifies a tree, and returns its batch."""
    masks = tree_masks(VERIFIED, seed)
    info = spec_info(5, [mask.to(engine.device) for mask in masks])
    return engine.check(VERIFIED, Mode.TARGET_VERIFY, seed=seed, masks=masks, spec_info=info)


@PAGES
def test_a_chain_is_verified_with_causal_masking(sglang, page_size):
    engine = Engine(sglang, {}, WINDOW, page_size=page_size, topk=1)
    info = spec_info(5, [torch.zeros(75, dtype=torch.bool, device=sglang.device)])  # unread
    engine.check(VERIFIED, Mode.TARGET_VERIFY, spec_info=info)
    engine.backend.update_verify_buffers_to_fill_after_draft(info, None)


@PAGES
@pytest.mark.parametrize(("algorithm", "topk"), [("EAGLE", 4), ("NGRAM", 1)])
def test_a_tree_is_verified_with_its_mask(sglang, page_size, algorithm, topk):
    options = {"page_size": page_size, "algorithm": algorithm, "topk": topk}
    engine = Engine(sglang, {}, {"logit_cap": 3.0}, **options)
    for seed in (0, 1):
        check_tree(engine, seed)
        engine.check(MIXED, seed=seed)


def test_a_draft_extend_step(sglang):
    engine = Engine(sglang, page_size=16, is_draft_worker=True, topk=4)
    for seed, known in enumerate(({}, {"extend_seq_lens_cpu": None})):
        engine.check(VERIFIED, Mode.DRAFT_EXTEND_V2, seed=seed, spec_info=spec_info(5), **known)


@pytest.mark.parametrize("topk", [1, 3])
@PAGES
@pytest.mark.parametrize("window_pool", [False, True])
def test_draft_steps(sglang, topk, page_size, window_pool):
    """A draft worker takes a window over a tree."""
    options = {"page_size": page_size, "window_pool": window_pool, "topk": topk}
    engine = Engine(sglang, {}, WINDOW, is_draft_worker=True, **options)
    assert engine.backend is not None
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
    engine = Engine(sglang, page_size=16, topk=4)
    batches = [engine.check(MIXED), engine.check(DECODES, Mode.DECODE), check_tree(engine)]
    begun = [(engine.backend.init_forward_metadata, batch) for batch in batches]
    draft = Engine(sglang, {}, WINDOW, window_pool=True, is_draft_worker=True, topk=4)
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


VERIFIED_STEPS = [VERIFIED, (Request(5, 200),), (Request(5, 6), Request(5, 80))]
VERIFIED_STEPS.append((Request(5, 250),) * 4)  # as many bits of a mask as there may be
DECODE_STEPS = [[Request(1, n) for n in (40, 7, 50, 170)], [Request(1, n) for n in (3, 200)]]
KINDS = [({}, False), (WINDOW, False), (WINDOW, True)]
# Mode, query rows of a request, steps, topk, a layer, and whether there is a window pool. A window
# over a tree is refused.
CAUSAL = (
    (Mode.DECODE, 1, DECODE_STEPS, 1),
    *((mode, 5, VERIFIED_STEPS, 1) for mode in (Mode.TARGET_VERIFY, Mode.DRAFT_EXTEND_V2)),
)
TREES = (Mode.TARGET_VERIFY, 5, VERIFIED_STEPS, 4)
REPLAYS = [(*kind, *layer) for kind in CAUSAL for layer in KINDS] + [(*TREES, *KINDS[0])]


def capture_batch(engine, mode, size, **values):
    """Makes a batch of padding, of one token each even where a request has more query rows."""
    return SimpleNamespace(**engine.lengths_of(mode, [0] * size, [1] * size), **values)


@PAGES
@pytest.mark.parametrize(("mode", "rows", "steps", "topk", "layer", "window_pool"), REPLAYS)
def test_replays(sglang, mode, rows, steps, topk, page_size, layer, window_pool):
    size = 4
    options = {"page_size": page_size, "window_pool": window_pool, "topk": topk}
    engine = Engine(sglang, layer, **options)
    backend = engine.backend
    backend.init_cuda_graph_state(size + 2, (size + 2) * rows)
    assert (backend.verify_mask is None) == (topk > 1)
    ones = torch.ones(size * rows * (rows + 1), dtype=torch.bool, device=sglang.device)
    info = spec_info(rows, [ones])
    captured = capture_batch(engine, mode, size, spec_info=info)
    backend.init_forward_metadata_out_graph(captured, in_capture=True)
    graph = Graph(engine, size * rows, backend, captured)
    for seed, requests in enumerate(steps):
        ((q, pairs),) = engine.step(requests, seed)
        masks = tree_masks(requests, seed) if topk > 1 else None
        info = spec_info(rows, masks and [mask.to(sglang.device) for mask in masks])
        options = {"spec_info": info, "extend_seq_lens_cpu": None}
        batch = engine.batch(requests, mode, size - len(requests), **options)
        backend.init_forward_metadata_out_graph(batch)
        assert all(w.is_cuda_graph_enabled for w in backend.plans.wrappers.values())
        out = graph.replay(q, *engine.new_keys(0, requests, pairs), batch.out_cache_loc)
        close(out, reference(q, pairs, requests, engine.layers[0], engine, masks))


@pytest.mark.parametrize("topk", [1, 3])
@PAGES
def test_replays_of_draft_steps(sglang, topk, page_size):
    size = 3
    engine = Engine(sglang, page_size=page_size, is_draft_worker=True, topk=topk)
    backend = sglang.draft(engine.runner, topk, NUM_STEPS)
    backend.init_cuda_graph_state(size + 1, (size + 1) * topk)
    captured = capture_batch(engine, Mode.DECODE, size)
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
    engine = Engine(sglang, {}, WINDOW)
    engine.backend.init_cuda_graph_state(4, 4)
    _, first = captured_decodes(engine)
    _, second = captured_decodes(engine)
    assert len(first) == 2
    assert first == second
    engine.backend.init_cuda_graph_state(4, 4)  # other memory: every graph is captured again
    _, third = captured_decodes(engine)
    assert not set(first.values()) & set(third.values())


def test_scales_that_are_updated_after_a_capture(sglang):
    for kv_dtype in (torch.float16, torch.float8_e4m3fn):
        engine = Engine(sglang, scales(2.0, 0.5), kv_dtype=kv_dtype)
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
    engine = with_one_module(sglang, scaling=0.05)
    backend, inputs = engine.backend, engine.step(DECODES)
    backend.init_cuda_graph_state(4, 4)
    batch = engine.batch(DECODES, Mode.DECODE)
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    assert len(backend.plans.wrappers) == 1
    for index, (q, pairs) in enumerate(inputs):
        out = engine.forward(index, q, *engine.new_keys(index, DECODES, pairs), batch)
        close(out, reference(q, pairs, DECODES, engine.layers[index], engine))
    assert len(backend.plans.wrappers) == 2
    assert all(w.is_cuda_graph_enabled for w in backend.plans.wrappers.values())


# Options of the second of two layers, and the refusal.
LAYERS = [
    ({"head_dim": 576, "v_head_dim": 512}, "multiples of 8 up to 512, not 576"),
    ({"v_head_dim": 100}, "multiples of 8 up to 512, not 100"),
    ({"attn_type": AttentionType.DECODER_BIDIRECTIONAL}, "sees later tokens"),
    ({**ENCODER, **WINDOW}, "window without causal masking has two sides"),
    ({"pos_encoding_mode": "ROPE_LLAMA"}, "pos_encoding_mode='NONE'"),
    ({"logit_capping_method": "sigmoid"}, "logit_capping_method='tanh'"),
    ({"xai_temperature_len": 1024}, "xai_temperature_len"),
]
HND = SimpleNamespace(kv_cache_layout="hnd")
TRANSLATED = SimpleNamespace(reads_are_translated=True)
FP8 = torch.float8_e4m3fn
# Attributes of the model runner, and the refusal.
CONFIGURATIONS = [
    ({"use_mla_backend": True}, "no MLA backend"),
    ({"dtype": torch.float32}, "float16 and bfloat16, not in torch.float32"),
    ({"kv_cache_dtype": torch.bfloat16}, "in the model's dtype torch.float16"),
    ({"kv_cache_dtype": FP8, "kv_cache_dtype_str": "mxfp8"}, "not --kv-cache-dtype mxfp8"),
    ({"kv_index_translator": TRANSLATED}, "--enable-unified-memory"),
    ({"attention_chunk_size": 8192}, "chunked local attention"),
    ({"token_to_kv_pool": HND}, "SGLANG_USE_HND_KVCACHE"),
    ({"token_to_kv_pool": SimpleNamespace(full_kv_pool=HND)}, "layout hnd"),
    ({"spec_algorithm": Algorithm("DFLASH")}, "NGRAM in SGLang, not DFLASH"),
    ({"spec_algorithm": Algorithm("FROZEN_KV_MTP")}, "not FROZEN_KV_MTP"),
]


def verify(sglang, layout=None, **changed):
    """Begins a step that verifies a tree of which SGLang's layout is `layout`."""
    info = spec_info(5, tree_masks(VERIFIED), layout)
    Engine(sglang, topk=4).begun(VERIFIED, Mode.TARGET_VERIFY, spec_info=info, **changed)


def replay(sglang, requests, mode, *layers, **options):
    """Plans a graph of 4 requests."""
    engine = Engine(sglang, *layers)
    engine.backend.init_cuda_graph_state(4, 20)
    engine.backend.init_forward_metadata_out_graph(engine.batch(requests, mode), **options)


def draft(sglang):
    return sglang.draft(Engine(sglang, is_draft_worker=True).runner, 1, NUM_STEPS)


def draft_of_a_window(sglang):
    sglang.state.window = (512, 4)
    draft(sglang)


def parallel(sglang, name):
    setattr(sglang.parallel, name, 2)
    return Engine(sglang).backend


HAS_NO_LENGTHS = SimpleNamespace(seq_lens_cpu=None)
REFUSED = [
    *((lambda x, layer=layer: Engine(x, {}, layer).backend, f"layer 1: .*{says}")
      for layer, says in LAYERS),
    *((lambda x, changed=changed: Engine(x, **changed).backend, says)
      for changed, says in CONFIGURATIONS),
    (lambda x: Engine(x, {"head_dim": 72, "v_head_dim": 72}, kv_dtype=FP8).backend,
     "multiples of 16, not 72"),
    (lambda x: Engine(x, {}, WINDOW, topk=4).backend, "layer 1: .*--speculative-eagle-topk 1"),
    *((lambda x, name=name: parallel(x, name), "context parallelism")
      for name in ("attn_dcp_size", "attn_cp_size")),
    (draft_of_a_window, "--speculative-draft-window-size"),
    (lambda x: replay(x, MIXED, Mode.EXTEND), "prefill runs between graphs"),
    (lambda x: replay(x, DECODES, Mode.DECODE, ENCODER, in_capture=True), "outside of CUDA graphs"),
    (lambda x: Engine(x).begun(MIXED, Mode.DLLM_EXTEND), "diffusion"),
    (lambda x: Engine(x).begun(MIXED, cross_attention_custom_mask=torch.ones(3)),
     "mask over encoder tokens"),
    (lambda x: verify(x, object()), "SGLANG_RAGGED_VERIFY_MODE"),
    (lambda x: verify(x, seq_lens_cpu=None), "needs seq_lens_cpu"),
    (lambda x: Engine(x, topk=4).backend.update_verify_buffers_to_fill_after_draft(None, None),
     "SGLANG_ENABLE_OVERLAP_PLAN_STREAM"),
    (lambda x: with_one_module(x, xai_temperature_len=8).check(MIXED),
     "layer 1: preflash does not scale the logits"),
    (lambda x: draft(x).init_forward_metadata(HAS_NO_LENGTHS), "need seq_lens_cpu"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "says"), REFUSED)
def test_refusals(sglang, call, says):
    error = ValueError if "seq_lens_cpu" in says else NotImplementedError
    with pytest.raises(error, match=says):
        call(sglang)
