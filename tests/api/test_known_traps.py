"""Mistakes that users of attention libraries have met, one test each."""

import dataclasses
import math

import preflash
import pytest
import torch
from preflash.testing import Case, KvForm, Magnitude, MaskKind, build, compare, reference, runner
from preflash.testing.oracle import Pipeline


def right(case: Case, target, **options) -> None:
    runner.check(build(case, device=target.device, **options), backend=target.backend)


def test_lse_is_log2(target):
    """Two equal keys with logit 0: log2(2) is 1, ln(2) is not."""
    q = torch.zeros(1, 1, 64, dtype=torch.float16, device=target.device)
    kv = torch.ones(2, 1, 64, dtype=torch.float16, device=target.device)
    _, lse = preflash.single_prefill_with_kv_cache_return_lse(q, kv, kv)
    assert lse.item() == pytest.approx(1.0, abs=1e-6)
    _, ln = preflash.single_prefill_with_kv_cache(q, kv, kv, return_lse=True, lse_base="ln")
    assert ln.item() == pytest.approx(math.log(2.0), abs=1e-6)


@pytest.mark.parametrize("logit", [-4e4, -5e4, -6e4, -1e5, -2.5e5])
@pytest.mark.parametrize("mask", [MaskKind.NONE, MaskKind.CAUSAL, MaskKind.CUSTOM])
def test_very_negative_logits_are_ordinary(target, logit, mask):
    """No finite number stands for minus infinity: a row of logits near -5e4 is a plain mean."""
    tokens = 40
    q = torch.zeros(tokens, 2, 64, dtype=torch.bfloat16)
    k = torch.zeros(tokens, 1, 64, dtype=torch.bfloat16)
    q[..., 0], k[..., 0] = -256.0, 256.0
    scale = logit / (-256.0 * 256.0)
    v = torch.randn(tokens, 1, 64).bfloat16()
    case = Case("negative", (tokens,), (tokens,), 2, 1, 64, mask=mask, sm_scale=scale)
    inputs = build(case, device=target.device)
    inputs.q, inputs.k, inputs.v = (t.to(target.device) for t in (q, k, v))
    out, lse = runner.single(inputs, backend=target.backend)
    expected = reference(inputs)
    # All logits of a row are equal, so rounding them cannot change the weights.
    expected_exact = dataclasses.replace(
        expected, logit_bound=torch.zeros_like(expected.logit_bound)
    )
    compare(out, None, expected_exact).check()
    compare(out, lse, expected, logit_rounding=4.0).check()


def test_very_negative_row_beside_ordinary_ones(target):
    case = Case("mixed", (9,), (64,), 2, 1, 64, sm_scale=1.0, mask=MaskKind.CAUSAL)
    inputs = build(case, device=target.device)
    inputs.q[4] = 0
    inputs.q[4, :, 0] = -500
    inputs.k[:, :, 0] = 500
    inputs.q[:4, :, 0] = inputs.q[5:, :, 0] = 0
    out, lse = runner.single(inputs, backend=target.backend)
    expected = reference(inputs)
    # Only row 4 is large; its logits are all equal.
    expected.logit_bound[4] = 0
    report = compare(out, None, expected)
    report.check()
    assert bool(((lse[4].double() - expected.lse[4]).abs() < 0.2).all())


def test_first_keys_very_negative_then_ordinary(target):
    """The running maximum starts near -2.5e5 and rises by 2.5e5 in a later tile."""
    case = Case("rise", (3,), (300,), 2, 1, 64, sm_scale=1.0)
    inputs = build(case, device=target.device)
    inputs.q.zero_()
    inputs.k.zero_()
    inputs.q[..., 0] = -500
    inputs.k[:200, :, 0] = 500
    inputs.k[200:300, :, 0] = 0.0
    out, lse = runner.single(inputs, backend=target.backend)
    expected = reference(inputs)
    expected.logit_bound.zero_()
    compare(out, lse, expected).check()


@pytest.mark.parametrize("paged", [False, True])
def test_fully_masked_rows_are_zero_and_minus_infinity(target, paged):
    case = Case(
        "masked", (100, 9), (40, 0), 4, 2, 64, page_size=16 if paged else 0, mask=MaskKind.CAUSAL
    )
    inputs = build(case, device=target.device)
    wrapper = runner.make_wrapper(case, backend=target.backend, device=target.device)
    runner.plan(wrapper, inputs)
    out, lse = runner.run(wrapper, inputs)
    for rows in (slice(0, 60), slice(100, 109)):
        assert bool((out[rows] == 0).all())
        assert bool((lse[rows] == -math.inf).all())
    assert bool(lse[60:100].isfinite().all())
    runner.compare(inputs, out, lse).check()


@pytest.mark.parametrize("split", [None, 64])
def test_a_masked_row_is_zero_beside_a_nan(target, split):
    """Rows 3 and 4 keep nothing; the others keep a key whose value is NaN. 0 * NaN is NaN."""
    case = Case("beside", (20,), (100,), 2, 1, 64, mask=MaskKind.CUSTOM, fixed_split_size=split)
    inputs = build(case, device=target.device)
    inputs.masks[0][:] = True
    inputs.masks[0][3:5] = False
    inputs.custom_mask = inputs.masks[0].flatten()
    inputs.v[7] = math.nan
    wrapper = runner.make_wrapper(case, backend=target.backend, device=target.device)
    runner.plan(wrapper, inputs)
    out, lse = runner.run(wrapper, inputs)
    assert bool((out[3:5] == 0).all())
    assert bool((lse[3:5] == -math.inf).all())
    assert bool(out[:3].isnan().all() and out[5:].isnan().all())


@pytest.mark.parametrize("page_size", [0, 1, 16])
def test_nan_below_the_window_stays_out(target, page_size):
    """Keys that no row's window reaches: an engine has recycled their pages. Same tile, 0 * NaN."""
    window = {"mask": MaskKind.CAUSAL, "window_left": 15}
    case = Case("recycled", (4,), (200,), 2, 1, 64, page_size=page_size, **window)
    inputs = build(case, device=target.device)
    expected = reference(inputs)
    lowest = 200 - 4 - 15
    k, v = inputs.cache if page_size else (inputs.k, inputs.v)
    for key in range(lowest):
        page = (int(inputs.indices[key // page_size]), key % page_size) if page_size else None
        place = page or (key,)
        k[place] = math.nan
        v[place] = math.nan
    wrapper = runner.make_wrapper(case, backend=target.backend, device=target.device)
    runner.plan(wrapper, inputs)
    out, lse = runner.run(wrapper, inputs)
    compare(out, lse, expected).check()


def test_custom_mask_that_keeps_nothing(target):
    case = Case("nothing", (20, 33), (70, 40), 4, 2, 64, mask=MaskKind.CUSTOM)
    inputs = build(case, device=target.device)
    inputs.custom_mask.zero_()
    for mask in inputs.masks:
        mask.zero_()
    wrapper = runner.make_wrapper(case, backend=target.backend, device=target.device)
    runner.plan(wrapper, inputs)
    out, lse = runner.run(wrapper, inputs)
    assert bool((out == 0).all())
    assert bool((lse == -math.inf).all())


@pytest.mark.parametrize("paged", [False, True])
def test_nan_of_one_request_stays_there(target, paged):
    """Tiles reach over the end of a request; 0 * NaN is NaN."""
    case = Case(
        "nan",
        (5, 40, 3),
        (37, 45, 130),
        4,
        2,
        64,
        page_size=16 if paged else 0,
        mask=MaskKind.CAUSAL,
    )
    inputs = build(case, device=target.device)
    expected = reference(inputs)
    if paged:
        pages = torch.tensor(inputs.page_table[1], device=target.device)
        for pool in (inputs.k, inputs.v):
            pool[pages] = math.nan
    else:
        for tensor in (inputs.k, inputs.v):
            tensor[37 : 37 + 45] = math.nan
    inputs.q[5:45] = math.inf
    wrapper = runner.make_wrapper(case, backend=target.backend, device=target.device)
    runner.plan(wrapper, inputs)
    out, lse = runner.run(wrapper, inputs)
    others = torch.cat([torch.arange(5), torch.arange(45, 48)]).to(target.device)
    picked = expected.map(lambda rows: rows[others])
    compare(out[others], lse[others], picked).check()
    assert bool(out[5:45].isnan().all())


@pytest.mark.parametrize("mask", [MaskKind.NONE, MaskKind.CAUSAL, MaskKind.CUSTOM])
@pytest.mark.parametrize("page_size", [0, 1, 5, 16, 64, 256])
def test_unowned_slots_do_not_leak(target, page_size, mask):
    right(Case("leak", (7, 70), (65, 70), 4, 2, 64, page_size=page_size, mask=mask), target)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("page_size", [0, 16])
def test_zero_lengths(target, page_size, causal):
    mask = MaskKind.CAUSAL if causal else MaskKind.NONE
    for qo_lens, kv_lens in (
        ((0, 0, 0), (0, 0, 0)),
        ((0, 4, 0), (9, 0, 0)),
        ((0,), (33,)),
        ((33,), (0,)),
        ((0, 0, 1), (0, 7, 1)),
        ((1, 0, 0, 0, 64), (1, 0, 300, 0, 64)),
    ):
        right(Case("zero", qo_lens, kv_lens, 4, 2, 64, page_size=page_size, mask=mask), target)


@pytest.mark.parametrize("dim", [8, 16, 24, 40, 56, 72, 80, 88, 96, 104, 120, 136, 160, 192, 248])
def test_every_head_dim_reads_within_bounds(target, dim):
    """Columns behind head_dim are poisoned; the last row ends the allocation."""
    right(Case("dim", (9, 70), (33, 70), 2, 1, dim, form=KvForm.PADDED), target)
    case = Case("dim", (17,), (40,), 2, 1, dim, mask=MaskKind.CAUSAL)
    inputs = build(case, device=target.device)
    inputs.k, inputs.v = inputs.k[:40].clone(), inputs.v[:40].clone()
    runner.check(inputs, backend=target.backend)


def test_packed_mask_alone_for_a_batch(target):
    """Every request starts on its own byte: odd sizes in front shift the later ones otherwise."""
    lens = (3, 5, 1, 7)
    case = Case("bytes", lens, (5, 7, 3, 9), 4, 2, 64, mask=MaskKind.PACKED)
    inputs = build(case, device=target.device)
    assert inputs.custom_mask is None
    runner.check(inputs, backend=target.backend)


def test_packed_mask_precedes_the_dense_one(target):
    case = Case("both", (9, 20), (33, 20), 4, 2, 64, mask=MaskKind.PACKED)
    inputs = build(case, device=target.device)
    wrong = torch.ones(9 * 33 + 20 * 20, dtype=torch.bool, device=target.device)
    runner.check(inputs, backend=target.backend, custom_mask=wrong)


def test_packed_mask_precedes_in_single(target):
    case = Case("both", (9,), (33,), 4, 2, 64, mask=MaskKind.PACKED)
    inputs = build(case, device=target.device)
    wrong = torch.ones(9, 33, dtype=torch.bool, device=target.device)
    out, lse = runner.single(inputs, backend=target.backend, custom_mask=wrong)
    runner.compare(inputs, out, lse).check()


def test_causal_is_ignored_under_a_custom_mask(target):
    case = Case("mask", (30, 5), (30, 77), 4, 2, 64, mask=MaskKind.CUSTOM)
    runner.check(build(case, device=target.device), backend=target.backend, causal=True)


def test_mask_is_gone_after_a_plan_without_one(target):
    masked = Case("mask", (30, 5), (30, 77), 4, 2, 64, mask=MaskKind.CUSTOM)
    inputs = build(masked, device=target.device)
    wrapper = runner.make_wrapper(masked, backend=target.backend, device=target.device)
    runner.plan(wrapper, inputs)
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()
    plain = dataclasses.replace(
        inputs, case=dataclasses.replace(masked, mask=MaskKind.CAUSAL), masks=None, custom_mask=None
    )
    runner.plan(wrapper, plain)
    runner.compare(plain, *runner.run(wrapper, plain)).check()
    runner.plan(wrapper, inputs)
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()


def test_caller_may_reuse_his_mask(target):
    """plan() packs the mask; later changes of the caller's tensor have no effect."""
    case = Case("mask", (30, 5), (30, 77), 4, 2, 64, mask=MaskKind.CUSTOM)
    inputs = build(case, device=target.device)
    expected = reference(inputs)
    wrapper = runner.make_wrapper(case, backend=target.backend, device=target.device)
    runner.plan(wrapper, inputs)
    inputs.custom_mask.zero_()
    runner.compare(inputs, *runner.run(wrapper, inputs), expected=expected).check()


def test_last_page_longer_than_a_page_is_refused(target):
    case = Case("page", (9,), (33,), 4, 2, 64, page_size=16)
    inputs = build(case, device=target.device)
    inputs.last_page_len.fill_(17)
    wrapper = runner.make_wrapper(case, backend=target.backend, device=target.device)
    with pytest.raises(ValueError, match=r"last_page_len.*17|17.*last_page_len"):
        runner.plan(wrapper, inputs)


@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (3, 1)])
@pytest.mark.parametrize("form", [KvForm.SEPARATE, KvForm.TRANSPOSED, KvForm.PADDED])
def test_ragged_hnd(target, heads, form):
    """[num_kv_heads, tokens, head_dim]: the token dimension is the second one."""
    right(Case("hnd", (40, 9), (70, 130), *heads, 64, layout="HND", form=form), target)


@pytest.mark.parametrize("index_device", ["cpu", "target"])
def test_strided_indptr(target, index_device):
    """indptr and lengths as columns of a larger table."""
    where = target.device if index_device == "target" else "cpu"
    case = Case("strided", (9, 40, 3), (33, 40, 130), 4, 2, 64, page_size=16, mask=MaskKind.CAUSAL)
    inputs = build(case, device=target.device, index_device=where)
    for name in ("qo_indptr", "kv_indptr", "indices", "last_page_len"):
        array = getattr(inputs, name)
        table = torch.full((array.numel(), 3), 10**6, dtype=torch.int32, device=where)
        table[:, 1] = array
        setattr(inputs, name, table[:, 1])
        assert not getattr(inputs, name).is_contiguous() or array.numel() < 2
    runner.check(inputs, backend=target.backend)


@pytest.mark.parametrize("window", [0, 1, 5, 63, 64, 65, 200])
@pytest.mark.parametrize("lens", [((4,), (200,)), ((130,), (130,)), ((200,), (90,))], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_windows(target, window, lens, causal):
    """Left windows without causal too, in the first query tile, with more queries than keys."""
    mask = MaskKind.CAUSAL if causal else MaskKind.NONE
    right(Case("window", *lens, 4, 2, 64, mask=mask, window_left=window), target)


@pytest.mark.parametrize("window", [0, 7])
def test_window_is_anded_with_a_custom_mask(target, window):
    case = Case("window", (20, 70), (90, 70), 4, 2, 64, mask=MaskKind.CUSTOM, window_left=window)
    right(case, target)


def test_soft_cap_is_not_scaled_twice(target):
    """One key pair with known logits: c * tanh(s * qk / c)."""
    q = torch.full((1, 1, 64), 0.5, dtype=torch.float16, device=target.device)
    k = torch.full((1, 1, 64), 0.25, dtype=torch.float16, device=target.device)
    _, lse = preflash.single_prefill_with_kv_cache(
        q, k, k, sm_scale=0.5, logits_soft_cap=3.0, return_lse=True, lse_base="ln"
    )
    assert lse.item() == pytest.approx(3.0 * math.tanh(4.0 / 3.0), abs=1e-5)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_soft_cap_near_zero_and_far_beyond(target, head_dim, causal):
    """Rows of logits from a thousandth of the cap to a hundred caps, inf and NaN side by side."""
    tokens, keys, cap = 70, 300, 20.0
    generator = torch.Generator().manual_seed(5)
    q = torch.randn(tokens, 4, head_dim, generator=generator)
    k = torch.randn(keys, 2, head_dim, generator=generator).bfloat16()
    v = torch.randn(keys, 2, head_dim, generator=generator).bfloat16()
    factors = torch.tensor([1e-3, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0])
    q = (q * cap / 4 * factors[torch.arange(tokens) % 7, None, None]).bfloat16()
    k[k == 0] = 1.0  # inf * 0 is NaN
    q[13, :, 3], q[57, 1, 0] = math.inf, math.nan
    mask = MaskKind.CAUSAL if causal else MaskKind.NONE
    case = Case("far", (tokens,), (keys,), 4, 2, head_dim, mask=mask, soft_cap=cap)
    inputs = build(case, device=target.device)
    inputs.q, inputs.k, inputs.v = (t.to(target.device) for t in (q, k, v))
    runner.check(inputs, backend=target.backend)


def test_soft_cap_zero_is_off(target):
    case = Case("off", (20,), (33,), 4, 2, 64, soft_cap=0.0)
    right(case, target)


def test_cap_and_window_of_a_former_plan_are_gone(target):
    case = Case(
        "former",
        (20,),
        (90,),
        4,
        2,
        64,
        mask=MaskKind.CAUSAL,
        soft_cap=1.0,
        window_left=3,
        sm_scale=2.0,
    )
    inputs = build(case, device=target.device)
    wrapper = runner.make_wrapper(case, backend=target.backend, device=target.device)
    runner.plan(wrapper, inputs)
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()
    runner.plan(wrapper, inputs, logits_soft_cap=None, window_left=-1, sm_scale=None)
    expected = reference(inputs, pipeline=Pipeline(64**-0.5, True))
    compare(*runner.run(wrapper, inputs), expected).check()


def test_two_wrappers_share_nothing(target):
    cases = [
        Case("one", (20, 3), (90, 70), 4, 2, 64, mask=MaskKind.CAUSAL, page_size=16),
        Case("two", (5, 64), (300, 64), 8, 2, 128, page_size=3, fixed_split_size=64),
    ]
    planned = []
    for case in cases:
        inputs = build(case, device=target.device)
        wrapper = runner.make_wrapper(case, backend=target.backend, device=target.device)
        runner.plan(wrapper, inputs)
        planned.append((wrapper, inputs))
    for wrapper, inputs in planned * 2:
        runner.compare(inputs, *runner.run(wrapper, inputs)).check()


def test_threads_with_a_wrapper_each(target):
    from concurrent.futures import ThreadPoolExecutor

    def work(seed: int) -> str:
        lens = (20 + seed, 3), (90, 70 - seed)
        case = Case(
            "thread",
            *lens,
            4,
            2,
            64,
            mask=MaskKind.CAUSAL,
            page_size=1 + seed % 5,
            fixed_split_size=64 if seed % 2 else None,
        )
        inputs = build(case, device=target.device, seed=seed)
        expected = reference(inputs)
        wrapper = runner.make_wrapper(case, backend=target.backend, device=target.device)
        for _ in range(5):
            runner.plan(wrapper, inputs)
            report = runner.compare(inputs, *runner.run(wrapper, inputs), expected=expected)
            if not report.ok:
                return str(report)
        return ""

    with ThreadPoolExecutor(4) as pool:
        assert [text for text in pool.map(work, range(12)) if text] == []


def test_identical_logits_give_the_mean(target):
    right(Case("mean", (5, 70), (300, 70), 4, 2, 128, magnitude=Magnitude.IDENTICAL), target)


def test_inf_in_a_kept_key_shows(target):
    """Poison that a request owns is its business: the result says so instead of hiding it."""
    case = Case("own", (4,), (20,), 2, 1, 64)
    inputs = build(case, device=target.device)
    inputs.v[3] = math.nan
    out, lse = runner.single(inputs, backend=target.backend)
    assert bool(out.isnan().all())
    assert bool(lse.isfinite().all())


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_alignment_is_checked_in_every_run(target, name):
    """Same shape, strides and dtype as in the run before, another address."""
    case = Case("address", (9, 3), (30, 5), 4, 2, 64)
    inputs = build(case, device=target.device)
    wrapper = runner.make_wrapper(case, backend=target.backend, device=target.device)
    runner.plan(wrapper, inputs)
    tensors = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "out": torch.empty_like(inputs.q)}
    good = wrapper.run(**tensors).clone()
    aligned = tensors[name]
    room = torch.empty(aligned.numel() + 8, dtype=aligned.dtype, device=target.device)
    shifted = room[1 : 1 + aligned.numel()].view(aligned.shape)
    assert shifted.stride() == aligned.stride()
    with pytest.raises(ValueError, match=rf"\b{name}\b.*16"):
        wrapper.run(**{**tensors, name: shifted})
    assert torch.equal(wrapper.run(**tensors), good)


@pytest.mark.parametrize("last_page_len", [0, 1, 16, 17, -1, -(2**31), 2**31 - 1])
def test_no_pages_are_no_keys(target, last_page_len):
    """Engines fill last_page_len with ones, or with nothing, where a request has no page."""
    case = Case("nopages", (9, 3), (33, 0), 4, 2, 64, page_size=16, mask=MaskKind.CAUSAL)
    inputs = build(case, device=target.device)
    inputs.last_page_len[1] = last_page_len
    runner.check(inputs, backend=target.backend)


def test_no_pages_among_masks(target):
    """Mask sizes come from KV lengths too."""
    lens = ((9, 3, 5), (33, 0, 20))
    case = Case("nopages", *lens, 4, 2, 64, page_size=16, mask=MaskKind.CUSTOM)
    inputs = build(case, device=target.device)
    inputs.last_page_len[1] = -(2**31)
    runner.check(inputs, backend=target.backend)
