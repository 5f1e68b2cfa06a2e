"""run(skip_softmax_threshold_scale_factor=) leaves out tiles, of which plan() knows nothing."""

import copy
import dataclasses
import math

import numpy as np
import preflash
import pytest
import torch
from graph_stage import Limits, Stage, capture
from interpreter_steps import interpreter_steps
from preflash.testing import Case, MaskKind, compare, runner
from preflash.testing.oracle import Pipeline, attend, concatenate
from torch.fx.experimental.proxy_tensor import make_fx

FACTOR = "skip_softmax_threshold_scale_factor"
HEADS, KV_HEADS, PAGE = 4, 2, 64
KV_LENS = (2048, 1792)
# Keys of each request, away from where logits change, for tiles of any size.
MIDDLE = slice(512, 1280)


@dataclasses.dataclass
class Decaying:
    """Two requests whose middle keys have logits 20 below those at both ends: in whichever order
    tiles are computed, the first ones are not of the middle."""

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
        """Puts NaN into the values of the middle, which no run that leaves it out may show."""
        for begin in (0, KV_LENS[0]):
            self.v[begin + MIDDLE.start : begin + MIDDLE.stop] = math.nan

    def check(self, factor, expected=None, **options) -> None:
        """Compares a run with a factor, and its LSE, with the oracle."""
        out, lse = self.run(factor, return_lse=True, **options)
        compare(out.cpu(), lse.cpu(), expected or self.expected()).check()

    def expected(self, **options):
        pipeline = Pipeline(sm_scale=1.0, **{"causal": self.causal, **options})
        parts, row, key = [], 0, 0
        for qo_len, kv_len in zip(self.qo_lens, KV_LENS, strict=True):
            rows, keys = slice(row, row + qo_len), slice(key, key + kv_len)
            tensors = (self.q[rows], self.k[keys], self.v[keys])
            parts.append(attend(*(t.cpu() for t in tensors), pipeline))
            row, key = row + qo_len, key + kv_len
        return concatenate(parts)


def lengths(kind):
    return (1, 1) if kind == "decode" else (200, 70)


def made(kind, target, dtype=torch.float16, head_dim=128, wrapper=None, **options) -> Decaying:
    """Plans a wrapper, by default a new one of a kind; options: of plan()."""
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
    name = {"ragged": "PrefillWithRagged", "decode": "DecodeWithPaged"}.get(
        kind, "PrefillWithPaged"
    )
    if wrapper is None:
        make = getattr(preflash, f"Batch{name}KVCacheWrapper")
        wrapper = make(runner.workspace(target.device), backend=target.backend)
    if kind == "ragged":
        kv_indptr = torch.tensor([0, KV_LENS[0], tokens], dtype=torch.int32)
        wrapper.plan(qo_indptr, kv_indptr, causal=True, **given)
    elif kind == "decode":
        wrapper.plan(pages, indices, last, page_size=PAGE, **given)
    else:
        wrapper.plan(qo_indptr, pages, indices, last, page_size=PAGE, causal=True, **given)
    q, k, v = map(target.to, (q, *(x.to(options.get("kv_data_type", dtype)) for x in (k, v))))
    return Decaying(wrapper, q, k, v, qo_lens, kind != "ragged", kind != "decode")


def near(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compares but for two roundings to float16, of P and of the output."""
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
    batch.check(1.0, expected)
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
def test_another_factor_is_no_other_plan(target, kind):
    batch = made(kind, target)
    batch.spoil()
    kernel = batch.wrapper.variant
    first = interpreter_steps(lambda: batch.run(0.25))
    skipped = batch.run(1.0)
    assert interpreter_steps(lambda: batch.run(0.75)) < first / 4
    # A factor that float32 does not hold leaves out nothing either.
    for factor in (1e-12, 1e-30, 1e-50, np.float32(1e-12)):
        assert batch.run(factor).isnan().all()
    for factor in (1.0, 1):
        assert torch.equal(batch.run(factor), skipped)
    assert batch.wrapper.variant == kernel


def test_with_other_options_of_a_run(target):
    batch = made("paged", target)
    sinks = target.to(torch.tensor([0.5, -1.0, 90.0, 0.0]))
    given = {"window_left": 1900, "sinks": sinks, "q_scale": 0.5, "k_scale": 2.0, "v_scale": 3.0}
    expected = batch.expected(window_left=1900, sinks=sinks.cpu(), out_scale=3.0)
    batch.spoil()
    out, lse = batch.run(1.0, return_lse=True, lse_base="ln", lse_layout="HN", **given)
    compare(out.cpu(), lse.T.contiguous().cpu() / math.log(2), expected).check()
    assert batch.run(1e-12, **given).isnan().any()
    assert batch.run(1.0, sinks=sinks).isfinite().all()
    assert batch.run(sinks=sinks).isnan().any()


def test_q_len_per_req(target):
    """run() may plan twice for one call."""
    batch = made("decode", target)
    batch.q = batch.q.repeat_interleave(3, dim=0)
    batch.qo_lens, batch.causal = (3, 3), True
    expected = batch.expected()
    batch.spoil()
    for _ in range(2):
        batch.check(1.0, expected, q_len_per_req=3)
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
    made("paged", target, wrapper=batch.wrapper)  # plans again
    assert batch.wrapper.forward(batch.q, *batch.keys, causal=True, sm_scale=1.0).isnan().all()
    assert torch.equal(batch.run(1.0), skipped)
    assert batch.run().isnan().all()


WRONG = [
    (-1.0, ValueError, "must be positive"), (-1e-30, ValueError, "must be positive"),
    (math.nan, ValueError, "finite"), (math.inf, ValueError, "finite"),
    (1e39, ValueError, "finite"), (True, TypeError, "float"), ("1", TypeError, "float"),
    (torch.tensor(1.0), TypeError, "float"), ([1.0], TypeError, "float"),
]  # fmt: skip


@KINDS
def test_wrong_factors(target, kind):
    batch = made(kind, target)
    before = batch.run()
    for factor, error, says in WRONG:
        with pytest.raises(error, match=rf"{FACTOR}.*{says}"):
            batch.run(factor)
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
    assert torch.equal(batch.run(), before)


# --- recorded by torch -------------------------------------------------------


@pytest.mark.parametrize("factor", [1.0, 0.0])
def test_traced_runs(target, factor):
    batch = made("ragged", target)
    batch.spoil()
    tensors = (batch.q, batch.k, batch.v)

    def attend_to(q, k, v):
        return batch.wrapper.run(q * 1, k, v, return_lse=True, **{FACTOR: factor})

    traced = make_fx(attend_to)(*tensors)(*tensors)
    for got, expected in zip(traced, attend_to(*tensors), strict=True):
        assert torch.equal(got.nan_to_num(7.0), expected.nan_to_num(7.0))
    assert bool(traced[0].isnan().any()) is (factor == 0.0)


def test_a_factor_that_changes_in_a_compiled_function(target):
    torch._dynamo.reset()  # torch compiles a function a limited number of times, for all targets
    batch = made("ragged", target)
    batch.spoil()

    def attend_to(q, k, v, factor):
        return batch.wrapper.run(q * 1, k, v, **{FACTOR: factor})

    compiled = torch.compile(attend_to, fullgraph=True, backend="aot_eager")
    for factor in (1.0, 1e-12, 0.5, 0.25, 1e-15, None, 0.0):
        got, expected = (call(batch.q, batch.k, batch.v, factor) for call in (compiled, attend_to))
        assert bool(got.isnan().any()) is (not factor or factor < 1e-9), factor
        assert torch.equal(got.nan_to_num(7.0), expected.nan_to_num(7.0))


# --- CUDA graphs -------------------------------------------------------------

LIKE = Case("graph", (), (), 4, 2, 64, page_size=16, mask=MaskKind.CAUSAL)
BATCHES = (((30, 5, 0), (100, 90, 7)), ((3, 0, 9), (300, 0, 64)), ((1, 33, 1), (300, 150, 1)))


@pytest.mark.parametrize(
    "like", [LIKE, dataclasses.replace(LIKE, page_size=0)], ids=["paged", "ragged"]
)
@pytest.mark.parametrize("before", [True, False], ids=["planned before", "planned in the capture"])
def test_a_captured_run_keeps_its_factor(target, recorder, like, before):
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
