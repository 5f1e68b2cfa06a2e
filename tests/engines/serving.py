"""Serves a two-layer model in the steps of an engine, and compares it with a float32 reference."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch

PAGE = 16


@dataclass(frozen=True)
class Shape:
    num_layers: int = 2
    num_qo_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 128
    hidden: int = 256
    vocabulary: int = 97
    dtype: torch.dtype = torch.float16
    sliding_window: int | None = None
    soft_cap: float | None = None
    fp8_cache: bool = False

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5


@dataclass
class Request:
    """A request. Its slots are the places of each token's keys in the pool, in pages of 16."""

    tokens: list[int]
    index: int = 0
    slots: list[int] = field(default_factory=list)
    computed: int = 0

    @property
    def pages(self) -> list[int]:
        return [slot // PAGE for slot in self.slots[::PAGE]]


@dataclass
class Batch:
    """Requests of one step, decodes first."""

    requests: list[Request]
    new: list[int]
    graph: bool = False

    @property
    def total(self) -> list[int]:
        return [r.computed + n for r, n in zip(self.requests, self.new, strict=True)]

    def inputs(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns token ids, positions and slots of the new tokens."""
        rows = [
            (r.tokens[i], i, r.slots[i])
            for r, total in zip(self.requests, self.total, strict=True)
            for i in range(r.computed, total)
        ]
        return torch.tensor(rows, device=device).t().contiguous().unbind()

    @property
    def starts(self) -> torch.Tensor:
        """The rows that requests begin at, and the number of rows, int32."""
        return torch.tensor([0, *self.new]).cumsum(0).int()

    def block_table(self, columns: int) -> torch.Tensor:
        table = torch.zeros(len(self.new), columns, dtype=torch.int32)
        for row, request in zip(table, self.requests, strict=True):
            row[: len(request.pages)] = torch.tensor(request.pages)
        return table


class Model:
    def __init__(self, shape: Shape, device: torch.device, seed: int = 0) -> None:
        self.shape, self.device = shape, device
        generator = torch.Generator().manual_seed(seed)

        def weight(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
            values = torch.randn(rows, columns, generator=generator) * (gain / rows**0.5)
            return values.to(device)

        s, hidden = shape, shape.hidden
        of_q, of_kv = s.num_qo_heads * s.head_dim, s.num_kv_heads * s.head_dim
        self.embedding = weight(s.vocabulary, hidden, s.vocabulary**0.5)
        sizes = {
            "q": (hidden, of_q), "k": (hidden, of_kv), "v": (hidden, of_kv),
            "o": (of_q, hidden, 2.0), "up": (hidden, 2 * hidden), "down": (2 * hidden, hidden),
        }  # fmt: skip
        self.layers = [{n: weight(*size) for n, size in sizes.items()} for _ in range(s.num_layers)]
        self.head = weight(hidden, s.vocabulary, 4.0)

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor, attend) -> torch.Tensor:
        """Returns the logits of every token. attend(layer, q, k, v) is in the cache's dtype."""
        s = self.shape
        x = self.embedding[tokens]
        for index, w in enumerate(self.layers):
            h = _norm(x)
            q, k, v = ((h @ w[n]).view(len(tokens), -1, s.head_dim) for n in "qkv")
            q, k, v = (_rotated(q, positions), _rotated(k, positions), v)
            if s.fp8_cache:  # values that quantization keeps as they are
                q, k, v = (t.to(torch.float8_e4m3fn) for t in (q, k, v))
            q, k, v = (t.to(s.dtype) for t in (q, k, v))
            x = x + attend(index, q, k, v).reshape(len(tokens), -1).float() @ w["o"]
            x = x + torch.nn.functional.silu(_norm(x) @ w["up"]) @ w["down"]
        return _norm(x) @ self.head


def _norm(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def _rotated(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    frequencies = 10000.0 ** (-torch.arange(half, device=x.device) / half)
    angles = positions[:, None, None] * frequencies
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


def reference_attention(shape: Shape):
    """Returns an attend() of one whole sequence in float32."""

    def attend(_layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        group = shape.num_qo_heads // shape.num_kv_heads
        k, v = (t.float().repeat_interleave(group, 1) for t in (k, v))
        logits = torch.einsum("qhd,khd->hqk", q.float(), k) * shape.scale
        if shape.soft_cap:
            logits = shape.soft_cap * torch.tanh(logits / shape.soft_cap)
        rows = torch.arange(len(q), device=q.device)
        distance = rows[:, None] - rows
        hidden = (distance < 0) | (distance >= (shape.sliding_window or len(q)))
        weights = logits.masked_fill(hidden, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v)

    return attend


def empty_cache(size: tuple[int, ...], shape: Shape, device: torch.device) -> torch.Tensor:
    """Returns a cache of NaN: values that the engine never wrote must not matter."""
    dtype = torch.float8_e4m3fn if shape.fp8_cache else shape.dtype
    return torch.full(size, float("nan"), device=device).to(dtype)


def write(cache: torch.Tensor, index, new: torch.Tensor) -> None:
    """Writes values at an index of a cache; torch indexes no floats of 8 bits."""
    new = new.to(cache.dtype)
    if cache.element_size() == 1:
        cache, new = cache.view(torch.uint8), new.view(torch.uint8)
    cache[index] = new


@dataclass(frozen=True)
class Load:
    """Prompts and lengths to serve. shared: tokens, in whole pages, of the prefix in "prefix"."""

    prompts: tuple[int, ...] = (37, 5, 64, 130)
    generated: int = 6
    shared: int = 64
    chunk: int = 48

    @property
    def max_length(self) -> int:
        longest = max(self.prompts) + self.shared + self.generated
        return -(-longest // PAGE) * PAGE

    @property
    def num_pages(self) -> int:
        return len(self.prompts) * self.max_length // PAGE + 8

    def tokens(self, vocabulary: int, path: str) -> list[list[int]]:
        generator = torch.Generator().manual_seed(3)
        lists = [
            torch.randint(vocabulary, (n,), generator=generator).tolist() for n in self.prompts
        ]
        if path == "prefix":
            lists = [lists[-1][: self.shared] + tokens for tokens in lists[:-1]] + [lists[-1]]
        return lists


@dataclass
class Served:
    """logits: of each request's generated tokens. Seconds are measured with a clock alone: until
    every request has its first token, and of the whole."""

    requests: list[Request]
    logits: list[torch.Tensor]
    first_token_s: float
    total_s: float


class Scheduler:
    def __init__(self, engine, model: Model, path: str, load: Load) -> None:
        """Serves a load by an engine's attention.

        Args:
            engine: begin(batch, slots) builds the metadata of a step, whose new tokens' keys go to
                these slots. attend(layer, q, k, v) writes k and v into the cache and returns
                [tokens, num_qo_heads, head_dim].
            path: "eager", "chunked", "prefix" or "graph".
        """
        self._engine, self._model, self._path, self._load = engine, model, path, load
        prompts = load.tokens(model.shape.vocabulary, path)
        self.requests = [Request(tokens, index) for index, tokens in enumerate(prompts)]
        self._goals = [len(tokens) + load.generated for tokens in prompts]
        order = torch.randperm(load.num_pages - 1, generator=torch.Generator().manual_seed(7)) + 1
        self._free_pages = order.tolist()
        self._logits: list[list[torch.Tensor]] = [[] for _ in prompts]

    def step(self, chosen: list[tuple[Request, int]], replays: dict[int, Replay]) -> None:
        model = self._model
        chosen = sorted(chosen, key=lambda pair: pair[1] > 1)
        batch = Batch([r for r, _ in chosen], [n for _, n in chosen])
        for request, total in zip(batch.requests, batch.total, strict=True):
            while len(request.slots) < total:
                first = self._free_pages.pop() * PAGE
                request.slots += range(first, first + PAGE)
        batch.graph = self._path == "graph" and all(n == 1 for n in batch.new)
        tokens, positions, slots = batch.inputs(model.device)
        if batch.graph:
            replay = replays.setdefault(len(chosen), Replay(self._engine, model, len(chosen)))
            found = replay(batch, tokens, positions, slots)
        else:
            self._engine.begin(batch, slots)
            found = model(tokens, positions, self._engine.attend)
        rows = found[(batch.starts[1:] - 1).tolist()]
        picked = rows.argmax(-1).tolist()
        for i, (request, n) in enumerate(zip(batch.requests, batch.new, strict=True)):
            request.computed += n
            if request.computed == len(request.tokens):
                self._logits[request.index].append(rows[i].clone())
                request.tokens.append(picked[i])

    def _chosen(self) -> list[tuple[Request, int]]:
        left = self._load.chunk if self._path == "chunked" else 1 << 30
        chosen = []
        for request in sorted(self.requests, key=lambda r: len(r.tokens) - r.computed):
            n = min(left, len(request.tokens) - request.computed)
            if n and len(request.tokens) < self._goals[request.index]:
                chosen.append((request, n))
                left -= n
        return chosen

    def serve(self, replays: dict[int, Replay]) -> Served:
        begin = time.perf_counter()
        first_token_s = 0.0
        if self._path == "prefix":
            first = self.requests[-1]
            self.step([(first, len(first.tokens))], replays)
            for request in self.requests[:-1]:
                request.slots = first.slots[: self._load.shared]
                request.computed = self._load.shared
        while chosen := self._chosen():
            self.step(chosen, replays)
            if not first_token_s and all(self._logits):
                first_token_s = time.perf_counter() - begin
        logits = [torch.stack(rows) for rows in self._logits]
        return Served(self.requests, logits, first_token_s, time.perf_counter() - begin)


class Replay:
    """Decode steps of one batch size in a CUDA graph, on the CPU the same calls without it."""

    def __init__(self, engine, model: Model, size: int) -> None:
        self._engine, self._model = engine, model
        self._inputs = torch.zeros(3, size, dtype=torch.int64, device=model.device).unbind()
        self._graph, self._logits = None, None

    def _run(self) -> torch.Tensor:
        tokens, positions, _ = self._inputs
        return self._model(tokens, positions, self._engine.attend)

    def __call__(self, batch: Batch, *inputs: torch.Tensor) -> torch.Tensor:
        for buffer, values in zip(self._inputs, inputs, strict=True):
            buffer.copy_(values)
        self._engine.begin(batch, self._inputs[2])
        if self._model.device.type != "cuda":
            return self._run()
        if self._graph is None:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._run()
            torch.cuda.current_stream().wait_stream(stream)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._logits = self._run()
        self._graph.replay()
        return self._logits


def check(model: Model, served: Served, tokens: bool = True) -> dict[str, float]:
    """Compares logits, and tokens if `tokens`. Returns the largest difference of a logit, and the
    least margin of a best token."""
    worst, margin = 0.0, float("inf")
    # Kernels over 8 bits round the weights of the softmax to 4 bits, so tokens may differ.
    coarse = model.shape.fp8_cache and model.device.type == "cuda"
    attend = reference_attention(model.shape)
    for request, found in zip(served.requests, served.logits, strict=True):
        ids = torch.tensor(request.tokens[:-1], device=model.device)
        wanted = model(ids, torch.arange(len(ids), device=model.device), attend)[-len(found) :]
        assert found.isfinite().all(), "a logit is not finite"
        worst = max(worst, float((wanted - found).abs().max()))
        best = wanted.topk(2).values
        margin = min(margin, float((best[:, 0] - best[:, 1]).min()))
        greedy = wanted.argmax(-1).tolist()
        assert coarse or not tokens or greedy == request.tokens[-len(found) :], (
            f"tokens differ: {worst=}, {margin=}"
        )
    tolerance = 1.0 if coarse else {torch.float16: 0.02, torch.bfloat16: 0.16}[model.shape.dtype]
    assert worst < tolerance, f"a logit is off by {worst}"
    return {"worst": round(worst, 5), "margin": round(margin, 3)}
