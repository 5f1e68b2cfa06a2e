"""run(skip_softmax_threshold_scale_factor=) leaves out tiles, of which plan() knows nothing."""

import copy
import dataclasses
import math

import numpy as np
import preflash
import pytest
import torch
from fuzz.pod_trial import plan_decode
from graph_stage import Limits, Stage, capture
from planned_cases import tensors
from preflash.testing import Case, Inputs, MaskKind, build, compare, reference, runner
from preflash.testing.inputs import indptr
from refusals import refused

FACTOR = "skip_softmax_threshold_scale_factor"
HEADS, PAGE = 4, 64
PAGED = Case("paged", (200, 70), (2048, 1792), HEADS, 2, 128, page_size=PAGE, sm_scale=1.0,
             dtype=torch.float16, mask=MaskKind.CAUSAL)  # fmt: skip
CASES = {
    "paged": PAGED,
    "ragged": dataclasses.replace(PAGED, page_size=0),
    "decode": dataclasses.replace(PAGED, qo_lens=(1, 1), mask=MaskKind.NONE),
}


def set_keys(inputs, memory, value: float, begin=0, end=None, columns=slice(None)) -> None:
    """Sets columns of the keys [begin, end) of each request, of whole pages."""
    for i, kv_len in enumerate(inputs.case.kv_lens):
        stop = end or kv_len
        if inputs.case.paged:
            pages = torch.tensor(inputs.page_table[i][begin // PAGE : stop // PAGE])
            memory[pages.to(memory.device), ..., columns] = value
        else:
            first = sum(inputs.case.kv_lens[:i])
            memory[first + begin : first + stop, :, columns] = value


@dataclasses.dataclass
class Decaying:
    """Two requests whose middle keys have logits 20 below those at both ends: in whichever order
    tiles are computed, the first ones are not of the middle."""

    wrapper: object
    inputs: Inputs

    def run(self, factor="absent", **options):
        if factor != "absent":
            options[FACTOR] = factor
        return self.wrapper.run(*tensors(self.inputs), **options)

    def spoil(self) -> None:
        """Puts NaN into the values of the middle, which no run that leaves it out may show."""
        # Away from where logits change, for tiles of any size.
        set_keys(self.inputs, self.inputs.v, math.nan, 512, 1280)

    def expected(self, **options):
        pipeline = dataclasses.replace(self.inputs.pipeline, **options)
        return reference(self.inputs, pipeline=pipeline)


def plan(wrapper, inputs, **options) -> None:
    """Plans keys that are not split: each chunk would have first tiles and maxima of its own."""
    options = {"disable_split_kv": True, **options}
    if isinstance(wrapper, preflash.BatchDecodeWithPagedKVCacheWrapper):
        plan_decode(wrapper, inputs, sm_scale=1.0, **options)
    else:
        runner.plan(wrapper, inputs, **options)


def made(kind, target, wrapper=None, plan_options=None, **changes):
    """Returns Decaying of a planned wrapper, by default a new one; changes: of the case."""
    inputs = build(dataclasses.replace(CASES[kind], **changes), device=target.device)
    for t in (inputs.q, inputs.k):
        t.copy_(t.float() * 0.1)
    inputs.q[..., 0] = 4.0
    set_keys(inputs, inputs.k, 0.0, columns=0)
    set_keys(inputs, inputs.k, -5.0, 256, 1536, columns=0)
    buffer, on = runner.workspace(target.device), {"backend": target.backend}
    if wrapper is None and kind == "decode":
        wrapper = preflash.BatchDecodeWithPagedKVCacheWrapper(buffer, **on)
    wrapper = wrapper or runner.make_wrapper(inputs.case, buffer=buffer, **on)
    plan(wrapper, inputs, **(plan_options or {}))
    return Decaying(wrapper, inputs)


def near(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compares but for two roundings to float16, of P and of the output."""
    return bool((one.double() - other.double()).norm() <= 2.0**-9 * other.double().norm())


KINDS = pytest.mark.parametrize("kind", ["paged", "ragged", "decode"])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@KINDS
def test_tiles_without_weight_are_left_out(target, kind, dtype):
    """They are not even looked at: NaN among their values reaches nothing. All others count, in the
    LSE too. A run without a factor is as before, and another factor is no other plan."""
    batch = made(kind, target, dtype=dtype)
    kernel, before = batch.wrapper.variant, batch.run(return_lse=True)
    for factor in (None, 0, 0.0):
        assert all(map(torch.equal, batch.run(factor, return_lse=True), before)), factor
    expected = batch.expected()
    batch.spoil()
    skipped = batch.run(1.0, return_lse=True)
    compare(*skipped, expected).check()
    # A factor that float32 does not hold leaves out nothing either.
    for factor in ("absent", None, 0, 0.0, 1e-12, 1e-30, 1e-50, np.float32(1e-12)):
        assert batch.run(factor).isnan().all(), factor
    assert torch.equal(batch.run(1), skipped[0])
    assert batch.wrapper.variant == kernel


def called(inputs, target, factor, dtype=torch.float16):
    """Calls trtllm_fmha_v2_prefill without room for a split, with operands of the dtype."""
    case, requests = inputs.case, [inputs.request(i) for i in range(2)]
    k, v = (torch.cat([getattr(one, name) for one in requests]) for name in "kv")
    return preflash.trtllm_fmha_v2_prefill(
        tuple(t.to(dtype) for t in (inputs.q, k, v)), "SEPARATE_Q_K_V",
        runner.workspace(target.device, 0), seq_lens=torch.tensor(case.kv_lens).int(),
        max_q_len=max(case.qo_lens), max_kv_len=max(case.kv_lens), bmm1_scale=1.0, bmm2_scale=1.0,
        batch_size=2, cum_seq_lens_q=indptr(case.qo_lens), cum_seq_lens_kv=indptr(case.kv_lens),
        mask_mode="causal" if case.mask is MaskKind.CAUSAL else "padding", backend=target.backend,
        out_dtype=torch.float16, **{FACTOR: factor},
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@KINDS
def test_as_in_the_function(target, kind, head_dim, dtype):
    """trtllm_fmha_v2_prefill leaves out the same keys, also where that changes much."""
    batch = made(kind, target, head_dim=head_dim)
    cpu = target.backend == "cpu"
    for t in (batch.inputs.q, batch.inputs.k, batch.inputs.v):
        t.copy_(t.to(dtype))
    for factor in (1e-12, 1.0, 1800.0, 1e9):
        out, function = batch.run(factor), called(batch.inputs, target, factor, dtype)
        # Without a split, as the batch is, a decode step has the bits of a prefill's row.
        same = torch.equal if cpu and kind != "decode" and dtype == torch.float16 else near
        if cpu or factor <= 1.0:
            assert same(out, function), factor
    assert cpu is False or not torch.equal(out, batch.run())
    batch.spoil()
    assert called(batch.inputs, target, 1.0, dtype).isfinite().all()
    assert called(batch.inputs, target, 1e-12, dtype).isnan().all()


def test_tiles_that_are_kept(target):
    """One row in which a tile has weight keeps it for all, and so does a key that raises the
    maximum, although the factor allows tiles of any weight to be skipped."""
    for name, rows, value, factor in (
        ("q", 70, -4.0, 1.0),  # for query 70 the middle has all of the weight
        ("k", [1000, 2048 + 1000], 10.0, 1e30),  # key 1000 of each request has all of the weight
    ):
        batch = made("ragged", target)
        getattr(batch.inputs, name)[rows, :, 0] = value
        expected = batch.expected()
        compare(*batch.run(factor, return_lse=True), expected).check()
        compare(called(batch.inputs, target, factor), None, expected).check()


def test_with_other_options_of_a_run(target):
    batch = made("paged", target)
    sinks = target.to(torch.tensor([0.5, -1.0, 90.0, 0.0]))
    given = {"window_left": 1900, "sinks": sinks, "q_scale": 0.5, "k_scale": 2.0, "v_scale": 3.0}
    expected = batch.expected(window_left=1900, sinks=sinks, out_scale=3.0)
    batch.spoil()
    out, lse = batch.run(1.0, return_lse=True, lse_base="ln", lse_layout="HN", **given)
    compare(out, lse.T.contiguous() / math.log(2), expected).check()
    for options in (given, {"window_left": 1900}, {"sinks": sinks}):
        assert batch.run(1.0, **options).isfinite().all()
        assert batch.run(1e-12, **options).isnan().any()
        assert batch.run(**options).isnan().any()


def test_q_len_per_req(target):
    """run() may plan twice for one call."""
    batch = made("decode", target)
    step = batch.inputs
    case = dataclasses.replace(step.case, qo_lens=(3, 3), mask=MaskKind.CAUSAL)
    batch.inputs = dataclasses.replace(step, case=case, q=step.q.repeat_interleave(3, dim=0))
    expected = batch.expected()
    batch.spoil()
    for _ in range(2):
        compare(*batch.run(1.0, return_lse=True, q_len_per_req=3), expected).check()
    batch.inputs = step
    assert batch.run().isnan().all()
    assert batch.run(1.0).isfinite().all()


SINK = ("uri", *[torch.float16] * 3, torch.int32, 128, 128, ["sink"], ["float"], ["sm_scale"],
        ["double"], "AttentionSink", "")  # fmt: skip
TYPES = {"q_data_type": torch.float16, "kv_data_type": torch.float16}


@pytest.mark.parametrize(
    ("kind", "options"),
    [("BatchAttentionWithAttentionSinkWrapper", TYPES),
     ("BatchPrefillWithPagedKVCacheWrapper", {"jit_args": SINK})],
)  # fmt: skip
def test_wrappers_of_sinks(target, kind, options):
    work = runner.workspace(target.device)
    wrapper = getattr(preflash, kind)(work, backend=target.backend, **options)
    batch = made("paged", target, wrapper)
    run = (*tensors(batch.inputs), target.to(torch.zeros(HEADS)), 1.0)
    batch.spoil()
    assert wrapper.run(*run, **{FACTOR: 1.0}).isfinite().all()
    assert wrapper.run(*run).isnan().all()


def test_new_plans_copies_and_forward(target):
    batch = made("paged", target)
    batch.spoil()
    skipped, given = batch.run(1.0), tensors(batch.inputs)
    other = copy.copy(batch.wrapper)
    assert torch.equal(other.run(*given, **{FACTOR: 1.0}), skipped)
    plan(batch.wrapper, batch.inputs)
    assert batch.wrapper.forward(*given, causal=True, sm_scale=1.0).isnan().all()
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
        refused(rf"{FACTOR}.*{says}", batch.run, factor, error=error)
    assert torch.equal(batch.run(), before)


# Options of plan(), and changes of the case.
OTHER_KERNELS = {
    "soft cap": ({"logits_soft_cap": 50.0}, {}),
    "alibi": ({"pos_encoding_mode": "ALIBI"}, {}),
    "rope": ({"pos_encoding_mode": "ROPE_LLAMA"}, {}),
    "head_dim 512": ({}, {"head_dim": 512}),
    "mask": ({}, {"mask": MaskKind.CUSTOM}),
    "8-bit keys": ({}, {"kv_dtype": torch.float8_e4m3fn}),
}


@pytest.mark.parametrize(("options", "changes"), OTHER_KERNELS.values(), ids=OTHER_KERNELS)
def test_where_a_gpu_has_no_kernel(target, options, changes):
    batch = made("paged", target, None, options, **changes)
    before = batch.run()
    if target.backend == "cpu":
        assert near(batch.run(1e-9), before)
        if "pos_encoding_mode" not in options:  # which may give weight to keys of the middle
            batch.spoil()
            assert batch.run(1.0).isfinite().all()
        return
    refused("sparsity skipping", batch.run, 1.0, error=NotImplementedError)
    assert torch.equal(batch.run(), before)


def test_a_factor_that_changes_in_a_compiled_function(target):
    torch._dynamo.reset()  # torch compiles a function a limited number of times, for all targets
    batch = made("ragged", target)
    batch.spoil()

    def attend_to(q, k, v, factor):
        return batch.wrapper.run(q * 1, k, v, **{FACTOR: factor})

    compiled = torch.compile(attend_to, fullgraph=True, backend="aot_eager")
    for factor in (1.0, 1e-12, 0.25, None, 0.0):
        given = (*tensors(batch.inputs), factor)
        got, expected = (call(*given) for call in (compiled, attend_to))
        assert bool(got.isnan().any()) is (not factor or factor < 1e-9), factor
        assert torch.equal(got.nan_to_num(7.0), expected.nan_to_num(7.0))


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
