"""Small classes stand in for SGLang's, and Engine calls preflash's backend as SGLang does."""

import enum
import functools
import itertools
import math
from types import SimpleNamespace

import torch
from engine_modules import Request, attended, captured, close, through
from engines.stand_ins import Anything
from preflash.testing.oracle import Pipeline

D, HEADS, KV_HEADS, SCALE = 64, 4, 2, 0.2
SLOTS, MAX_TOKENS = 4096, 256


def _is_kind(self, name):
    """Answers is_decode_or_idle(), is_target_verify(), ... by the name of a mode or algorithm."""
    kinds = name.removeprefix("is_").upper().split("_OR_")
    return lambda: self.name in kinds


class Mode(enum.Enum):
    """ForwardMode."""

    EXTEND, DECODE, IDLE, TARGET_VERIFY, DRAFT_EXTEND_V2, DLLM_EXTEND = range(6)
    __getattr__ = _is_kind


class Algorithm:
    """SpeculativeAlgorithm."""

    __getattr__ = _is_kind

    def __init__(self, name):
        self.name = name


class AttentionType(enum.Enum):
    DECODER = "decoder"
    DECODER_BIDIRECTIONAL = "decoder_bidirectional"
    ENCODER_ONLY = "encoder_only"


class Layer(torch.nn.Module):
    """RadixAttention."""

    def __init__(self, layer_id=0, **options):
        super().__init__()
        self.layer_id = layer_id
        self.tp_q_head_num, self.tp_k_head_num = HEADS, KV_HEADS
        self.tp_v_head_num = KV_HEADS
        self.head_dim, self.v_head_dim, self.scaling, self.logit_cap = D, D, SCALE, 0.0
        self.sliding_window_size, self.is_cross_attention = -1, False
        self.attn_type, self.pos_encoding_mode = AttentionType.DECODER, "NONE"
        self.logit_capping_method, self.xai_temperature_len = "tanh", -1
        self.k_scale = self.v_scale = self.k_scale_float = self.v_scale_float = None
        vars(self).update(options)


class WriteLoc:
    """KVWriteLoc."""

    def __init__(self, loc, swa_loc):
        self.loc, self.swa_loc = loc, swa_loc

    @classmethod
    def for_layer(cls, batch, layer, *, swa_loc=None):
        name = "encoder_out_cache_loc" if layer.is_cross_attention else "out_cache_loc"
        return cls(getattr(batch, name), swa_loc)


class Pool:
    """token_to_kv_pool: [slots, heads, dim] of each layer, NaN where nothing was written."""

    def __init__(self, layers, dtype, device):
        def empty(dim):
            values = torch.full((SLOTS, KV_HEADS, dim), float("nan"), device=device)
            return values.to(dtype)

        self.pairs = [(empty(layer.head_dim), empty(layer.v_head_dim)) for layer in layers]

    def get_kv_buffer(self, layer_id):
        return self.pairs[layer_id]

    def set_kv_buffer(self, layer, loc, k, v, k_scale, v_scale):
        loc = loc.loc if loc.swa_loc is None else loc.swa_loc
        for buffer, new, scale in zip(
            self.pairs[layer.layer_id], (k, v), (k_scale, v_scale), strict=True
        ):
            if new.dtype != buffer.dtype:  # as SGLang does: only what it converts it scales
                new = (new if scale is None else new / scale).to(buffer.dtype)
            buffer[loc] = new.view(len(loc), *buffer.shape[1:])


class WindowPool(Pool):
    """SWAKVPool: slots of layers with a window are others, and it wants them."""

    def __init__(self, *args):
        super().__init__(*args)
        pages = torch.randperm(SLOTS // 16, generator=torch.Generator().manual_seed(5))
        mapping = (pages[:, None] * 16 + torch.arange(16)).flatten()
        self._mapping = mapping.to(self.pairs[0][0].device)

    def translate_loc_from_full_to_swa(self, slots):
        return self._mapping[slots]

    def set_kv_buffer(self, layer, loc, *args):
        assert (loc.swa_loc is not None) == (layer.sliding_window_size >= 0)
        super().set_kv_buffer(layer, loc, *args)


class Engine:
    """Layers of a model, their backend, and SGLang's table and pool.

    topk: branches of drafts, None without drafts; changed: of ModelRunner."""

    def __init__(
        self, sglang, *layers, kv_dtype=torch.float16, page_size=1, window_pool=False,
        encoder_decoder=False, topk=None, algorithm="EAGLE", **changed,
    ):  # fmt: skip
        self.sglang, self.device, self.dtype = sglang, sglang.device, torch.float16
        self.page_size, self.kv_dtype = page_size, kv_dtype
        self.layers = [Layer(i, **options) for i, options in enumerate(layers or [{}])]
        pool = WindowPool if window_pool else Pool
        self.pool = pool(self.layers, kv_dtype, self.device)
        self.table = torch.zeros(17, MAX_TOKENS, dtype=torch.int32, device=self.device)
        pages = torch.randperm(SLOTS // 16 - 1, generator=torch.Generator().manual_seed(1)) + 1
        self.free_pages = pages.tolist()
        config = SimpleNamespace(context_len=MAX_TOKENS, is_encoder_decoder=encoder_decoder)
        values = {
            "model": torch.nn.ModuleList(self.layers), "model_config": config,
            "token_to_kv_pool": self.pool, "dtype": self.dtype, "page_size": page_size,
            "req_to_token_pool": SimpleNamespace(req_to_token=self.table),
            "kv_cache_dtype": kv_dtype, "kv_cache_dtype_str": "auto",
            "attention_chunk_size": None,
            "spec_algorithm": Algorithm("NONE" if topk is None else algorithm),
        }  # fmt: skip
        sglang.spec.speculative_eagle_topk = topk
        self.runner = Anything("ModelRunner", **{**values, **changed})

    @functools.cached_property
    def backend(self):
        return self.sglang.backend(self.runner)

    def tensor(self, values, dtype=torch.int64):
        return torch.tensor(values, dtype=dtype, device=self.device)

    def allocate(self, requests, room=0):
        """Gives the requests rows 1, 2, ... of the table, with slots in shuffled pages of 16."""
        for row, request in enumerate(requests, 1):
            slots = []
            while len(slots) < min(request.encoder + request.total + room, MAX_TOKENS):
                page = self.free_pages.pop()
                slots += range(16 * page, 16 * page + 16)
            slots = slots[:MAX_TOKENS]
            self.table[row, : len(slots)] = self.tensor(slots, torch.int32)

    def inputs(self, requests, seed=0):
        """Draws q of every layer, and k and v of each request, on the CPU."""
        generator = torch.Generator().manual_seed(seed)

        def values(n, heads, dim):
            return torch.randn(n, heads, dim, generator=generator).to(self.dtype)

        rows = sum(request.new for request in requests)
        found = []
        for layer in self.layers:
            (_, q_dim), *sizes = sizes_of(layer)
            lengths = [r.encoder if layer.is_cross_attention else r.total for r in requests]
            pairs = [tuple(values(n, *size) for size in sizes) for n in lengths]
            found.append((values(rows, HEADS, q_dim), pairs))
        return found

    def batch(self, requests, mode, padding=0, **changed):
        """Makes a ForwardBatch; padding: requests of one token in row 0, as for SGLang's graphs."""
        drafts = requests[0].new if mode is Mode.TARGET_VERIFY else 0
        lengths = [request.total - drafts for request in requests] + [1] * padding
        encoder = [request.encoder for request in requests] + [0] * padding
        rows = [*enumerate(requests, 1)]
        locs = [self.slot(row, r.total - r.new, r.total, r) for row, r in rows]
        encoder_locs = [self.table[row, : r.encoder] for row, r in rows]
        values = {
            **self.lengths_of(mode, [*dict(rows)] + [0] * padding, lengths), "spec_info": None,
            "extend_seq_lens_cpu": [request.new for request in requests],
            "out_cache_loc": torch.cat(locs).long(),
            "encoder_out_cache_loc": torch.cat(encoder_locs).long(),
            "encoder_lens": self.tensor(encoder), "encoder_lens_cpu": encoder,
            "cross_attention_custom_mask": None,
        }  # fmt: skip
        return SimpleNamespace(**{**values, **changed})

    def lengths_of(self, mode, rows, lengths):
        """Returns the fields of a ForwardBatch of requests in these rows of the table."""
        return {
            "forward_mode": mode, "batch_size": len(lengths),
            "req_pool_indices": self.tensor(rows), "seq_lens": self.tensor(lengths),
            "seq_lens_cpu": torch.tensor(lengths),
        }  # fmt: skip

    def slot(self, row, begin, end, request):
        return self.table[row, request.encoder + begin : request.encoder + end]

    def fill(self, requests, inputs):
        """Writes the keys before the new ones into the cache."""
        for layer, (_, pairs) in zip(self.layers, inputs, strict=True):
            if layer.is_cross_attention:
                continue
            for row, (request, (k, v)) in enumerate(zip(requests, pairs, strict=True), 1):
                n = request.total - request.new
                self.write(layer, self.slot(row, 0, n, request), k[:n], v[:n])

    def write(self, layer, slots, k, v):
        slots, swa = slots.long(), None
        if isinstance(self.pool, WindowPool) and layer.sliding_window_size >= 0:
            swa = self.pool.translate_loc_from_full_to_swa(slots)
        k, v = k.to(self.device), v.to(self.device)
        self.pool.set_kv_buffer(layer, WriteLoc(slots, swa), k, v, layer.k_scale, layer.v_scale)

    def forward(self, index, q, k, v, batch, backend=None, **options):
        backend = self.backend if backend is None else backend
        decode = batch.forward_mode is Mode.DECODE
        call = backend.forward_decode if decode else backend.forward_extend
        q = q.to(self.device).flatten(1)
        k, v = (x if x is None else x.to(self.device) for x in (k, v))
        out = call(q, k, v, self.layers[index], batch, **options)
        return out.view(len(q), HEADS, -1)

    def new_keys(self, index, requests, pairs):
        """Returns k and v of the new tokens, or of the encoders for cross-attention."""
        if not self.layers[index].is_cross_attention:
            news = (request.new for request in requests)
            pairs = [[x[len(x) - n :] for x in pair] for n, pair in zip(news, pairs, strict=True)]
        return tuple(map(torch.cat, zip(*pairs, strict=True)))

    def step(self, requests, seed=0):
        """Returns inputs of the requests, with the earlier keys in the cache."""
        self.allocate(requests)
        inputs = self.inputs(requests, seed)
        self.fill(requests, inputs)
        return inputs

    def begun(self, requests, mode=Mode.EXTEND, **changed):
        """Returns a batch that the backend has planned for."""
        batch = self.batch(requests, mode, **changed)
        self.backend.init_forward_metadata(batch)
        return batch

    def check(self, requests, mode=Mode.EXTEND, *, seed=0, masks=None, sinks=None, **changed):
        """Compares every layer on one eager step with the oracle."""
        inputs = self.step(requests, seed)
        batch = self.begun(requests, mode, **changed)
        options = {} if sinks is None else {"sinks": sinks.to(self.device)}
        for index, (q, pairs) in enumerate(inputs):
            k, v = self.new_keys(index, requests, pairs)
            out = self.forward(index, q, k, v, batch, **options)
            wanted = reference(q, pairs, requests, self.layers[index], self, masks, sinks)
            close(out, wanted, 0.08 if self.kv_dtype != self.dtype else 0.01)
        return batch


def reference(q, pairs, requests, layer, engine, masks=None, sinks=None):
    """Computes the output; masks: bool [new, total] of each request instead of causal masking."""
    decoder = not layer.is_cross_attention and layer.attn_type is AttentionType.DECODER
    pipeline = Pipeline(
        layer.scaling, decoder, layer.sliding_window_size, layer.logit_cap, sinks=sinks
    )
    if engine.kv_dtype != engine.dtype:
        scales = layer.k_scale, layer.v_scale
        pairs = [
            [through(x, engine.kv_dtype, s) for x, s in zip(pair, scales, strict=True)]
            for pair in pairs
        ]
    return attended(pipeline, requests, q, pairs, masks)


def sizes_of(layer):
    """Returns heads and head_dim of q, of k and of v."""
    return (HEADS, layer.head_dim), (KV_HEADS, layer.head_dim), (KV_HEADS, layer.v_head_dim)


NUM_STEPS = 4


class Drafts:
    """Draft trees of requests whose tokens are in the cache, placed as SGLang's allocator does."""

    def __init__(self, engine, topk, lengths, seed=0):
        self.engine, self.topk, self.lengths = engine, topk, lengths
        self.requests = tuple(Request(0, n) for n in lengths)
        engine.allocate(self.requests, room=topk * (NUM_STEPS + engine.page_size) + 16)
        self.inputs = engine.inputs(self.requests, seed)
        engine.fill(self.requests, self.inputs)
        self.generator = torch.Generator().manual_seed(seed + 100)
        self.keys = [
            [[list(pair) for _ in range(topk)] for pair in pairs] for _, pairs in self.inputs
        ]

    def loc(self, row, branch, step):
        """Returns the cache slot of a branch's token of a step."""
        length, page = self.lengths[row], self.engine.page_size
        room = math.ceil((length % page + NUM_STEPS) / page) * page
        return int(self.engine.table[row + 1, length + branch * room + step])

    def batch(self, padding=0):
        rows = [*range(1, len(self.lengths) + 1), *[0] * padding]
        lengths = [*self.lengths, *[1] * padding]
        return SimpleNamespace(**self.engine.lengths_of(Mode.DECODE, rows, lengths))

    def new_token(self, layer, step):
        """Draws q, k and v of a step's tokens, and their slots; keeps k and v for the reference."""
        n = len(self.lengths) * self.topk
        q, k, v = (
            torch.randn(n, *size, generator=self.generator).to(self.engine.dtype)
            for size in sizes_of(layer)
        )
        places = [*itertools.product(range(len(self.lengths)), range(self.topk))]
        for (row, branch), *new in zip(places, k.split(1), v.split(1), strict=True):
            kept = self.keys[layer.layer_id][row]
            kept[branch] = [*map(torch.cat, zip(kept[branch], new, strict=True))]
        return q, k, v, self.engine.tensor([self.loc(*place, step) for place in places])

    def wanted(self, layer, q, step):
        pairs = [branch for row in self.keys[layer.layer_id] for branch in row]
        requests = [Request(1, n + step + 1) for n in self.lengths for _ in range(self.topk)]
        return reference(q, pairs, requests, layer, self.engine)


class Graph:
    """One layer's runs on buffers of a captured size."""

    def __init__(self, engine, rows, backend, batch):
        self.engine, self.backend, self.batch = engine, backend, batch
        self.inputs = [
            torch.zeros(rows, *size, dtype=engine.dtype, device=engine.device)
            for size in sizes_of(engine.layers[0])
        ]
        self.locs = engine.tensor([0] * rows)
        for _ in range(2):  # warm-up
            self._run()
        self._replay = captured(self._run, engine.device)

    def _run(self):
        self.batch.out_cache_loc = self.locs
        self.backend.init_forward_metadata_in_graph(self.batch)
        self.out = self.engine.forward(0, *self.inputs, self.batch, self.backend)

    def replay(self, q, k, v, locs):
        """Replays rows of q, k and v at these slots; the other rows are padding at slot 0."""
        for buffer, new in zip((self.locs, *self.inputs), (locs, q, k, v), strict=True):
            buffer.zero_()
            buffer[: len(new)] = new.to(buffer.device)
        self._replay()
        return self.out[: len(q)]
