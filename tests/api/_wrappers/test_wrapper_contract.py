"""Wrappers keep their contract of forms, buffers, options, workspaces and repeated plans."""

import dataclasses

import pytest
import torch
from planned_cases import check_run, plan_arguments, planned, tensors, unplanned
from preflash.testing import Case, KvForm, MaskKind, build, compare, poison, reference, runner
from preflash.testing.oracle import Pipeline

RAGGED = Case("ragged", (33, 5, 0, 70), (40, 90, 7, 70), 4, 2, 64, mask=MaskKind.CAUSAL)
PAGED = dataclasses.replace(RAGGED, name="paged", page_size=16)
SPLIT_KV = dataclasses.replace(PAGED, name="split_kv", fixed_split_size=64)


def each(*cases):
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


every_case, both = each(RAGGED, PAGED, SPLIT_KV), each(RAGGED, PAGED)

# --- forms of the result -----------------------------------------------------


@every_case
def test_forms_of_the_result(target, case):
    """Base 2 and [tokens, heads] unless another base or layout is asked for."""
    inputs, wrapper = planned(case, target)
    given = tensors(inputs)
    out, lse = wrapper.run(*given, return_lse=True)
    assert (out.dtype, out.device) == (inputs.q.dtype, inputs.q.device)
    assert (lse.dtype, lse.shape) == (torch.float32, inputs.q.shape[:2])
    runner.compare(inputs, out, lse).check()
    for same in (
        wrapper.run_return_lse(*given),
        wrapper.run(*given, return_lse=True, lse_base="log2", lse_layout="NH"),
    ):
        assert all(map(torch.equal, same, (out, lse)))
    by_head = poison(lse.shape[::-1], torch.float32, target.device)
    options = {"return_lse": True, "lse_layout": "HN", "lse_base": "ln", "lse": by_head}
    fresh, got = wrapper.run(*given, **options)
    assert got.data_ptr() == by_head.data_ptr()
    runner.compare(inputs, fresh, by_head.t(), lse_base="ln").check()
    # vLLM slices its output out of a larger buffer; rows and heads may be strided.
    rows, heads, dim = out.shape
    wide = poison((rows + 2, heads, dim + 8), case.dtype, target.device)
    view = wide[1:-1, :, :dim]
    assert wrapper.run(*given, out=view).data_ptr() == view.data_ptr()
    assert torch.equal(view, out)
    assert bool(wide[0].isnan().all() and wide[-1].isnan().all() and wide[..., dim:].isnan().all())


# --- options of a run --------------------------------------------------------

# Arguments of run() by position, its options, and (scale, window, out_scale) of the oracle.
RUN_OPTIONS = {
    "scales": ((), {"q_scale": 0.5, "k_scale": 3.0, "v_scale": 0.25}, (1.5, -1, 0.25)),
    "tensors": ((), {"k_scale": torch.tensor(2.0), "v_scale": torch.tensor([0.5])}, (2, -1, 0.5)),
    "window": ((), {"window_left": 6}, (1.0, 6, 1.0)),
    "paged by position": ((2.0, 0.5, True), {}, (2.0, -1, 0.5)),
    "ragged by position": ((True,), {}, (1.0, -1, 1.0)),
}


def signed_for(case, name):
    return "position" not in name or name.startswith("paged") is case.paged


@pytest.mark.parametrize(
    ("case", "name"),
    [(c, name) for c in (RAGGED, PAGED, SPLIT_KV) for name in RUN_OPTIONS if signed_for(c, name)],
    ids=lambda value: getattr(value, "name", value),
)
def test_options_of_one_run(target, case, name):
    """k_scale and q_scale multiply the logits, v_scale the output; the next run is as planned."""
    positional, options, (scale, window, out_scale) = RUN_OPTIONS[name]
    inputs, wrapper = planned(case, target)
    options = {k: x.to(target.device) if hasattr(x, "to") else x for k, x in options.items()}
    options |= {} if positional else {"return_lse": True}
    out, lse = wrapper.run(*tensors(inputs), *positional, **options)
    pipeline = Pipeline(case.scale * scale, True, window, out_scale=out_scale)
    compare(out, lse, reference(inputs, pipeline=pipeline)).check()
    check_run(inputs, wrapper)


FORWARD_OPTIONS = [
    {"causal": True},
    {"causal": False},
    {"causal": True, "window_left": 9},
    {"causal": False, "window_left": 9},
    {"causal": True, "logits_soft_cap": 1.0},
    {"causal": True, "sm_scale": 0.5},
    {"causal": False, "window_left": 20, "logits_soft_cap": 2.0, "sm_scale": 0.3},
]


@pytest.mark.parametrize("is_planned", [True, False], ids=["plan", "begin_forward"])
@every_case
def test_forward_has_options_of_its_own(target, case, is_planned):
    """begin_forward() knows neither mask nor cap, and no call those of the call before."""
    inputs, wrapper = planned(case, target)
    if not is_planned:
        positional, _ = runner.plan_arguments(inputs)
        wrapper.begin_forward(*positional, q_data_type=case.dtype)
    for options in (*FORWARD_OPTIONS, *reversed(FORWARD_OPTIONS)):
        cap = options.get("logits_soft_cap", 0.0)
        scale, window = options.get("sm_scale", case.scale), options.get("window_left", -1)
        expected = reference(inputs, pipeline=Pipeline(scale, options["causal"], window, cap))
        out, lse = wrapper.forward_return_lse(*tensors(inputs), **options)
        compare(out, lse, expected, soft_cap=cap).check()
        assert torch.equal(wrapper.forward(*tensors(inputs), **options), out)
    if case.paged:
        out = wrapper.forward(*tensors(inputs), causal=True, k_scale=2.0, v_scale=0.5)
        pipeline = Pipeline(2 * case.scale, True, out_scale=0.5)
        compare(out, None, reference(inputs, pipeline=pipeline)).check()
    assert wrapper.end_forward() is None


def test_forward_keeps_a_custom_mask(target):
    """causal is only effective without a custom mask; forward's default must not undo the mask."""
    case = Case("mask", (20, 9), (50, 9), 4, 2, 64, mask=MaskKind.CUSTOM)
    inputs, wrapper = planned(case, target)
    for causal in (False, True):
        out = wrapper.forward(inputs.q, inputs.k, inputs.v, causal=causal)
        runner.compare(inputs, out, None).check()


@both
def test_windows_of_run(case, target):
    """Later runs with a window find its variant at once: that of the current plan, though more
    windows have come since than variants are cached."""
    (_, wrapper), (_, twin) = (unplanned(case, target) for _ in range(2))
    windows = [*range(12), -1, 3, 1_000_000]
    for seed in range(2):
        inputs = build(case, seed=seed, device=target.device)
        runner.plan(wrapper, inputs)
        first = {window: wrapper.run(*tensors(inputs), window_left=window) for window in windows}
        for window, out in first.items():
            runner.plan(twin, inputs, window_left=window)
            assert torch.equal(twin.run(*tensors(inputs)), out)
            assert torch.equal(wrapper.run(*tensors(inputs), window_left=window), out)
    for wrong in (-2, True, 1.5, "3"):
        with pytest.raises((TypeError, ValueError), match="window_left"):
            wrapper.run(*tensors(inputs), window_left=wrong)


@both
def test_keywords(target, case):
    """Every argument by name, head_dim_qk for head_dim, and dtypes as text."""
    inputs = build(case, device=target.device)
    kind = type(runner.make_wrapper(case, backend="auto"))
    wrapper = kind(
        float_workspace_buffer=runner.workspace(target.device), kv_layout="NHD", backend="auto"
    )
    arguments = plan_arguments(inputs)
    sizes = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim_qk": 64, "head_dim_vo": 64}
    sizes |= {"page_size": 16} if case.paged else {}
    arrays = {name: arguments[name] for name in arguments if "_ind" in name or "last" in name}
    dtypes = {"q_data_type": "bfloat16", "o_data_type": torch.bfloat16}
    wrapper.plan(**arrays, **sizes, **dtypes, causal=True, use_fp16_qk_reduction=True)
    names = ("q", "paged_kv_cache") if case.paged else ("q", "k", "v")
    given = dict(zip(names, tensors(inputs), strict=True))
    runner.compare(inputs, *wrapper.run(**given, return_lse=True)).check()


# --- state that serving engines read -----------------------------------------


def test_attributes(target):
    """The soft cap is the caller's double, which engines compare; the kernels have it in
    float32."""
    case = Case("attributes", (9,), (30,), 4, 2, 64, window_left=12, soft_cap=0.3, sm_scale=0.25)
    inputs, wrapper = planned(case, target, causal=True)
    assert (wrapper._window_left, wrapper._logits_soft_cap, wrapper._sm_scale) == (12, 0.3, 0.25)
    assert wrapper._causal is True
    assert wrapper._backend == target.backend
    assert wrapper.is_cuda_graph_enabled is False
    runner.plan(wrapper, inputs, causal=False, window_left=-1, logits_soft_cap=None, sm_scale=None)
    assert (wrapper._window_left, wrapper._logits_soft_cap) == (-1, 0.0)
    assert isinstance(wrapper._logits_soft_cap, float)
    assert wrapper._causal is False


def test_auto_names_what_it_chose(target):
    inputs = build(PAGED, device=target.device)
    wrapper = runner.make_wrapper(PAGED, backend="auto", device=target.device)
    runner.plan(wrapper, inputs)
    families = {"cpu": "cpu_", "fa2": "sm80_", "fa3": "sm90_"}
    assert wrapper.variant.startswith(families[wrapper._backend])
    # The choice between fa2 and fa3 on a Hopper GPU depends on what is compiled (tests/gpu).
    assert wrapper._backend in (("cpu",) if target.device == "cpu" else ("fa2", "fa3"))


# One CPU kernel serves every head size and option and has no short tile. fa3 has no short tiles for
# custom masks (forward.toml): one row has a tall one. Those of fa2 have options at run time.
VARIANTS = [
    (Case("soft cap", (70,), (70,), 2, 1, 96, dtype=torch.float16, soft_cap=3.0),
     {"cpu": "cpu_f16_d512", "fa2": "sm80_f16_d128_softcap", "fa3": "sm90_f16_d128_softcap"}),
    (Case("one row", (1,), (70,), 2, 1, 192, 128, mask=MaskKind.PACKED),
     {"cpu": "cpu_bf16_d512", "fa2": "sm80_bf16_d192x128_decode_softcap_alibi_custom",
     "fa3": "sm90_bf16_d192x128_custom"}),
]  # fmt: skip


@pytest.mark.parametrize(("case", "names"), VARIANTS)
def test_variant_names_what_runs(target, case, names):
    _, wrapper = planned(case, target)
    assert wrapper.variant == names[target.backend]
    assert wrapper.variant in repr(wrapper)


# --- workspaces --------------------------------------------------------------

SPLIT = Case("split", (2, 70), (700, 300), 4, 2, 64, page_size=16, fixed_split_size=64)


def test_workspace_size_is_enough_and_needed(target):
    """A smaller workspace is refused with the bytes that would do; no other byte is written."""
    inputs, wrapper = unplanned(SPLIT, target)
    positional, options = runner.plan_arguments(inputs)
    float_bytes, int_bytes = wrapper.workspace_size(*positional, **options)
    assert isinstance(float_bytes, int)
    assert isinstance(int_bytes, int)
    assert float_bytes > 2 * 4 * 64 * 4  # at least two partial rows per query head
    assert int_bytes > 0
    whole = torch.full((float_bytes + 8192,), 0x5A, dtype=torch.uint8, device=target.device)
    inputs, wrapper = unplanned(SPLIT, target, buffer=whole[4096 : 4096 + float_bytes])
    runner.plan(wrapper, inputs)
    check_run(inputs, wrapper)
    assert bool((whole[:4096] == 0x5A).all())
    assert bool((whole[4096 + float_bytes :] == 0x5A).all())
    small = runner.workspace(target.device, float_bytes // 2)
    inputs, wrapper = unplanned(SPLIT, target, buffer=small)
    with pytest.raises(ValueError, match=str(float_bytes)):
        runner.plan(wrapper, inputs)


def test_small_workspace_plans_without_split(target):
    inputs, wrapper = unplanned(SPLIT, target, buffer=runner.workspace(target.device, 256))
    runner.plan(wrapper, inputs, fixed_split_size=None)
    check_run(inputs, wrapper)


def test_reset_workspace_buffer(target):
    inputs, wrapper = planned(SPLIT, target)
    check_run(inputs, wrapper)
    ints = runner.workspace(target.device, 8 << 20)
    wrapper.reset_workspace_buffer(runner.workspace(target.device), ints)
    runner.plan(wrapper, inputs)
    check_run(inputs, wrapper)
    _, wrapper = unplanned(SPLIT, target)
    wrapper.reset_workspace_buffer(runner.workspace(target.device, 256), ints)
    with pytest.raises(ValueError, match="float_workspace_buffer"):
        runner.plan(wrapper, inputs)


# --- life of a plan ----------------------------------------------------------


@every_case
def test_plan_keeps_no_reference_to_its_arrays(target, case):
    """The caller may overwrite indptr and indices after plan(); run must not read them again."""
    inputs, wrapper = planned(case, target)
    expected = reference(inputs)
    for name in ("qo_indptr", "kv_indptr", "last_page_len"):
        if (array := getattr(inputs, name)) is not None:
            array.fill_(-1)
    check_run(inputs, wrapper, expected)


LENS = (20, 3), (50, 60)
PLANS = [
    Case("first", *LENS, 4, 2, 64, dtype=torch.float16),
    Case("heads", *LENS, 5, 1, 64, mask=MaskKind.CAUSAL),
    Case("dims", *LENS, 4, 4, 192, 128, mask=MaskKind.CUSTOM),
    Case("again", (9,), (0,), 4, 2, 128, dtype=torch.float16, soft_cap=3.0),
]


def test_plan_again_with_other_heads_and_dtypes(target):
    _, wrapper = unplanned(PLANS[0], target)
    for seed, case in enumerate(PLANS):
        inputs = build(case, device=target.device, seed=seed)
        runner.plan(wrapper, inputs)
        check_run(inputs, wrapper)


@every_case
def test_many_layers_with_one_plan(target, case):
    inputs, wrapper = planned(case, target)
    for layer in range(3):
        # Other numbers at the same places; what is poisoned stays poisoned.
        inputs.q = torch.randn_like(inputs.q)
        inputs.k.mul_(-0.75)
        inputs.v.mul_(1.5 - layer)
        check_run(inputs, wrapper)


@pytest.mark.parametrize("page_size", [0, 16], ids=["ragged", "paged"])
def test_empty_batch(target, page_size):
    _, wrapper = unplanned(Case("empty", (), (), 4, 2, 64, page_size=page_size), target)
    zero = torch.zeros(1, dtype=torch.int32, device=target.device)
    table = (zero, zero, zero[:0], zero[:0]) if page_size else (zero, zero)
    sizes = (4, 2, 64, 16) if page_size else (4, 2, 64)
    wrapper.plan(*table, *sizes, q_data_type=torch.bfloat16)
    q, kv = (poison((0, n, 64), torch.bfloat16, target.device) for n in (4, 2))
    pool = poison((3, 16, 2, 64), torch.bfloat16, target.device)
    out, lse = wrapper.run(q, *(((pool, pool),) if page_size else (kv, kv)), return_lse=True)
    assert out.shape == (0, 4, 64)
    assert lse.shape == (0, 4)


def test_kv_forms_are_equal_bit_by_bit(target):
    """The same numbers through another storage give the same bits."""
    case = Case("forms", (9, 40), (70, 40), 4, 2, 64, page_size=4)
    twin = build(case, device=target.device)
    results = []
    for form in (KvForm.SEPARATE, KvForm.COMBINED, KvForm.HALVES, KvForm.PADDED, KvForm.TRANSPOSED):
        inputs, wrapper = unplanned(dataclasses.replace(case, form=form), target)
        inputs.q, inputs.indices, inputs.page_table = twin.q, twin.indices, twin.page_table
        inputs.k.copy_(twin.k)
        inputs.v.copy_(twin.v)
        runner.plan(wrapper, inputs)
        results.append(runner.run(wrapper, inputs))
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])
