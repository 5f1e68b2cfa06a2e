"""Wrapper behaviour besides numbers: aliases, LSE forms, buffers, re-selection, state."""

import dataclasses
import math

import preflash
import pytest
import torch
from planned_cases import planned as planned_case
from preflash import _core
from preflash.testing import Case, KvForm, MaskKind, build, compare, poison, reference, runner
from preflash.testing.oracle import Pipeline

RAGGED = Case("ragged", (33, 5, 0, 70), (40, 90, 7, 70), 4, 2, 64, mask=MaskKind.CAUSAL)
PAGED = Case("paged", (33, 5, 0, 70), (40, 90, 7, 70), 4, 2, 64, page_size=16, mask=MaskKind.CAUSAL)
SPLIT_KV = dataclasses.replace(PAGED, name="split_kv", fixed_split_size=64)
LN2 = math.log(2.0)


@pytest.fixture(params=[RAGGED, PAGED, SPLIT_KV], ids=lambda case: case.name)
def planned(request, target):
    """(inputs, wrapper) with plan done."""
    return planned_case(request.param, target)


def tensors(inputs):
    return (inputs.q, inputs.cache) if inputs.case.paged else (inputs.q, inputs.k, inputs.v)


# --- forms of the result -----------------------------------------------------


def test_run_returns_out_alone_by_default(planned):
    inputs, wrapper = planned
    out = wrapper.run(*tensors(inputs))
    assert isinstance(out, torch.Tensor)
    assert out.dtype == inputs.q.dtype
    assert out.device == inputs.q.device
    runner.compare(inputs, out, None).check()


def test_run_return_lse_equals_run_with_return_lse(planned):
    inputs, wrapper = planned
    out, lse = wrapper.run(*tensors(inputs), return_lse=True)
    out2, lse2 = wrapper.run_return_lse(*tensors(inputs))
    assert lse.dtype == torch.float32
    assert lse.shape == (inputs.q.shape[0], inputs.case.num_qo_heads)
    assert torch.equal(out, out2)
    assert torch.equal(lse, lse2)
    runner.compare(inputs, out, lse).check()


def test_lse_is_base_2_unless_ln_is_asked_for(planned):
    inputs, wrapper = planned
    _, log2 = wrapper.run(*tensors(inputs), return_lse=True)
    _, same = wrapper.run(*tensors(inputs), return_lse=True, lse_base="log2")
    out, ln = wrapper.run(*tensors(inputs), return_lse=True, lse_base="ln")
    assert torch.equal(log2, same)
    finite = log2.isfinite()
    torch.testing.assert_close(ln[finite], log2[finite] * LN2, rtol=1e-6, atol=1e-6)
    runner.compare(inputs, out, ln, lse_base="ln").check()


def test_lse_layout_hn_is_the_transpose(planned):
    inputs, wrapper = planned
    _, nh = wrapper.run(*tensors(inputs), return_lse=True, lse_layout="NH")
    _, hn = wrapper.run(*tensors(inputs), return_lse=True, lse_layout="HN")
    assert hn.shape == (inputs.case.num_qo_heads, inputs.q.shape[0])
    assert torch.equal(hn.t(), nh)


def test_lse_layout_and_base_together_into_a_buffer(planned):
    inputs, wrapper = planned
    buffer = poison((inputs.case.num_qo_heads, inputs.q.shape[0]), torch.float32, inputs.q.device)
    out, lse = wrapper.run(
        *tensors(inputs), return_lse=True, lse_layout="HN", lse_base="ln", lse=buffer
    )
    assert lse.data_ptr() == buffer.data_ptr()
    runner.compare(inputs, out, buffer.t(), lse_base="ln").check()


def test_out_and_lse_buffers_are_used(planned):
    inputs, wrapper = planned
    out = poison(inputs.q.shape, inputs.q.dtype, inputs.q.device)
    lse = poison(inputs.q.shape[:2], torch.float32, inputs.q.device)
    got_out, got_lse = wrapper.run(*tensors(inputs), out=out, lse=lse, return_lse=True)
    assert got_out.data_ptr() == out.data_ptr()
    assert got_lse.data_ptr() == lse.data_ptr()
    runner.compare(inputs, out, lse).check()


def test_out_without_lse(planned):
    inputs, wrapper = planned
    out = poison(inputs.q.shape, inputs.q.dtype, inputs.q.device)
    got = wrapper.run(*tensors(inputs), out=out)
    assert got.data_ptr() == out.data_ptr()
    runner.compare(inputs, out, None).check()


def test_out_may_be_a_strided_view(planned):
    """vLLM slices its output out of a larger buffer; rows and heads may be strided."""
    inputs, wrapper = planned
    tokens, heads, dim = inputs.q.shape
    wide = poison((tokens + 2, heads, dim + 8), inputs.q.dtype, inputs.q.device)
    view = wide[1:-1, :, :dim]
    wrapper.run(*tensors(inputs), out=view)
    runner.compare(inputs, view, None).check()
    assert bool(wide[0].isnan().all() and wide[-1].isnan().all() and wide[..., dim:].isnan().all())


# --- scales ------------------------------------------------------------------


def test_k_and_q_scale_multiply_the_logits_and_v_scale_the_output(planned):
    inputs, wrapper = planned
    out, lse = wrapper.run(
        *tensors(inputs), q_scale=0.5, k_scale=3.0, v_scale=0.25, return_lse=True
    )
    pipeline = Pipeline(inputs.case.scale * 1.5, causal=True, out_scale=0.25)
    compare(out, lse, reference(inputs, pipeline=pipeline)).check()


def test_scales_may_be_one_element_tensors(planned):
    inputs, wrapper = planned
    device = inputs.q.device
    out, lse = wrapper.run(
        *tensors(inputs),
        k_scale=torch.tensor(2.0, device=device),
        v_scale=torch.tensor([0.5], device=device),
        return_lse=True,
    )
    pipeline = Pipeline(inputs.case.scale * 2.0, causal=True, out_scale=0.5)
    compare(out, lse, reference(inputs, pipeline=pipeline)).check()


def test_paged_scales_are_positional(target):
    inputs = build(PAGED, device=target.device)
    wrapper = runner.make_wrapper(PAGED, backend=target.backend, device=target.device)
    runner.plan(wrapper, inputs)
    out, lse = wrapper.run(inputs.q, inputs.cache, 2.0, 0.5, True)
    pipeline = Pipeline(PAGED.scale * 2.0, causal=True, out_scale=0.5)
    compare(out, lse, reference(inputs, pipeline=pipeline)).check()


def test_ragged_return_lse_is_positional(target):
    inputs = build(RAGGED, device=target.device)
    wrapper = runner.make_wrapper(RAGGED, backend=target.backend, device=target.device)
    runner.plan(wrapper, inputs)
    out, lse = wrapper.run(inputs.q, inputs.k, inputs.v, True)
    runner.compare(inputs, out, lse).check()


def test_scale_of_one_run_does_not_stay(planned):
    inputs, wrapper = planned
    wrapper.run(*tensors(inputs), k_scale=5.0, v_scale=5.0)
    runner.compare(inputs, *wrapper.run(*tensors(inputs), return_lse=True)).check()


# --- run-time options re-select, they are never dropped ----------------------

FORWARD_OPTIONS = {
    "causal": {"causal": True},
    "full": {"causal": False},
    "window": {"causal": True, "window_left": 9},
    "window_full": {"causal": False, "window_left": 9},
    "cap": {"causal": True, "logits_soft_cap": 1.0},
    "scale": {"causal": True, "sm_scale": 0.5},
    "all": {"causal": False, "window_left": 20, "logits_soft_cap": 2.0, "sm_scale": 0.3},
}


def forward_pipeline(case: Case, options: dict) -> Pipeline:
    return Pipeline(
        options.get("sm_scale", case.scale),
        options["causal"],
        options.get("window_left", -1),
        options.get("logits_soft_cap", 0.0),
    )


@pytest.mark.parametrize("options", FORWARD_OPTIONS.values(), ids=FORWARD_OPTIONS)
@pytest.mark.parametrize("case", [RAGGED, PAGED], ids=["ragged", "paged"])
def test_forward_selects_again(target, case, options):
    """begin_forward knows neither mask nor cap; forward brings them (SGLang's calling order)."""
    inputs = build(case, device=target.device)
    wrapper = runner.make_wrapper(case, backend=target.backend, device=target.device)
    positional, _ = runner.plan_arguments(inputs)
    wrapper.begin_forward(*positional, q_data_type=case.dtype)
    expected = reference(inputs, pipeline=forward_pipeline(case, options))
    cap = options.get("logits_soft_cap", 0.0)

    out = wrapper.forward(*tensors(inputs), **options)
    compare(out, None, expected, soft_cap=cap).check()
    out, lse = wrapper.forward_return_lse(*tensors(inputs), **options)
    compare(out, lse, expected, soft_cap=cap).check()
    assert wrapper.end_forward() is None


def test_forward_with_scales(target):
    inputs = build(PAGED, device=target.device)
    wrapper = runner.make_wrapper(PAGED, backend=target.backend, device=target.device)
    positional, _ = runner.plan_arguments(inputs)
    wrapper.begin_forward(*positional, q_data_type=PAGED.dtype)
    out = wrapper.forward(inputs.q, inputs.cache, causal=True, k_scale=2.0, v_scale=0.5)
    pipeline = Pipeline(PAGED.scale * 2.0, causal=True, out_scale=0.5)
    compare(out, None, reference(inputs, pipeline=pipeline)).check()


def test_forward_alternates(planned):
    """Every call means what it says, whatever the one before asked for."""
    inputs, wrapper = planned
    for options in (*FORWARD_OPTIONS.values(), *reversed(FORWARD_OPTIONS.values())):
        out = wrapper.forward(*tensors(inputs), **options)
        expected = reference(inputs, pipeline=forward_pipeline(inputs.case, options))
        compare(out, None, expected, soft_cap=options.get("logits_soft_cap", 0.0)).check()


def test_window_left_on_run_is_honoured(planned):
    inputs, wrapper = planned
    out, lse = wrapper.run(*tensors(inputs), window_left=6, return_lse=True)
    expected = reference(inputs, pipeline=Pipeline(inputs.case.scale, causal=True, window_left=6))
    compare(out, lse, expected).check()
    runner.compare(inputs, *wrapper.run(*tensors(inputs), return_lse=True)).check()


def test_forward_keeps_a_custom_mask(target):
    """causal is only effective without a custom mask; forward's default must not undo the mask."""
    case = Case("mask", (20, 9), (50, 9), 4, 2, 64, mask=MaskKind.CUSTOM)
    inputs = build(case, device=target.device)
    wrapper = runner.make_wrapper(case, backend=target.backend, device=target.device)
    runner.plan(wrapper, inputs)
    for causal in (False, True):
        runner.compare(
            inputs, wrapper.forward(inputs.q, inputs.k, inputs.v, causal=causal), None
        ).check()


# --- aliases -----------------------------------------------------------------


def test_head_dim_qk_means_head_dim(target):
    inputs = build(PAGED, device=target.device)
    wrapper = runner.make_wrapper(PAGED, backend=target.backend, device=target.device)
    wrapper.plan(
        qo_indptr=inputs.qo_indptr,
        paged_kv_indptr=inputs.kv_indptr,
        paged_kv_indices=inputs.indices,
        paged_kv_last_page_len=inputs.last_page_len,
        num_qo_heads=4,
        num_kv_heads=2,
        head_dim_qk=64,
        head_dim_vo=64,
        page_size=16,
        causal=True,
        use_fp16_qk_reduction=True,
        q_data_type="bfloat16",
        o_data_type=torch.bfloat16,
    )
    runner.compare(inputs, *wrapper.run(inputs.q, inputs.cache, return_lse=True)).check()


def test_ragged_keywords(target):
    inputs = build(RAGGED, device=target.device)
    wrapper = preflash.BatchPrefillWithRaggedKVCacheWrapper(
        float_workspace_buffer=runner.workspace(target.device), kv_layout="NHD", backend="auto"
    )
    wrapper.plan(
        qo_indptr=inputs.qo_indptr,
        kv_indptr=inputs.kv_indptr,
        num_qo_heads=4,
        num_kv_heads=2,
        head_dim_qk=64,
        causal=True,
        q_data_type=torch.bfloat16,
    )
    runner.compare(
        inputs, *wrapper.run(q=inputs.q, k=inputs.k, v=inputs.v, return_lse=True)
    ).check()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_dtypes_by_name(target, dtype):
    case = RAGGED.with_dtype(dtype)
    inputs = build(case, device=target.device)
    wrapper = runner.make_wrapper(case, backend=target.backend, device=target.device)
    name = str(dtype).removeprefix("torch.")
    for kv_data_type in (None, name, dtype):
        runner.plan(wrapper, inputs, q_data_type=name, kv_data_type=kv_data_type)
        runner.compare(inputs, *runner.run(wrapper, inputs)).check()


def test_both_head_dim_spellings_at_once(target):
    inputs = build(RAGGED, device=target.device)
    wrapper = runner.make_wrapper(RAGGED, backend=target.backend, device=target.device)
    with pytest.raises((TypeError, ValueError), match="head_dim"):
        runner.plan(wrapper, inputs, head_dim_qk=128)


# --- state that serving engines read -----------------------------------------


def test_attributes(target):
    case = Case("attributes", (9,), (30,), 4, 2, 64, window_left=12, soft_cap=7.0, sm_scale=0.25)
    inputs = build(case, device=target.device)
    wrapper = runner.make_wrapper(case, backend=target.backend, device=target.device)
    runner.plan(wrapper, inputs, causal=True)
    assert wrapper._window_left == 12
    assert wrapper._logits_soft_cap == 7.0
    assert wrapper._sm_scale == 0.25
    assert wrapper._causal is True
    assert wrapper._backend == target.backend
    assert wrapper.is_cuda_graph_enabled is False

    runner.plan(wrapper, inputs, causal=False, window_left=-1, logits_soft_cap=None, sm_scale=None)
    assert wrapper._window_left == -1
    assert wrapper._logits_soft_cap == 0.0
    assert isinstance(wrapper._logits_soft_cap, float)
    assert wrapper._causal is False


def test_the_soft_cap_is_told_as_it_was_given(target):
    """Engines compare it with theirs, a double; the kernels have it in float32."""
    inputs = build(RAGGED, device=target.device)
    wrapper = runner.make_wrapper(RAGGED, backend=target.backend, device=target.device)
    runner.plan(wrapper, inputs, logits_soft_cap=0.3)
    assert wrapper._logits_soft_cap == 0.3


@pytest.mark.parametrize("case", [RAGGED, PAGED], ids=lambda case: case.name)
def test_other_options_of_a_call_are_a_plan_of_their_own(case):
    inputs = build(case)
    wrapper = runner.make_wrapper(case, backend="cpu")
    runner.plan(wrapper, inputs)
    calls = ({}, {"pos_encoding_mode": "ALIBI"})
    expected = []
    for options in calls:
        runner.plan(wrapper, inputs, causal=True, **options)
        expected.append(wrapper.run(*tensors(inputs)))
    runner.plan(wrapper, inputs, pos_encoding_mode="ALIBI", logits_soft_cap=20.0)
    for options, out in zip(calls, expected, strict=True):
        assert torch.equal(wrapper.forward(*tensors(inputs), causal=True, **options), out)
    others = wrapper._plan.others
    assert [options.position.name for options in others] == ["none", "alibi"]


@pytest.mark.parametrize("case", [RAGGED, PAGED], ids=lambda case: case.name)
def test_windows_of_run(case, target):
    """Later runs with a window find its variant at once: that of the current plan, though more
    windows have come since than variants are kept."""
    wrapper, twin = (
        runner.make_wrapper(case, backend=target.backend, device=target.device) for _ in range(2)
    )
    windows = [*range(12), -1, 3, 1_000_000]
    for seed in range(2):
        inputs = build(case, seed=seed, device=target.device)
        runner.plan(wrapper, inputs)
        first = {window: wrapper.run(*tensors(inputs), window_left=window) for window in windows}
        for window, out in first.items():
            runner.plan(twin, inputs, window_left=window)
            assert torch.equal(twin.run(*tensors(inputs)), out)
            assert torch.equal(wrapper.run(*tensors(inputs), window_left=window), out)
    assert len(wrapper._plan.others) <= 8
    for more in range(20):  # all of them are the window of all keys
        wrapper.run(*tensors(inputs), window_left=2**30 + more)
    assert len(wrapper._plan.windows) <= 8
    for wrong in (-2, True, 1.5, "3"):
        with pytest.raises((TypeError, ValueError), match="window_left"):
            wrapper.run(*tensors(inputs), window_left=wrong)


def test_auto_tells_what_it_chose(target):
    inputs = build(PAGED, device=target.device)
    wrapper = runner.make_wrapper(PAGED, backend="auto", device=target.device)
    runner.plan(wrapper, inputs)
    families = {"cpu": "cpu_", "fa2": "sm80_", "fa3": "sm90_"}
    assert wrapper.variant.startswith(families[wrapper._backend])
    # Which of the two it is on a Hopper GPU depends on what is compiled (tests/gpu).
    assert wrapper._backend in (("cpu",) if target.device == "cpu" else ("fa2", "fa3"))


def test_variant_names_what_runs(target):
    case = Case("variant", (70,), (70,), 2, 1, 96, dtype=torch.float16, soft_cap=3.0)
    inputs = build(case, device=target.device)
    wrapper = runner.make_wrapper(case, backend=target.backend, device=target.device)
    runner.plan(wrapper, inputs)
    # One CPU kernel serves every head size and option and has no short tile.
    prefixes = {"cpu": "cpu_f16_d512", "fa2": "sm80_f16_d128", "fa3": "sm90_f16_d128"}
    prefix = prefixes[target.backend]
    assert wrapper.variant == (prefix if target.backend == "cpu" else f"{prefix}_softcap")
    assert wrapper.variant in repr(wrapper)

    one = Case("variant", (1,), (70,), 2, 1, 192, 128, mask=MaskKind.PACKED)
    inputs = build(one, device=target.device)
    runner.plan(wrapper, inputs)
    # fa3 has no short tiles for custom masks (forward.toml): one row has a tall one. Those of fa2
    # have options at run time.
    names = {
        "cpu": "cpu_bf16_d512",
        "fa2": "sm80_bf16_d192x128_decode_softcap_alibi_custom",
        "fa3": "sm90_bf16_d192x128_custom",
    }
    assert wrapper.variant == names[target.backend]
    assert wrapper.variant in repr(wrapper)


def test_repr_before_plan(target):
    wrapper = runner.make_wrapper(PAGED, backend=target.backend, device=target.device)
    assert "BatchPrefillWithPagedKVCacheWrapper" in repr(wrapper)


# --- workspaces --------------------------------------------------------------

SPLIT = Case("split", (2, 70), (700, 300), 4, 2, 64, page_size=16, fixed_split_size=64)


def test_workspace_size_is_enough_and_needed(target):
    inputs = build(SPLIT, device=target.device)
    wrapper = runner.make_wrapper(SPLIT, backend=target.backend, device=target.device)
    positional, options = runner.plan_arguments(inputs)
    float_bytes, int_bytes = wrapper.workspace_size(*positional, **options)
    assert isinstance(float_bytes, int)
    assert isinstance(int_bytes, int)
    assert float_bytes > 2 * 4 * 64 * 4  # at least two partial rows per query head
    assert int_bytes > 0

    exact = runner.workspace(target.device, float_bytes)
    wrapper = runner.make_wrapper(SPLIT, backend=target.backend, device=target.device, buffer=exact)
    runner.plan(wrapper, inputs)
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()

    # float_workspace_buffer too small: refused with the number of bytes that would do.
    small = runner.workspace(target.device, float_bytes // 2)
    wrapper = runner.make_wrapper(SPLIT, backend=target.backend, device=target.device, buffer=small)
    with pytest.raises(ValueError, match=str(float_bytes)):
        runner.plan(wrapper, inputs)


@pytest.mark.parametrize("paged", [True, False], ids=["paged", "ragged"])
@pytest.mark.parametrize(("keys", "split", "megabytes"), [(16384, 2048, 34.1), (256, 64, 17.1)])
def test_workspace_of_decode_batches_under_a_fixed_split(target, paged, keys, split, megabytes):
    """Four live rows of a tile are four partial rows, so that both fit a usual 128 MB."""
    batch, heads = 256, (32, 8, 128)
    queries = torch.arange(batch + 1, dtype=torch.int32)
    buffer = torch.empty(128 << 20, dtype=torch.uint8, device=target.device)
    if paged:
        wrapper = preflash.BatchPrefillWithPagedKVCacheWrapper(buffer, backend=target.backend)
        pages = keys // 16
        table = torch.arange(batch * pages, dtype=torch.int32)
        full = torch.full((batch,), 16, dtype=torch.int32)
        arguments = (queries, queries * pages, table, full, *heads, 16)
    else:
        wrapper = preflash.BatchPrefillWithRaggedKVCacheWrapper(buffer, backend=target.backend)
        arguments = (queries, queries * keys, *heads)
    float_bytes, _ = wrapper.workspace_size(*arguments, fixed_split_size=split)
    wrapper.plan(*arguments, fixed_split_size=split)
    tile_n = next(k["tile"]["n"] for k in _core.kernels() if k["id"] == wrapper.variant)
    chunk = -(-split // tile_n) * tile_n
    assert float_bytes == batch * 32 * (keys // chunk) * (128 + 2) * 4
    assert float_bytes <= megabytes * 1e6 * 1.005


def test_small_workspace_plans_without_split(target):
    inputs = build(SPLIT, device=target.device)
    small = runner.workspace(target.device, 256)
    wrapper = runner.make_wrapper(SPLIT, backend=target.backend, device=target.device, buffer=small)
    runner.plan(wrapper, inputs, fixed_split_size=None)
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()


def test_split_writes_only_its_workspace(target):
    inputs = build(SPLIT, device=target.device)
    positional, options = runner.plan_arguments(inputs)
    wrapper = runner.make_wrapper(SPLIT, backend=target.backend, device=target.device)
    float_bytes, _ = wrapper.workspace_size(*positional, **options)
    whole = torch.full((float_bytes + 8192,), 0x5A, dtype=torch.uint8, device=target.device)
    inner = whole[4096 : 4096 + float_bytes]
    wrapper = runner.make_wrapper(SPLIT, backend=target.backend, device=target.device, buffer=inner)
    runner.plan(wrapper, inputs)
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()
    assert bool((whole[:4096] == 0x5A).all())
    assert bool((whole[4096 + float_bytes :] == 0x5A).all())


def test_reset_workspace_buffer(target):
    inputs = build(SPLIT, device=target.device)
    wrapper = runner.make_wrapper(SPLIT, backend=target.backend, device=target.device)
    runner.plan(wrapper, inputs)
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()
    old = runner.workspace(target.device)
    wrapper.reset_workspace_buffer(old, runner.workspace(target.device, 8 * 1024 * 1024))
    runner.plan(wrapper, inputs)
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()


def test_reset_to_a_small_workspace_is_noticed(target):
    inputs = build(SPLIT, device=target.device)
    wrapper = runner.make_wrapper(SPLIT, backend=target.backend, device=target.device)
    tiny = runner.workspace(target.device, 256)
    wrapper.reset_workspace_buffer(tiny, runner.workspace(target.device, 8 * 1024 * 1024))
    with pytest.raises(ValueError, match="float_workspace_buffer"):
        runner.plan(wrapper, inputs)


# --- life of a plan ----------------------------------------------------------


def test_plan_keeps_no_reference_to_its_arrays(planned):
    """The caller may overwrite indptr and indices after plan(); run must not read them again."""
    inputs, wrapper = planned
    expected = reference(inputs)
    for name in ("qo_indptr", "kv_indptr", "last_page_len"):
        if (array := getattr(inputs, name)) is not None:
            array.fill_(-1)
    runner.compare(inputs, *runner.run(wrapper, inputs), expected=expected).check()


def test_replan_with_other_lengths(target):
    wrapper = None
    for seed, (qo_lens, kv_lens) in enumerate(
        [((5, 80), (5, 300)), ((1,), (33,)), ((64, 64, 64, 1), (64, 70, 300, 2)), ((9,), (0,))]
    ):
        case = Case("replan", qo_lens, kv_lens, 4, 2, 64, page_size=8, mask=MaskKind.CAUSAL)
        wrapper = wrapper or runner.make_wrapper(case, backend=target.backend, device=target.device)
        inputs = build(case, device=target.device, seed=seed)
        runner.plan(wrapper, inputs)
        runner.compare(inputs, *runner.run(wrapper, inputs)).check()


def test_replan_with_other_heads_dims_and_dtypes(target):
    case = Case("first", (20, 3), (50, 60), 4, 2, 64, dtype=torch.float16)
    wrapper = runner.make_wrapper(case, backend=target.backend, device=target.device)
    for other in (
        case,
        Case("heads", (20, 3), (50, 60), 5, 1, 64, mask=MaskKind.CAUSAL),
        Case("dims", (20, 3), (50, 60), 4, 4, 192, 128, mask=MaskKind.CUSTOM),
        Case("again", (20, 3), (50, 60), 4, 2, 128, dtype=torch.float16, soft_cap=3.0),
    ):
        inputs = build(other, device=target.device)
        runner.plan(wrapper, inputs)
        runner.compare(inputs, *runner.run(wrapper, inputs)).check()


def test_many_layers_with_one_plan(planned):
    inputs, wrapper = planned
    for layer in range(3):
        # Other numbers at the same places; what is poisoned stays poisoned.
        inputs.q = torch.randn_like(inputs.q)
        inputs.k.mul_(-0.75)
        inputs.v.mul_(1.5 - layer)
        runner.compare(inputs, *runner.run(wrapper, inputs)).check()


def test_empty_batch(target):
    for case in (
        Case("empty", (), (), 4, 2, 64),
        Case("empty_paged", (), (), 4, 2, 64, page_size=16),
    ):
        device = target.device
        wrapper = runner.make_wrapper(case, backend=target.backend, device=device)
        zero = torch.zeros(1, dtype=torch.int32, device=device)
        none = torch.empty(0, dtype=torch.int32, device=device)
        q = torch.empty(0, 4, 64, dtype=torch.bfloat16, device=device)
        if case.paged:
            wrapper.plan(zero, zero, none, none, 4, 2, 64, 16, q_data_type=torch.bfloat16)
            pool = poison((3, 16, 2, 64), torch.bfloat16, device)
            out, lse = wrapper.run(q, (pool, pool), return_lse=True)
        else:
            wrapper.plan(zero, zero, 4, 2, 64, q_data_type=torch.bfloat16)
            kv = torch.empty(0, 2, 64, dtype=torch.bfloat16, device=device)
            out, lse = wrapper.run(q, kv, kv, return_lse=True)
        assert out.shape == (0, 4, 64)
        assert lse.shape == (0, 4)


def test_kv_forms_are_equal_bit_by_bit(target):
    """The same numbers through another storage give the same bits."""
    results = []
    for form in (KvForm.SEPARATE, KvForm.COMBINED, KvForm.HALVES, KvForm.PADDED, KvForm.TRANSPOSED):
        case = Case("forms", (9, 40), (70, 40), 4, 2, 64, page_size=4, form=form)
        base = Case("forms", (9, 40), (70, 40), 4, 2, 64, page_size=4)
        inputs, twin = build(case, device=target.device), build(base, device=target.device)
        inputs.q = twin.q
        inputs.indices, inputs.page_table = twin.indices, twin.page_table
        inputs.k.copy_(twin.k)
        inputs.v.copy_(twin.v)
        wrapper = runner.make_wrapper(case, backend=target.backend, device=target.device)
        runner.plan(wrapper, inputs)
        results.append(runner.run(wrapper, inputs))
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])


class Count:
    """An integer that may hold another value by the next call."""

    def __init__(self, value):
        self.value = value

    def __index__(self):
        return self.value


def test_options_are_remembered_by_type_and_value(target):
    """Equal arguments of another type are checked, and a variable one is read every time."""
    inputs = build(PAGED, device=target.device)
    wrapper = runner.make_wrapper(PAGED, backend=target.backend, device=target.device)
    runner.plan(wrapper, inputs, window_left=1)
    with pytest.raises(TypeError, match="window_left"):
        runner.plan(wrapper, inputs, window_left=1.0)
    window = Count(1)
    for window.value in (1, 20):
        runner.plan(wrapper, inputs, window_left=window)
        assert wrapper._window_left == window.value


@pytest.mark.parametrize("num_requests", [1, 2, 3])
def test_uniform_q_len_beside_block_tables(target, num_requests):
    case = Case("uniform", (2,) * num_requests, (9,) * num_requests, 4, 2, 64, page_size=16)
    inputs = build(case, device=target.device)
    wrapper = runner.make_wrapper(case, backend=target.backend, device=target.device)
    tables = torch.tensor(inputs.page_table, dtype=torch.int32)
    runner.plan(wrapper, inputs, uniform_q_len=2, block_tables=tables)
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()
