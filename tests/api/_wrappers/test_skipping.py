"""run(skip_softmax_threshold_scale_factor=) of the wrappers: plan() does not know of it."""

from __future__ import annotations

import copy
import dataclasses
import math

import numpy as np
import preflash
import pytest
import torch
from graph_stage import Limits, Stage, capture, recorder  # noqa: F401
from preflash.testing import Case, MaskKind, compare, runner
from preflash.testing.oracle import Pipeline, attend, concatenate
from torch.fx.experimental.proxy_tensor import make_fx

FACTOR = "skip_softmax_threshold_scale_factor"
HEADS, KV_HEADS, PAGE = 4, 2, 64
KV_LENS = (2048, 1792)
# Of each request: clear of where logits change, whatever a tile is.
MIDDLE = slice(512, 1280)


@dataclasses.dataclass
class Decaying:
    """Two requests of which the keys of the middle have logits 20 below those at both ends: in
    whichever order tiles are computed, the first ones are not of the middle."""

    wrapper: object
    q: torch.Tensor
    k: torch.Tensor  # [tokens, heads, head_dim]
    v: torch.Tensor
    qo_lens: tuple[int, ...]
    paged: bool
    causal: bool

    @property
    def keys(self) -> tuple:
        if not self.paged:
            return (self.k, self.v)
        pages = (len(self.k) // PAGE, PAGE, KV_HEADS, self.k.shape[-1])
        return ((self.k.view(pages), self.v.view(pages)),)

    def run(self, factor="absent", **options):
        if factor != "absent":
            options[FACTOR] = factor
        return self.wrapper.run(self.q, *self.keys, **options)

    def spoil(self) -> None:
        """NaN in the values of the middle, which nobody may see who leaves it out."""
        for begin in (0, KV_LENS[0]):
            self.v[begin + MIDDLE.start : begin + MIDDLE.stop] = math.nan

    def expected(self, **options):
        pipeline = Pipeline(sm_scale=1.0, **{"causal": self.causal, **options})
        parts, row, key = [], 0, 0
        for qo_len, kv_len in zip(self.qo_lens, KV_LENS, strict=True):
            rows, keys = slice(row, row + qo_len), slice(key, key + kv_len)
            tensors = (self.q[rows], self.k[keys], self.v[keys])
            parts.append(attend(*(t.cpu() for t in tensors), pipeline))
            row, key = row + qo_len, key + kv_len
        return concatenate(parts)

    @property
    def plans(self) -> int:
        """Beside that of plan()."""
        return len(self.wrapper._plan.others)


def lengths(kind):
    return (1, 1) if kind == "decode" else (200, 70)


def made(kind, target, dtype=torch.float16, head_dim=128, wrapper=None, **options) -> Decaying:
    """wrapper: a paged one, to plan. options: of plan()."""
    generator = torch.Generator().manual_seed(0)
    qo_lens, tokens = lengths(kind), sum(KV_LENS)
    q, k, v = (
        torch.randn(n, heads, head_dim, generator=generator).mul(0.1).to(dtype)
        for n, heads in ((sum(qo_lens), HEADS), (tokens, KV_HEADS), (tokens, KV_HEADS))
    )
    q[..., 0], k[..., 0] = 4.0, 0.0
    for begin in (0, KV_LENS[0]):
        k[begin + 256 : begin + 1536, :, 0] = -5.0
    qo_indptr = torch.tensor([0, qo_lens[0], sum(qo_lens)], dtype=torch.int32)
    numbers = {"num_qo_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": head_dim}
    # Each chunk of split keys would have first tiles and maxima of its own.
    split = {} if "fixed_split_size" in options else {"disable_split_kv": True}
    given = {**numbers, **split, "sm_scale": 1.0, "q_data_type": dtype, **options}
    pages = torch.tensor([0, KV_LENS[0] // PAGE, tokens // PAGE], dtype=torch.int32)
    indices = torch.arange(tokens // PAGE, dtype=torch.int32, device=target.device)
    last = torch.full((2,), PAGE, dtype=torch.int32)
    buffer = runner.workspace(target.device)
    if kind == "ragged":
        wrapper = preflash.BatchPrefillWithRaggedKVCacheWrapper(buffer, backend=target.backend)
        kv_indptr = torch.tensor([0, KV_LENS[0], tokens], dtype=torch.int32)
        wrapper.plan(qo_indptr, kv_indptr, causal=True, **given)
    elif kind == "decode":
        wrapper = preflash.BatchDecodeWithPagedKVCacheWrapper(buffer, backend=target.backend)
        wrapper.plan(pages, indices, last, page_size=PAGE, **given)
    else:
        if wrapper is None:
            wrapper = preflash.BatchPrefillWithPagedKVCacheWrapper(buffer, backend=target.backend)
        wrapper.plan(qo_indptr, pages, indices, last, page_size=PAGE, causal=True, **given)
    q, k, v = map(target.to, (q, *(x.to(options.get("kv_data_type", dtype)) for x in (k, v))))
    return Decaying(wrapper, q, k, v, qo_lens, kind != "ragged", kind != "decode")


def near(one: torch.Tensor, other: torch.Tensor) -> bool:
    """But for two roundings to float16, of P and of the output."""
    return bool((one.double() - other.double()).norm() <= 2.0**-9 * other.double().norm())


KINDS = pytest.mark.parametrize("kind", ["paged", "ragged", "decode"])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@KINDS
def test_tiles_without_weight_are_left_out(target, kind, dtype):
    """They are not even looked at: NaN among their values reaches nothing. All others count, in the
    LSE too. A run without a factor is as before."""
    batch = made(kind, target, dtype)
    before = batch.run(return_lse=True)
    expected = batch.expected()
    batch.spoil()
    out, lse = batch.run(1.0, return_lse=True)
    compare(out.cpu(), lse.cpu(), expected).check()
    for factor in ("absent", None, 0, 0.0):
        assert batch.run(factor).isnan().all(), factor
    again = made(kind, target, dtype)
    batch.v.copy_(again.v)
    for factor in ("absent", None, 0, 0.0):
        after = batch.run(factor, return_lse=True)
        assert all(map(torch.equal, before, after)), factor


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@KINDS
def test_as_in_the_function(target, kind, head_dim):
    """The same keys as in trtllm_fmha_v2_prefill are left out, also where that changes much."""
    batch = made(kind, target, head_dim=head_dim)
    cpu = target.backend == "cpu"
    begins = torch.tensor([0, batch.qo_lens[0], sum(batch.qo_lens)], dtype=torch.int32)
    kv_begins = torch.tensor([0, KV_LENS[0], sum(KV_LENS)], dtype=torch.int32)
    for factor in (1e-12, 1.0, 1800.0, 1e9):
        out = batch.run(factor)
        function = preflash.trtllm_fmha_v2_prefill(
            (batch.q, batch.k, batch.v), "SEPARATE_Q_K_V",
            torch.empty(0, dtype=torch.uint8, device=target.device),
            seq_lens=torch.tensor(KV_LENS, dtype=torch.int32), max_q_len=max(batch.qo_lens),
            max_kv_len=max(KV_LENS), bmm1_scale=1.0, bmm2_scale=1.0, batch_size=2,
            cum_seq_lens_q=begins, cum_seq_lens_kv=kv_begins,
            mask_mode="causal" if batch.causal else "padding", backend=target.backend,
            **{FACTOR: factor},
        )  # fmt: skip
        # Without a split, as the batch is, a decode step has the bits of a prefill's row.
        same = torch.equal if cpu and kind != "decode" else near
        if cpu or factor <= 1.0:
            assert same(out, function), factor
    assert cpu is False or not torch.equal(out, batch.run())


@KINDS
def test_another_factor_is_no_other_plan(target, kind, monkeypatch):
    batch = made(kind, target)
    planned, plan_for = [], batch.wrapper._planned_for
    monkeypatch.setattr(batch.wrapper, "_planned_for", lambda *a: planned.append(1) or plan_for(*a))
    batch.spoil()
    kernel = batch.wrapper.variant
    skipped = batch.run(1.0)
    # What float32 does not hold leaves out nothing either.
    for factor in (1e-12, 1e-30, 1e-50, np.float32(1e-12)):
        assert batch.run(factor).isnan().all()
    assert torch.equal(batch.run(1.0), skipped)
    assert torch.equal(batch.run(1), skipped)
    assert len(planned) == batch.plans == 1
    assert batch.wrapper.variant == kernel


def test_beside_other_options_of_a_run(target):
    batch = made("paged", target)
    sinks = target.to(torch.tensor([0.5, -1.0, 90.0, 0.0]))
    given = {"window_left": 1900, "sinks": sinks, "q_scale": 0.5, "k_scale": 2.0, "v_scale": 3.0}
    expected = batch.expected(window_left=1900, sinks=sinks.cpu(), out_scale=3.0)
    batch.spoil()
    out, lse = batch.run(1.0, return_lse=True, lse_base="ln", lse_layout="HN", **given)
    compare(out.cpu(), lse.T.contiguous().cpu() / math.log(2), expected).check()
    assert batch.run(1e-12, **given).isnan().any()
    assert batch.plans == 1
    assert batch.run(1.0, sinks=sinks).isfinite().all()
    assert batch.plans == 2
    assert batch.run(sinks=sinks).isnan().any()


def test_split_keys(target):
    """Each chunk has a first tile of its own. Factors that leave out nothing of weight."""
    batch = made("decode", target, fixed_split_size=256)
    out, lse = batch.run(1e-6, return_lse=True)
    compare(out.cpu(), lse.cpu(), batch.expected()).check()


def test_q_len_per_req(target):
    """run() may plan twice for one call."""
    batch = made("decode", target)
    batch.q = batch.q.repeat_interleave(3, dim=0)
    batch.qo_lens, batch.causal = (3, 3), True
    expected = batch.expected()
    batch.spoil()
    for _ in range(2):
        out, lse = batch.run(1.0, q_len_per_req=3, return_lse=True)
        compare(out.cpu(), lse.cpu(), expected).check()
    batch.q = batch.q[::3].contiguous()
    assert batch.run().isnan().all()
    assert batch.run(1.0).isfinite().all()


SINK = ("uri", *[torch.float16] * 3, torch.int32, 128, 128, ["sink"], ["float"], ["sm_scale"],
        ["double"], "AttentionSink", "")  # fmt: skip


@pytest.mark.parametrize("how", ["class", "jit_args"])
def test_wrappers_of_sinks(target, how):
    kind = preflash.BatchAttentionWithAttentionSinkWrapper
    given = {"q_data_type": torch.float16, "kv_data_type": torch.float16}
    if how == "jit_args":
        kind = preflash.BatchPrefillWithPagedKVCacheWrapper
        given = {"jit_args": SINK}
    wrapper = kind(runner.workspace(target.device), backend=target.backend, **given)
    batch = made("paged", target, wrapper=wrapper)
    sinks = target.to(torch.zeros(HEADS))
    batch.spoil()
    assert wrapper.run(batch.q, *batch.keys, sinks, 1.0, **{FACTOR: 1.0}).isfinite().all()
    assert wrapper.run(batch.q, *batch.keys, sinks, 1.0).isnan().all()


def test_new_plans_copies_and_forward(target):
    batch = made("paged", target)
    batch.spoil()
    skipped = batch.run(1.0)
    other = copy.copy(batch.wrapper)
    assert torch.equal(other.run(batch.q, *batch.keys, **{FACTOR: 1.0}), skipped)
    batch.wrapper.begin_forward(
        torch.tensor([0, 200, 270], dtype=torch.int32),
        torch.tensor([0, 32, 60], dtype=torch.int32),
        torch.arange(60, dtype=torch.int32, device=target.device),
        torch.full((2,), PAGE, dtype=torch.int32), HEADS, KV_HEADS, 128, PAGE, causal=True,
        sm_scale=1.0, disable_split_kv=True,
    )  # fmt: skip
    assert batch.wrapper.forward(batch.q, *batch.keys, causal=True, sm_scale=1.0).isnan().all()
    assert torch.equal(batch.run(1.0), skipped)
    assert batch.run().isnan().all()


WRONG = [
    (-1.0, ValueError, "must be positive"), (-1e-30, ValueError, "must be positive"),
    (math.nan, ValueError, "finite"), (math.inf, ValueError, "finite"),
    (1e39, ValueError, "finite"), (True, TypeError, "float"), ("1", TypeError, "float"),
    (torch.tensor(1.0), TypeError, "float"), ([1.0], TypeError, "float"),
]  # fmt: skip


@pytest.mark.parametrize(("factor", "error", "says"), WRONG, ids=lambda value: str(value)[:20])
@KINDS
def test_wrong_factors(target, kind, factor, error, says):
    batch = made(kind, target)
    before = batch.run()
    with pytest.raises(error, match=rf"{FACTOR}.*{says}"):
        batch.run(factor)
    assert batch.plans == 0
    assert torch.equal(batch.run(), before)


@pytest.mark.parametrize(
    "options",
    [
        {"logits_soft_cap": 50.0},
        {"pos_encoding_mode": "ALIBI"},
        {"pos_encoding_mode": "ROPE_LLAMA"},
        {"head_dim": 512},
        {"custom_mask": True},
        {"kv_data_type": torch.float8_e4m3fn},
    ],
    ids=lambda options: "-".join(map(str, *options.items())),
)
def test_where_a_gpu_has_no_kernel(target, options):
    options = dict(options)
    head_dim = options.pop("head_dim", 128)
    if "custom_mask" in options:
        bits = sum(n * m for n, m in zip(lengths("paged"), KV_LENS, strict=True))
        options = {"custom_mask": torch.ones(bits, dtype=torch.bool, device=target.device)}
    batch = made("paged", target, head_dim=head_dim, **options)
    before = batch.run()
    if target.backend == "cpu":
        assert near(batch.run(1e-9), before)
        return
    with pytest.raises(NotImplementedError, match="sparsity skipping"):
        batch.run(1.0)
    assert batch.plans == 0
    assert torch.equal(batch.run(), before)


# --- recorded by torch -------------------------------------------------------


@pytest.mark.parametrize("how", ["compile", "make_fx"])
def test_recorded_runs(target, how):
    batch = made("ragged", target)
    batch.spoil()
    tensors = (batch.q, batch.k, batch.v)

    def skipped(q, k, v):
        return batch.wrapper.run(q * 1, k, v, return_lse=True, **{FACTOR: 1.0})

    def dense(q, k, v):
        return batch.wrapper.run(q * 1, k, v, return_lse=True, **{FACTOR: 0.0})

    for function in (skipped, dense):
        if how == "compile":
            recorded = torch.compile(function, fullgraph=True, backend="aot_eager")
        else:
            recorded = make_fx(function)(*tensors)
        for got, expected in zip(recorded(*tensors), function(*tensors), strict=True):
            assert torch.equal(got.nan_to_num(7.0), expected.nan_to_num(7.0))
        assert bool(recorded(*tensors)[0].isnan().any()) is (function is dense)


def test_a_factor_that_changes_in_a_compiled_function(target):
    torch._dynamo.reset()  # torch compiles a function a limited number of times, for all targets
    batch = made("ragged", target)
    batch.spoil()

    def attend_to(q, k, v, factor):
        return batch.wrapper.run(q * 1, k, v, **{FACTOR: factor})

    compiled = torch.compile(attend_to, fullgraph=True, backend="aot_eager")
    for factor in (1.0, 1e-12, 0.5, 0.25, 1e-15, None, 0.0):
        got = compiled(batch.q, batch.k, batch.v, factor)
        assert bool(got.isnan().any()) is (not factor or factor < 1e-9), factor


# --- CUDA graphs -------------------------------------------------------------

LIKE = Case("graph", (), (), 4, 2, 64, page_size=16, mask=MaskKind.CAUSAL)
BATCHES = (((30, 5, 0), (100, 90, 7)), ((3, 0, 9), (300, 0, 64)), ((1, 33, 1), (300, 150, 1)))


@pytest.mark.parametrize(
    "like", [LIKE, dataclasses.replace(LIKE, page_size=0)], ids=["paged", "ragged"]
)
@pytest.mark.parametrize("before", [True, False], ids=["planned before", "planned in the capture"])
def test_a_captured_run_keeps_its_factor(target, recorder, like, before):  # noqa: F811
    """It follows every plan(), as each captured run does; so does one without a factor."""
    stage = Stage(like, Limits(batch=3, rows=40, pages=60 if like.paged else 0, tokens=600), target)
    stage.plan(stage.make(*BATCHES[0]))
    factors = ({FACTOR: 1e9}, {FACTOR: 1e-9}, {})  # by the first all that may be left out is
    if before:
        for options in factors:
            stage.run(**options)
    graphs = [capture(recorder, target.device, lambda o=o: stage.run(**o)) for o in factors]
    for lengths_of in BATCHES[1:]:
        inputs = stage.make(*lengths_of)
        stage.plan(inputs)
        for graph, options in zip(graphs, factors, strict=True):
            stage.out.fill_(math.nan)
            graph.replay()
            replayed = stage.out.clone()
            if options.get(FACTOR) != 1e9:
                stage.check(inputs)
            stage.run(**options)
            assert torch.equal(replayed.nan_to_num(7.0), stage.out.nan_to_num(7.0))
