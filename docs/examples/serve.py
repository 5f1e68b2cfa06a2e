"""Continuous batching over a paged cache, with the model of model.py and the page
tables of batch.py.

    python docs/examples/serve.py

Each step takes one new token of every running request and up to CHUNK tokens of prompts:
- both:          BatchPODWithPagedKVCacheWrapper, prefill beside decode;
- prompts alone: BatchPrefillWithPagedKVCacheWrapper;
- decode alone:  BatchDecodeWithPagedKVCacheWrapper, on a GPU in a CUDA graph.
A step plans once, on the host, and runs every layer with that plan.
"""

import preflash
import torch
from batch import PAGE, Request, indptr, inputs, page_table
from model import DIM, HEADS, KV_HEADS, LAYERS, VOCAB, Model
from torch.nn.functional import pad

PAGES, CHUNK, SLOTS = 256, 64, 8  # pages, prompt tokens of a step, requests of a step
SHAPE = (HEADS, KV_HEADS, DIM, PAGE)


class Engine:
    def __init__(self, model, device, dtype):
        self.model, self.device = model, device
        self.cache = torch.zeros(LAYERS, PAGES, 2, PAGE, KV_HEADS, DIM, device=device, dtype=dtype)
        self.free, self.waiting, self.running = list(range(PAGES)), [], []
        workspace = torch.empty(64 << 20, dtype=torch.uint8, device=device)
        self.prefill = preflash.BatchPrefillWithPagedKVCacheWrapper(workspace)
        self.pod = preflash.BatchPODWithPagedKVCacheWrapper(workspace)
        # Decode in a graph: arrays of fixed address, SLOTS requests, empty ones behind the last.
        ints = {"dtype": torch.int32, "device": device}
        self.table = [torch.zeros(n, **ints) for n in (SLOTS + 1, PAGES, SLOTS)]
        self.inputs = torch.zeros(3, SLOTS, dtype=torch.int64, device=device)
        self.decode = preflash.BatchDecodeWithPagedKVCacheWrapper(
            torch.empty_like(workspace), use_cuda_graph=True,
            paged_kv_indptr_buffer=self.table[0], paged_kv_indices_buffer=self.table[1],
            paged_kv_last_page_len_buffer=self.table[2],
        )  # fmt: skip
        self.graph, self.dtype = None, dtype

    def step(self):
        """Computes one batch and appends the next token to each request whose prompt is done."""
        while self.waiting and len(self.running) < SLOTS:
            self.running.append(self.waiting.pop(0))
        left, prompts, decodes = CHUNK, [], []  # (request, new tokens) of each
        for request in self.running:
            new = len(request.tokens) - request.cached
            if new == 1 and request.cached:
                decodes.append((request, 1))
            elif left:
                prompts.append((request, min(new, left)))
                left -= prompts[-1][1]
        batch = prompts + decodes
        for request, new in batch:  # NOTE: a real engine makes room where no page is free
            while len(request.pages) * PAGE < request.cached + new:
                request.pages.append(self.free.pop())
        chosen = self.run(prompts, decodes) if prompts else self.replay(decodes)
        for (request, new), token in zip(batch, chosen, strict=True):
            request.cached += new
            if request.cached == len(request.tokens):
                request.tokens.append(token)
            if len(request.tokens) >= request.goal:
                self.running.remove(request)
                self.free += request.pages

    def run(self, prompts, decodes):
        """Prompts, or prompts beside decode: rows of the prompts first."""
        batch, qo_indptr = prompts + decodes, indptr(new for _, new in prompts)
        tables, rows = (page_table(prompts), page_table(decodes)), int(qo_indptr[-1])
        new_rows = inputs(batch).to(self.device)
        table = [x.to(self.device) for x in page_table(batch)]
        kind = {"q_data_type": self.dtype}
        if decodes:
            both = (qo_indptr, *tables[0], indptr(1 for _ in decodes), *tables[1])
            self.pod.plan(*both, *SHAPE, **kind)
        else:
            self.prefill.plan(qo_indptr, *tables[0], *SHAPE, causal=True, **kind)

        def attention(q, kv):
            if not decodes:
                return self.prefill.run(q, kv)
            return torch.cat(self.pod.run(q[:rows], kv, q[rows:], kv, causal_p=True))

        ends = indptr(new for _, new in batch)[1:].to(self.device) - 1
        return self.forward(new_rows, table, attention)[ends].argmax(-1).tolist()

    def replay(self, decodes):
        """Decode alone: plan() changes what the graph replays."""
        missing = SLOTS - len(decodes)
        starts, indices, last = page_table(decodes)
        starts, last = pad(starts, (0, missing), value=len(indices)), pad(last, (0, missing))
        new = pad(inputs(decodes), (0, missing))
        new[2, len(decodes) :] = -1  # padding: its keys are not written
        self.inputs.copy_(new)
        self.decode.plan(starts, indices, last, *SHAPE, data_type=self.dtype)
        if self.device == "cpu":
            return self.next_tokens().tolist()[: len(decodes)]
        if self.graph is None:
            self.next_tokens()  # loads the kernels; a replay writes the same keys again
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.chosen = self.next_tokens()
        self.graph.replay()
        return self.chosen.tolist()[: len(decodes)]

    def next_tokens(self):
        return self.forward(self.inputs, self.table, self.decode.run).argmax(-1)

    def forward(self, new_rows, table, attention):
        """Logits of new tokens, whose keys go into the cache before attention(q, kv) of a layer."""
        (ids, positions, owners), (starts, indices, last) = new_rows, table

        def attend(layer, q, k, v):
            kv = self.cache[layer]
            preflash.append_paged_kv_cache(k, v, owners, positions, kv, indices, starts, last)
            return attention(q, kv)

        return self.model(ids, positions, attend)


@torch.inference_mode()
def serve(prompts, new_tokens, device, dtype):
    engine = Engine(Model(device, dtype), device, dtype)
    requests = [Request(list(p), len(p) + n) for p, n in zip(prompts, new_tokens, strict=True)]
    engine.waiting = list(requests)
    while engine.waiting or engine.running:
        engine.step()
    return [request.tokens for request in requests]


if __name__ == "__main__":
    where = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    texts = [[(7 * n + i) % VOCAB for i in range(n)] for n in (5, 130, 33, 64, 17, 80, 1, 200, 12)]
    for text, tokens in zip(texts, serve(texts, [16] * len(texts), *where), strict=True):
        print(f"{len(text):4} tokens, then {tokens[len(text) :]}")
