"""A wrapper with use_cuda_graph=True, tensors that never move, and batches that come and go.

On a GPU a run is captured into a CUDA graph. On the CPU, where there are none, the prepared launch
is recorded with its addresses and started again: a replay finds what the last plan() left.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random

import pytest
import torch
from preflash._device import backends
from preflash.testing import Case, Inputs, build, runner

NAN = float("nan")


class _Recorder:
    """Launches of the CPU while they are being `captured`."""

    calls: list | None = None

    def launch(self, start) -> bool:
        if self.calls is None:
            return start()
        self.calls.append(start)
        return True


@pytest.fixture
def recorder(monkeypatch) -> _Recorder:
    made = _Recorder()
    monkeypatch.setattr(backends.CpuBackend, "launched_by", made.launch)
    return made


class _Recorded:
    def __init__(self, calls: list) -> None:
        self._calls = calls

    def replay(self) -> None:
        for start in self._calls:
            start()


@contextlib.contextmanager
def _recording(recorder: _Recorder):
    recorder.calls = []
    try:
        yield recorder.calls
    finally:
        recorder.calls = None


def capture(recorder: _Recorder, device: str, run, stream=None):
    """Captures what run() launches; returns an object with replay()."""
    if device == "cpu":
        with _recording(recorder) as calls:
            run()
        return _Recorded(list(calls))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    return graph


@dataclasses.dataclass
class Limits:
    batch: int
    rows: int
    pages: int = 0  # of the pool; ragged: 0
    tokens: int = 0  # of k and v; paged: 0


class Stage:
    """Fixed memory for batches like `like`, within limits."""

    def __init__(
        self, like: Case, limits: Limits, target, *, workspace=None, masked: bool = False
    ) -> None:
        self.like, self.limits, self.device = like, limits, target.device
        kv_rows = (limits.pages, like.page_size) if like.paged else (limits.tokens,)
        if like.layout == "HND":
            kv_shape = (*kv_rows[:-1], like.num_kv_heads, kv_rows[-1])
        else:
            kv_shape = (*kv_rows, like.num_kv_heads)
        self.q = self._empty(limits.rows, like.num_qo_heads, like.head_dim)
        self.k, self.v = (self._empty(*kv_shape, d) for d in (like.head_dim, like.dim_vo))
        self.out = self._empty(limits.rows, like.num_qo_heads, like.dim_vo)
        self.lse = self._empty(limits.rows, like.num_qo_heads, dtype=torch.float32)
        self.buffers = {"qo_indptr_buf": self._ints(limits.batch + 1)}
        if like.paged:
            self.buffers["paged_kv_indptr_buf"] = self._ints(limits.batch + 1)
            self.buffers["paged_kv_indices_buf"] = self._ints(limits.pages)
            self.buffers["paged_kv_last_page_len_buf"] = self._ints(limits.batch)
        else:
            self.buffers["kv_indptr_buf"] = self._ints(limits.batch + 1)
        if masked:
            keys = limits.tokens + limits.pages * like.page_size
            bits = limits.rows * keys // 8 + limits.batch + 8
            self.buffers["custom_mask_buf"] = self._ints(bits).fill_(-1).byte()
            self.buffers["mask_indptr_buf"] = self._ints(limits.batch + 1)
        self.wrapper = runner.make_wrapper(
            like, backend=target.backend, device=self.device, buffer=workspace,
            use_cuda_graph=True, **self.buffers,
        )  # fmt: skip

    def _empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.full(shape, NAN, dtype=dtype or self.like.dtype, device=self.device)

    def _ints(self, count: int) -> torch.Tensor:
        return torch.full((count,), -7, dtype=torch.int32, device=self.device)

    def make(self, qo_lens, kv_lens, seed: int = 0, *, on_host: bool = True, **options) -> Inputs:
        """A batch: its arrays on the CPU unless on_host=False."""
        case = dataclasses.replace(
            self.like, qo_lens=tuple(qo_lens), kv_lens=tuple(kv_lens), **options
        )
        index_device = "cpu" if on_host else self.device
        return build(case, device=self.device, index_device=index_device, seed=seed)

    def random(self, seed: int, **options) -> Inputs:
        """Up to the limits; some requests are empty."""
        rng = random.Random(seed)
        limits = self.limits
        most = rng.choice((1, limits.rows // 2, limits.rows))
        cuts = sorted(rng.randint(0, most) for _ in range(limits.batch - 1))
        qo_lens = [end - begin for begin, end in zip([0, *cuts], [*cuts, most], strict=True)]
        rng.shuffle(qo_lens)
        size = max(self.like.page_size, 1)
        # inputs.py adds spare pages and rows.
        room = (limits.pages or limits.tokens) - 6 - limits.batch
        longest = max(rng.choice((1, room // 8, room)), 1)
        cuts = sorted(rng.randint(0, longest) for _ in range(limits.batch - 1))
        units = [end - begin for begin, end in zip([0, *cuts], [*cuts, longest], strict=True)]
        rng.shuffle(units)
        kv_lens = [max(n * size - rng.randrange(size), 0) if n else 0 for n in units]
        return self.make(qo_lens, kv_lens, seed, on_host=bool(seed % 2), **options)

    def load(self, inputs: Inputs) -> None:
        """The batch's values into the fixed tensors; everything else is NaN."""
        tokens = 1 if self.like.layout == "HND" and not self.like.paged else 0
        for name, dim in (("q", 0), ("k", tokens), ("v", tokens)):
            fixed, values = getattr(self, name), getattr(inputs, name)
            fixed.fill_(NAN)
            fixed.narrow(dim, 0, values.shape[dim]).copy_(values)
        self.poison()

    def poison(self) -> None:
        self.out.fill_(NAN)
        self.lse.fill_(NAN)

    def plan(self, inputs: Inputs, **overrides) -> None:
        self.load(inputs)
        runner.plan(self.wrapper, inputs, **overrides)

    def cache(self) -> tuple:
        return ((self.k, self.v),) if self.like.paged else (self.k, self.v)

    def run(self, rows: int | None = None, **options) -> None:
        part = slice(0, rows)
        outputs = {"out": self.out[part], "lse": self.lse[part], "return_lse": True}
        self.wrapper.run(self.q[part], *self.cache(), **{**outputs, **options})

    def check(self, inputs: Inputs, **options) -> None:
        """The output is the batch's, and nothing is written behind it."""
        rows = inputs.q.shape[0]
        runner.compare(inputs, self.out[:rows], self.lse[:rows], **options).check()
        assert bool(self.out[rows:].isnan().all())
        assert bool(self.lse[rows:].isnan().all())
