"""vLLM's attention backend PREFLASH runs on stand-ins for the classes that it derives from, and in
tests/engines on vLLM's own files."""

import enum
import importlib
import itertools
import pickle
import sys
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from engine_modules import (
    DECODES,
    MIXED,
    Request,
    attended,
    captured,
    close,
    recorded_plans,  # noqa: F401
    stand_ins,
)
from preflash.integrations import vllm as integration
from preflash.testing.oracle import Pipeline

PAGE, D, HEADS, KV_HEADS = 16, 64, 4, 2


def backends(with_register):
    class AttentionBackendEnum(enum.Enum):
        FLASH_ATTN = "somewhere.FlashAttention"
        CUSTOM = None

    if with_register:  # as in vLLM 0.33

        def register(cls, name, value):
            assert name not in cls._member_map_
            member = object.__new__(cls)
            member._name_, member._value_ = name, value
            setattr(cls, name, member)
            cls._member_map_[name] = cls._value2member_map_[value] = member
            cls._member_names_.append(name)
            return member

        AttentionBackendEnum.register = classmethod(register)
    return AttentionBackendEnum


@pytest.mark.parametrize("with_register", [True, False])
def test_the_name_in_the_enum(vllm, with_register):
    """A process that has not loaded the plugin unpickles the name."""
    names, other = backends(with_register), backends(with_register)
    registry = importlib.import_module("vllm.v1.attention.backends.registry")
    registry.AttentionBackendEnum = names
    vllm.registration.load_plugin()
    member = vllm.registration.register()
    assert member is names["PREFLASH"] is names.PREFLASH is names(member.value)
    assert [each.name for each in names] == ["FLASH_ATTN", "CUSTOM", "PREFLASH"]
    assert member.value == f"{vllm.backend.__module__}.{vllm.backend.__name__}"
    pickled = pickle.dumps({"backend": member})
    registry.AttentionBackendEnum = other
    assert pickle.loads(pickled)["backend"] is other["PREFLASH"]


def test_without_vllm(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "vllm", None)
    integration.load_plugin()
    assert "no attention backend PREFLASH in vLLM: " in capsys.readouterr().err
    with pytest.raises(ImportError):
        integration.register()


@pytest.fixture
def vllm(monkeypatch, target):
    """Imports the backend's classes on stand-ins, for the target's device."""
    monkeypatch.setenv("PREFLASH_BACKEND", target.backend)
    layers = {}
    platform = SimpleNamespace(sm90=True)
    platform.is_device_capability_family = lambda family: platform.sm90 and family == 90
    types = ("decoder", "encoder", "encoder_only", "encoder_decoder")
    modules = {
        "config": {
            "get_layers_from_vllm_config": lambda _config, _kind, names: {
                name: layers[name] for name in names
            }
        },
        "envs": {"VLLM_BATCH_INVARIANT": False},
        "platforms": {"current_platform": platform},
        "v1.attention.backend": {
            "AttentionImpl": type("AttentionImpl", (), {"dcp_world_size": 1, "pcp_world_size": 1}),
            "AttentionType": SimpleNamespace(**{name.upper(): name for name in types}),
        },
        "v1.kv_cache_interface": {"EncoderOnlyAttentionSpec": type("Spec", (), {})},
    }
    with stand_ins("vllm", modules, ["registration", "backend"]) as (registration, module):
        yield SimpleNamespace(
            backend=module.PreflashBackend, registration=registration, layers=layers,
            platform=platform, device=target.device,
        )  # fmt: skip


class Group:
    """Layers of one attention group, their builder and a cache that is NaN but for the keys."""

    def __init__(
        self, vllm, *layers, dtype=torch.float16, five_dims=True, block_table=12, **config
    ):
        self.vllm, self.dtype, self.device = vllm, dtype, torch.device(vllm.device)
        self.five_dims, self.block_table = five_dims, block_table
        self.layers, self.impls = layers or ({},), []
        for index, layer in enumerate(self.layers):
            options = {"num_kv_heads": KV_HEADS, "kv_cache_dtype": "auto", **layer}
            if "sinks" in layer:
                options["sinks"] = self.given_sinks = layer["sinks"].clone().to(vllm.device)
            impl = vllm.backend.get_impl_cls()(HEADS, D, 0.2, **options)
            impl.process_weights_after_loading(dtype)
            vllm.layers[str(index)] = SimpleNamespace(impl=impl, **scales())
            self.impls.append(impl)
        speculative = config.setdefault("speculative_config", object())
        values = {
            "model_config": SimpleNamespace(dtype=dtype), "cache_config": SimpleNamespace(),
            "parallel_config": SimpleNamespace(),
            "num_speculative_tokens": 3 if speculative else 0,
        }  # fmt: skip
        self.config = SimpleNamespace(**{**values, **config})
        self.builder, self.layer = self.new_builder(), SimpleNamespace(**scales())

    def new_builder(self):
        spec = SimpleNamespace(block_size=PAGE)
        names = [str(index) for index in range(len(self.impls))]
        return self.vllm.backend.get_builder_cls()(spec, names, self.config, self.device)

    def step(self, requests, seed=0, prefix=0):
        """Draws q, and k and v of each request, on the CPU; fills the cache and its block table.

        prefix: keys, in full blocks, that all requests with keys share.
        """
        generator = torch.Generator().manual_seed(seed)

        def values(n, heads):
            return torch.randn(n, heads, D, generator=generator).to(self.dtype)

        q = values(sum(r.new for r in requests), HEADS)
        keys = [(values(r.total, KV_HEADS), values(r.total, KV_HEADS)) for r in requests]
        for pair in keys[1:]:
            for own, first in zip(pair, keys[0], strict=True):
                own[:prefix] = first[: min(prefix, len(own))]
        cache, table = self.cache(keys, requests, prefix)
        return SimpleNamespace(requests=requests, q=q, keys=keys, cache=cache, table=table)

    def cache(self, keys, requests, prefix=0):
        """Makes a cache with the keys in shuffled blocks, and its block table, -7 where unused."""
        blocks = torch.randperm(200, generator=torch.Generator().manual_seed(1)).tolist()
        fp8 = self.impls[0].fp8_dtype
        dtype = self.dtype if fp8 is None else fp8
        cache = torch.full((200, 2, PAGE, KV_HEADS, D), float("nan"), dtype=self.dtype).to(dtype)
        table = torch.full((len(requests), self.block_table), -7, dtype=torch.int32)
        for row, pair in enumerate(keys):
            for i in range(0, len(pair[0]), PAGE):
                block = table[0, i // PAGE] if row and i < prefix else blocks.pop()
                table[row, i // PAGE] = block
                for side, values in enumerate(pair):
                    page = values[i : i + PAGE]
                    cache[block, side, : len(page)] = page.to(dtype)
        if fp8 is not None:
            cache = cache.view(torch.uint8)
        if not self.five_dims:  # [blocks, heads, page, 2 * D]
            cache = torch.cat(cache.unbind(1), -1).transpose(1, 2).contiguous()
        return cache.to(self.device), table.to(self.device)

    def common(self, requests, table, *, slack=0, padding=0, **changed):
        """Makes the CommonAttentionMetadata."""
        starts = ints(0, *itertools.accumulate(r.new for r in requests))
        lengths = ints(*(r.total for r in requests))
        values = {
            "query_start_loc_cpu": starts, "seq_lens": lengths.to(self.device),
            "seq_lens_cpu_upper_bound": lengths + slack * (lengths > 0),
            "max_seq_len": int(lengths.max()) + slack, "num_reqs": len(requests),
            "num_actual_tokens": int(starts[-1]) + padding, "block_table_tensor": table,
            "slot_mapping": None, "encoder_seq_lens": None, "causal": True,
        }  # fmt: skip
        return SimpleNamespace(**{**values, **changed})

    def build(self, requests, table, prefix=0, **changed):
        return self.builder.build(prefix, self.common(requests, table, **changed))

    def run(self, metadata, q, cache, layer=0, kv=(None, None), out=None):
        impl = self.impls[layer]
        q = q.to(self.device)
        out = torch.full(q.shape, 9.0, dtype=self.dtype, device=self.device) if out is None else out
        if impl.supports_quant_query_input:
            q = q.to(impl.fp8_dtype)
        assert impl.forward(self.layer, q, *kv, cache, metadata, out) is out
        return out

    def wanted(self, step, index=0, causal=True):
        """Computes the oracle's output of a layer."""
        impl, layer, scale = self.impls[index], self.layers[index], self.layer
        slopes = torch.tensor(SLOPES) if "alibi_slopes" in layer else None
        sinks = None if impl.sinks is None else impl.sinks.float().cpu()
        window = layer.get("sliding_window", 0) - 1  # tokens, the query's own among them
        cap = layer.get("logits_soft_cap", 0.0)
        pipeline = Pipeline(0.2, causal, window, cap, slopes=slopes, sinks=sinks)
        q, keys, fp8 = step.q, step.keys, impl.fp8_dtype
        if fp8 is not None:
            k_scale, v_scale = scale._k_scale_float, scale._v_scale_float
            keys = [(k.to(fp8).float() * k_scale, v.to(fp8).float() * v_scale) for k, v in keys]
        if impl.supports_quant_query_input:
            q = q.to(fp8).float() * scale._q_scale_float
        return attended(pipeline, step.requests, q, keys)

    def close(self, out, step, index=0, causal=True):
        """Compares rows of a step, which padding may follow."""
        tolerance = 0.08 if self.impls[index].fp8_dtype else 0.01
        close(out[: len(step.q)], self.wanted(step, index, causal), tolerance)

    def check(self, requests, *, seed=0, causal=True, prefix=0, **changed):
        """Compares every layer on one step with the oracle."""
        step = self.step(requests, seed, prefix)
        metadata = self.build(requests, step.table, prefix, causal=causal, **changed)
        assert metadata.causal is causal  # drafters read it
        for index in range(len(self.impls)):
            self.close(self.run(metadata, step.q, step.cache, index), step, index, causal)
        return metadata


def in_graph(metadata):
    (found,) = {wrapper.is_cuda_graph_enabled for wrapper in metadata.wrappers.values()}
    return found


SLOPES = [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8]
SINKS = torch.tensor([0.5, 1.0, 2.0, -1.0])


def ints(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def scales(q=1.0, k=1.0, v=1.0):
    return {"_q_scale_float": q, "_k_scale_float": k, "_v_scale_float": v}


EXACT = {"speculative_config": None}  # the bounds of the host are the lengths
OPTIONS = {
    "window": {"sliding_window": 9},
    "cap": {"logits_soft_cap": 3.0},
    "alibi": {"alibi_slopes": SLOPES},
    "sinks": {"sinks": SINKS.bfloat16()},
}
BOTH_KINDS = [(MIXED, {}), (DECODES, {})]
LONG = (Request(1, 1400), Request(5, 1200), Request(1, 64))
LONG_DECODES = (Request(1, 1400), Request(1, 1101), Request(1, 600))
CROSS = (Request(1, 50), Request(4, 30))
# A layer, and steps: requests, and what else their CommonAttentionMetadata has.
STEPS = {
    **{name: (layer, BOTH_KINDS) for name, layer in OPTIONS.items()},
    "window worth a split": ({"sliding_window": 1100}, 2 * [(LONG, {}), (LONG_DECODES, {})]),
    # The last bounds are more than the block table has room for.
    "larger bounds": ({}, [(MIXED, {"slack": 37}), (MIXED[::-1], {}), (MIXED, {"slack": 1400})]),
    "larger bounds of decodes": ({}, [(DECODES, {"slack": n}) for n in (37, 0, 1400)]),
    # Lengths are an encoder's; the bounds that vLLM passes are the decoder's.
    "cross-attention": ({"attn_type": "encoder_decoder"}, [
        (CROSS, {"causal": False, "seq_lens_cpu_upper_bound": ints(8, 4),
                 "encoder_seq_lens": ints(50, 30)}),
    ]),
    # vLLM 0.24 has both, and for some layers the bounds are another tensor's.
    "lengths of the host before bounds": ({}, [
        (MIXED, {"seq_lens_cpu_upper_bound": ints(1, 1, 1, 1),
                 "_seq_lens_cpu": ints(40, 7, 50, 17)}),
    ]),
}  # fmt: skip


@pytest.mark.parametrize(
    ("five_dims", "options"), [(True, {}), (False, EXACT)], ids=["bounds", "exact"]
)
@pytest.mark.parametrize("name", STEPS)
def test_steps(vllm, name, five_dims, options):
    layer, steps = STEPS[name]
    group = Group(vllm, layer, five_dims=five_dims, block_table=88, **options)
    for seed, (requests, changed) in enumerate(steps):
        group.check(requests, seed=seed, **changed)


@pytest.mark.parametrize("drafts", [1, 3])
def test_drafters_raise_the_lengths_of_the_device_alone(vllm, drafts):
    """A length in the page after the bound's would lose keys and shift the diagonal."""
    requests = (Request(1, 16 + drafts), Request(drafts + 1, 32 + drafts), Request(2, 5))
    bounds = ints(*(r.total - drafts for r in requests))
    Group(vllm, num_speculative_tokens=drafts).check(requests, seq_lens_cpu_upper_bound=bounds)


def test_layers_of_one_form_share_a_plan(vllm, plans):
    layers = ({}, {"sliding_window": 9}, {"logits_soft_cap": 3.0}, {}, OPTIONS["sinks"])
    group = Group(vllm, *layers, **EXACT)
    for requests in (MIXED, DECODES, MIXED[:2]):
        plans.clear()
        assert len(group.check(requests).wrappers) == len(plans) == 3


@pytest.mark.parametrize("five_dims", [True, False])
@pytest.mark.parametrize(("cache", "sm90"), [("fp8", True), ("fp8", False), ("fp8_e5m2", True)])
def test_an_fp8_cache_with_scales(vllm, sm90, cache, five_dims):
    vllm.platform.sm90 = sm90
    dtype = torch.float16 if five_dims else torch.bfloat16
    layers = ({"kv_cache_dtype": cache}, {"kv_cache_dtype": cache, "logits_soft_cap": 3.0})
    group = Group(vllm, *layers, dtype=dtype, five_dims=five_dims)
    quantised = [impl.supports_quant_query_input for impl in group.impls]
    assert quantised == [sm90 and cache == "fp8", False]
    vars(group.layer).update(scales(0.5, 2.0, 0.25))
    group.check(MIXED)


@pytest.mark.parametrize("attn_type", ["encoder", "encoder_only"])
def test_an_encoder(vllm, attn_type):
    group = Group(vllm, {"attn_type": attn_type})
    step = group.step((Request(9, 9), Request(33, 33)))
    metadata = group.build(step.requests, None, causal=False)
    kv = [torch.cat(x).to(vllm.device) for x in zip(*step.keys, strict=True)]
    out = group.run(metadata, step.q, torch.empty(0), kv=kv)
    group.close(out, step, causal=False)


def test_sinks_that_are_loaded_again(vllm):
    """A captured graph has the address of the first copy."""
    group = Group(vllm, OPTIONS["sinks"])
    impl = group.impls[0]
    address = impl.sinks.data_ptr()
    group.given_sinks.copy_(torch.tensor([3.0, -2.0, 0.0, 1.0]))
    impl.process_weights_after_loading(torch.bfloat16)
    assert impl.sinks.data_ptr() == address
    assert impl.sinks.tolist() == [3.0, -2.0, 0.0, 1.0]
    group.check(MIXED)


def test_scales_that_are_loaded_again_after_a_capture(vllm):
    group = Group(vllm, {"kv_cache_dtype": "fp8"}, {})
    common = group.common(DECODES, group.step(DECODES).table)
    group.builder.build(0, common)
    group.builder.build_for_cudagraph_capture(common)

    def load(name):
        vllm.layers[name]._k_scale_float = 2.0
        group.impls[0].process_weights_after_loading(torch.float16)
        group.builder.build(0, common)

    load("1")  # of a 16-bit cache
    with pytest.raises(RuntimeError, match=r"of 0 are \(1.0, 2.0, 1.0\); CUDA graphs"):
        load("0")


def test_a_builder_drops_the_cache_of_the_one_before(vllm):
    """The cache of vLLM's profiling run would stay in memory with the real one."""
    group = Group(vllm)
    step = group.step(DECODES)
    group.run(group.build(DECODES, step.table), step.q, step.cache)
    kept = weakref.ref(step.cache)
    del step.cache
    group.new_builder()
    assert kept() is None


def test_padding_and_the_profiling_run(vllm):
    group = Group(vllm)
    step = group.step(DECODES)
    padded = torch.cat([step.q, torch.full_like(step.q, float("nan"))])
    out = group.run(group.build(DECODES, step.table, padding=len(step.q)), padded, step.cache)
    group.close(out, step)
    assert (out[len(step.q) :] == 9.0).all()
    assert (group.run(None, step.q, step.cache) == 0.0).all()


# Query rows of the captured requests, and (new, total) tokens of the requests of each replay.
REPLAYS = {
    "decodes": (1, [[(1, 40), (1, 7), (1, 50), (1, 170)], [(1, 3), (1, 4), (0, 0), (0, 0)]]),
    "speculative": (3, [[(3, 40), (3, 7), (3, 50), (3, 170)], [(3, 9), (3, 100), (0, 0), (0, 0)]]),
    "mixed": (8, [[(1, 40), (20, 33), (1, 7), (10, 90)], [(32, 32), (0, 0), (0, 0), (0, 0)]]),
}


@pytest.mark.parametrize(("rows", "steps"), REPLAYS.values(), ids=REPLAYS)
@pytest.mark.parametrize(
    "layer", [{}, {"sliding_window": 9}, {"kv_cache_dtype": "fp8"}], ids=["full", "window", "fp8"]
)
def test_replays(vllm, rows, steps, layer):
    group = Group(vllm, layer, **EXACT)
    dummy = [Request(rows, rows)] * 4
    q = group.step(dummy).q.to(vllm.device)
    out = torch.empty_like(q)
    cache, table = group.cache([], dummy)
    table.zero_()
    common = group.common(dummy, table)
    for _ in range(2):  # vLLM's warm-up and capture
        metadata = group.builder.build_for_cudagraph_capture(common)
    replay = captured(lambda: group.run(metadata, q, cache, out=out), q.device)
    lengths = common.seq_lens
    for seed, pairs in enumerate(steps):
        step = group.step([Request(*pair) for pair in pairs], seed)
        q[: len(step.q)] = step.q.to(vllm.device)
        for old, new in ((cache, step.cache), (table, step.table)):
            old.copy_(new)
        lengths.copy_(ints(*(r.total for r in step.requests)))
        bounds = {"padding": len(q) - len(step.q), "slack": 0 if "sliding_window" in layer else 5}
        assert in_graph(group.build(step.requests, table, seq_lens=lengths, **bounds))
        replay()
        group.close(out, step)


def test_another_step_of_a_captured_size_is_eager(vllm):
    group = Group(vllm)
    table = group.step(DECODES).table
    common = group.common(DECODES, table)
    group.builder.build_for_cudagraph_capture(common)
    for changed in (
        {"seq_lens": common.seq_lens.clone()},
        {"block_table_tensor": table.clone()},
        {"padding": 1},
    ):
        same = {"seq_lens": common.seq_lens, **changed}
        assert not in_graph(group.build(DECODES, table, **same))
    assert in_graph(group.builder.build(0, common))


def test_a_table_with_distance_between_rows_is_captured_in_a_copy(vllm):
    group = Group(vllm)
    step = group.step(DECODES)
    apart = step.table.new_zeros(len(step.table), 20)[:, : step.table.shape[1]]
    common = group.common(DECODES, apart)
    group.builder.build_for_cudagraph_capture(common)
    apart.copy_(step.table)
    metadata = group.builder.build(0, common)
    assert in_graph(metadata)
    group.close(group.run(metadata, step.q, step.cache), step)


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_decode_steps_share_plans_for_bounds(vllm, graph, plans):
    """Each request grows by a token a step, within the block table that the engine fills in place;
    then one makes room for a shorter one, and one for a longer one."""
    group = Group(vllm, block_table=8, **EXACT)
    table = torch.full((4, 8), -7, dtype=torch.int32, device=vllm.device)
    lengths = torch.zeros(4, dtype=torch.int32, device=vllm.device)

    def planned(totals, seed):
        """Checks a step of these lengths; returns the number of plans that it took."""
        step = group.step(tuple(Request(1, n) for n in totals), seed)
        table.copy_(step.table)
        lengths.copy_(ints(*totals))
        common = group.common(step.requests, table, seq_lens=lengths)
        if graph and seed == 0:
            group.builder.build_for_cudagraph_capture(common)
        plans.clear()
        group.close(group.run(group.builder.build(0, common), step.q, step.cache), step)
        return len(plans)

    grows = [planned([n + i for n in (40, 7, 50, 17)], i) for i in range(70)]
    assert sum(grows) <= 2 + 70 // 32 + 1
    others = ([109, 7, 119, 86], [110, 128, 120, 87], [110, 128, 120, 87])
    assert [planned(totals, sum(totals)) for totals in others] == [1, 1, 0]


def test_batch_invariance(vllm):
    """A decode step, alone, has the bits of the last row of a chunk in a batch."""
    sys.modules["vllm.envs"].VLLM_BATCH_INVARIANT = True
    assert vllm.backend.supports_batch_invariance()
    group = Group(vllm)
    chunks = group.step((Request(7, 50), Request(30, 70)))
    whole = group.run(group.build(chunks.requests, chunks.table), chunks.q, chunks.cache)
    for i, last in enumerate((6, 36)):
        metadata = group.build((Request(1, chunks.requests[i].total),), chunks.table[i : i + 1])
        out = group.run(metadata, chunks.q[last : last + 1], chunks.cache)
        assert torch.equal(out[0], whole[last])


# Steps of requests that share 48 keys; one of the last step is padding.
SHARED = {
    "decodes": [Request(1, n) for n in (60, 49, 170, 64, 65)],
    "mixed": [Request(3, 51), Request(1, 49), Request(20, 90), Request(0, 0)],
}
FP8 = {"kv_cache_dtype": "fp8"}
CASCADES = {"plain": {}, "cap": OPTIONS["cap"], "sinks": OPTIONS["sinks"], "fp8": FP8}
CASCADES["fp8_e5m2 and sinks"] = {"kv_cache_dtype": "fp8_e5m2", **OPTIONS["sinks"]}


def is_cascade(metadata):
    (name,) = {type(wrapper).__name__ for wrapper in metadata.wrappers.values()}
    return name == "CascadeStepWrapper"


@pytest.mark.parametrize("five_dims", [True, False])
@pytest.mark.parametrize("layer", CASCADES.values(), ids=CASCADES)
@pytest.mark.parametrize("requests", SHARED.values(), ids=SHARED)
def test_cascades(vllm, requests, layer, five_dims):
    """The bounds on the host are larger than the lengths; rows of padding follow the step's."""
    group = Group(vllm, layer, {**layer, "logits_soft_cap": 2.0}, five_dims=five_dims)
    vars(group.layer).update(scales(0.5, 2.0, 0.25) if group.impls[0].fp8_dtype else {})
    for seed, prefix in enumerate((48, 16)):
        step = group.step(requests, seed, 48)
        metadata = group.build(requests, step.table, prefix, slack=21, padding=5)
        assert is_cascade(metadata)
        q = torch.cat([step.q, torch.full_like(step.q[:5], float("nan"))])
        for index in range(2):
            out = group.run(metadata, q, step.cache, index)
            group.close(out, step, index)
            assert (out[len(step.q) :] == 9.0).all()
        assert group.builder._paged._cascade_arrays._suffix_lens.min() >= 0


def test_cascades_share_plans(vllm, plans):
    """Both levels are planned again where the prefix or the rows change, or a request outgrows the
    plan. A captured shape is no cascade."""
    group = Group(vllm, **EXACT)
    table = torch.full((3, 12), -7, dtype=torch.int32, device=vllm.device)
    lengths = torch.zeros(3, dtype=torch.int32, device=vllm.device)
    counts = []
    for grown, prefix in enumerate([32] * 40 + [16, 0]):
        step = group.step([Request(1, n + grown) for n in (33, 40, 66)], grown, 32)
        table.copy_(step.table)
        lengths.copy_(ints(*(r.total for r in step.requests)))
        if grown == 0:
            captured = group.common(step.requests, table, seq_lens=lengths)
            group.builder.build_for_cudagraph_capture(captured)
        plans.clear()
        metadata = group.build(step.requests, table, prefix, seq_lens=lengths)
        assert is_cascade(metadata) == (prefix > 0) == (not in_graph(metadata))
        group.close(group.run(metadata, step.q, step.cache), step)
        counts.append(len(plans))
        arrays = group.builder._paged._cascade_arrays
        for lens in (arrays._prefix_lens, arrays._suffix_lens):
            lens.zero_()  # as vLLM's sleep, which discards what builders have allocated
    # The prefix is planned once: its bounds hold for a shorter one.
    assert counts == [2, *counts[1:40], 1, 1]
    assert sum(counts[1:40]) <= 3


@pytest.mark.parametrize("name", ["window", "alibi", "batch-invariant"])
def test_layers_without_cascades(vllm, name):
    sys.modules["vllm.envs"].VLLM_BATCH_INVARIANT = name == "batch-invariant"
    group = Group(vllm, OPTIONS.get(name, {}))
    assert not asks(group, 1 << 20)
    assert not is_cascade(group.check(SHARED["decodes"], prefix=48))


def asks(group, prefix, query_lens=64 * [1], **changed):
    flags = {f"use_{name}": False for name in ("alibi", "sliding_window", "local_attention")}
    given = {"num_query_heads": HEADS, "num_kv_heads": KV_HEADS, "num_sms": 132, **flags}
    given = {**given, "dcp_world_size": 1, **changed}
    return group.builder.use_cascade_attention(
        common_prefix_len=prefix, query_lens=np.array(query_lens, np.int32), **given
    )


class Graphs(enum.Enum):
    """The part of vLLM's CUDAGraphMode that a builder reads, as modes of decode and mixed steps."""

    NONE = (0, 0)
    PIECEWISE = (1, 1)
    FULL = (2, 2)
    FULL_AND_PIECEWISE = (2, 1)
    FULL_DECODE_ONLY = (2, 0)

    def decode_mode(self):
        return Graphs(self.value[:1] * 2)

    def mixed_mode(self):
        return Graphs(self.value[1:] * 2)

    def has_full_cudagraphs(self):
        return 2 in self.value

    def has_piecewise_cudagraphs(self):
        return 1 in self.value


def test_when_a_cascade_pays(vllm):
    """Shortest prefix by the costs of cascade.CascadeCosts, of 2 kv heads of 64 in float16."""
    group = Group(vllm, **EXACT)

    def shortest(query_lens, mode=None):
        group.builder._compilation = SimpleNamespace(cudagraph_mode=mode)
        return next((n for n in range(0, 1 << 19, 256) if asks(group, n, query_lens)), None)

    eager = shortest(64 * [1])
    assert 0 < shortest(256 * [1]) < eager < shortest(8 * [1])
    assert shortest([1]) is shortest([512, 512]) is None  # as many tiles as requests have rows
    assert shortest([512, *64 * [1]]) is not None
    assert [shortest(64 * [1], mode) == eager for mode in Graphs] == [True, True, *3 * [False]]
    assert shortest(64 * [1], Graphs.FULL_AND_PIECEWISE) < shortest(64 * [1], Graphs.FULL)
    group.builder._compilation = SimpleNamespace(
        cudagraph_mode=Graphs.FULL, max_cudagraph_capture_size=63
    )
    assert asks(group, eager, 64 * [1])  # no graph is as large
    mixed = [shortest([2, *64 * [1]], mode) == eager for mode in Graphs]
    assert mixed == [True, True, False, True, True]
    refusals = [{f"use_{name}": True} for name in ("alibi", "sliding_window", "local_attention")]
    for refused in (*refusals, {"dcp_world_size": 2}):
        assert not asks(group, 1 << 19, **refused)
    for other in ({"attn_type": "encoder_decoder"}, {"attn_type": "encoder"}):
        assert not asks(Group(vllm, other), 1 << 19)


@pytest.mark.parametrize("five_dims", [True, False])
def test_keys_are_written_where_they_are_read(vllm, monkeypatch, five_dims):
    def write(key, value, k_cache, v_cache, slots, dtype, k_scale, v_scale):
        assert (dtype, k_scale, v_scale) == ("auto", "k", "v")
        for cache, new in ((k_cache, key), (v_cache, value)):
            cache.index_put_((slots // PAGE, slots % PAGE), new)

    ops = SimpleNamespace(reshape_and_cache_flash=write)
    monkeypatch.setattr(torch.ops, "_C_cache_ops", ops, raising=False)
    group = Group(vllm, five_dims=five_dims)
    group.layer._k_scale, group.layer._v_scale = "k", "v"
    step = group.step((Request(20, 20),))
    cache = torch.full_like(step.cache, float("nan"))
    positions = torch.arange(20, device=vllm.device)
    slots = (step.table[0, positions // PAGE] * PAGE + positions % PAGE).long()
    new = (x.to(vllm.device) for x in step.keys[0])
    group.impls[0].do_kv_cache_update(group.layer, *new, cache, slots)
    assert torch.equal(cache.nan_to_num(7.0), step.cache.nan_to_num(7.0))


def parallel(vllm):
    vllm.backend.get_impl_cls().dcp_world_size = 2
    Group(vllm)


def windowed(vllm):
    return Group(vllm, {"sliding_window": 9})


MIXED_CAUSAL = {"causal": torch.ones(4).bool()}
FAST_PREFILL = SimpleNamespace(kv_sharing_fast_prefill=True)
REFUSED = {
    "ALiBi slopes of 2 heads are not those": lambda x: Group(x, {"alibi_slopes": SLOPES[:2]}),
    "window has two sides": lambda x: Group(x, {"attn_type": "encoder_only", "sliding_window": 9}),
    "context parallelism": parallel,
    "without causal masking has two sides": lambda x: windowed(x).check(DECODES, causal=False),
    "one value of causal": lambda x: windowed(x).build(DECODES, None, **MIXED_CAUSAL),
    "--kv-sharing-fast-prefill": lambda x: Group(x, cache_config=FAST_PREFILL),
    "quantised output": lambda x: Group(x).impls[0].forward(None, *[None] * 6, output_scale=1.0),
}


@pytest.mark.parametrize("says", REFUSED)
def test_refusals(vllm, says):
    with pytest.raises(NotImplementedError, match=says):
        REFUSED[says](vllm)


CONFIGURATIONS = [
    (128, "auto", None),
    (512, "fp8", None),
    (72, "auto", None),
    (576, "auto", "multiples of 8 up to 512, not 576"),
    (100, "auto", "multiples of 8 up to 512, not 100"),
    (128, "float16", "not in float16: use --kv-cache-dtype auto"),
    (128, "bfloat16", None),
    (72, "fp8", "multiples of 16, not 72"),
]


@pytest.mark.parametrize(("head_size", "cache", "says"), CONFIGURATIONS)
def test_configurations(vllm, head_size, cache, says):
    options = (head_size, torch.bfloat16, cache, 16, False, False, False, False, None)
    answer = vllm.backend.supports_combination(*options)
    assert (answer is None) if says is None else (says in answer)


def test_graphs_of_mixed_batches_but_not_of_encoders(vllm):
    encoder = sys.modules["vllm.v1.kv_cache_interface"].EncoderOnlyAttentionSpec()
    support, some = vllm.backend.get_builder_cls().get_cudagraph_support, object()
    answers = sys.modules["vllm.v1.attention.backend"].AttentionCGSupport
    for speculative, lora, spec in itertools.product((None, some), (None, some), (encoder, some)):
        config = SimpleNamespace(speculative_config=speculative, lora_config=lora)
        is_never = spec is encoder or (speculative is some and lora is some)
        assert support(config, spec) is (answers.NEVER if is_never else answers.ALWAYS)
