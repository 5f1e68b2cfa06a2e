"""Options that are part of the interface but not of this build raise and name themselves."""

import preflash
import pytest
import torch
from planned_cases import planned
from preflash.testing import Case, build, reference, runner

RAGGED = Case("ragged", (9, 3), (30, 5), 4, 2, 64)
PAGED = Case("paged", (9, 3), (30, 5), 4, 2, 64, page_size=16)
SINGLE = Case("single", (9,), (30,), 4, 2, 64)

PLAN = {
    "fp8_out": ({"o_data_type": torch.float8_e4m3fn}, "o_data_type"),
}
RUN = {
    "kv_cache_sf": ({"kv_cache_sf": torch.zeros(4)}, "kv_cache_sf"),
}
ONCE = {
    "fp8_out": ({"o_dtype": torch.float8_e4m3fn}, "o_dtype|o_data_type"),
}


@pytest.mark.parametrize(("options", "name"), PLAN.values(), ids=PLAN)
@pytest.mark.parametrize("case", [RAGGED, PAGED], ids=lambda case: case.name)
def test_plan(target, case, options, name):
    inputs, wrapper = planned(case, target)
    with pytest.raises(NotImplementedError, match=name):
        runner.plan(wrapper, inputs, **options)
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()


@pytest.mark.parametrize(("options", "name"), RUN.values(), ids=RUN)
@pytest.mark.parametrize("case", [RAGGED, PAGED], ids=lambda case: case.name)
def test_run(target, case, options, name):
    inputs, wrapper = planned(case, target)
    options = {key: value.to(target.device) for key, value in options.items()}
    with pytest.raises(NotImplementedError, match=name):
        runner.run(wrapper, inputs, **options)
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()


@pytest.mark.parametrize(("options", "name"), ONCE.values(), ids=ONCE)
def test_single(target, options, name):
    inputs = build(SINGLE, device=target.device)
    with pytest.raises(NotImplementedError, match=name):
        runner.single(inputs, backend=target.backend, **options)
    runner.compare(
        inputs, *runner.single(inputs, backend=target.backend), reference(inputs)
    ).check()


@pytest.mark.parametrize("case", [RAGGED, PAGED], ids=lambda case: case.name)
def test_what_changes_nothing_is_taken(target, case):
    """None, zero and explicit defaults of the same options, as engines pass them."""
    inputs, wrapper = planned(case, target)
    runner.plan(
        wrapper,
        inputs,
        pos_encoding_mode="NONE",
        rope_scale=1,
        rope_theta=1e4,
        prefix_len_ptr=None,
        token_pos_in_items_ptr=None,
        token_pos_in_items_len=0,
        max_item_len_ptr=None,
        o_data_type=case.dtype,
        use_fp16_qk_reduction=True,
        fixed_split_size=-1,
    )
    result = runner.run(wrapper, inputs, sinks=None, kv_cache_sf=None, enable_pdl=None)
    runner.compare(inputs, *result).check()


def test_lengths_that_agree_are_taken(target):
    inputs, wrapper = planned(PAGED, target)
    table = torch.zeros(2, 4, dtype=torch.int32, device=target.device)
    for i, pages in enumerate(inputs.page_table):
        table[i, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
    runner.plan(
        wrapper,
        inputs,
        seq_lens=torch.tensor([30, 5], dtype=torch.int32),
        seq_lens_q=torch.tensor([9, 3], dtype=torch.int32),
        max_token_per_sequence=9,
        max_sequence_kv=64,
        block_tables=table,
    )
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()


@pytest.mark.parametrize("case", [RAGGED, PAGED], ids=lambda case: case.name)
def test_backends(case):
    """On the CPU no GPU backend can serve; the refusal names it, at the latest in plan()."""
    inputs = build(case)

    def attempt():
        wrapper = runner.make_wrapper(case, backend="fa3")
        runner.plan(wrapper, inputs)

    with pytest.raises((NotImplementedError, ValueError), match="fa3"):
        attempt()


def test_single_scales(target):
    """q_scale, k_scale and v_scale mean in the single function what they mean in run()."""
    from preflash.testing import compare
    from preflash.testing.oracle import Pipeline

    inputs = build(SINGLE, device=target.device)
    out, lse = runner.single(inputs, backend=target.backend, q_scale=0.5, k_scale=3.0, v_scale=0.25)
    pipeline = Pipeline(SINGLE.scale * 1.5, out_scale=0.25)
    compare(out, lse, reference(inputs, pipeline=pipeline)).check()


@pytest.mark.parametrize("name", ["o_dtype", "o_data_type"])
def test_single_output_type_by_both_names(target, name):
    inputs = build(SINGLE, device=target.device)
    result = runner.single(inputs, backend=target.backend, **{name: SINGLE.dtype})
    runner.compare(inputs, *result).check()


def test_single_out_and_lse_buffers(target):
    from preflash.testing import poison

    inputs = build(SINGLE, device=target.device)
    out = poison(inputs.q.shape, SINGLE.dtype, target.device)
    lse = poison((4, 9), torch.float32, target.device)
    got = preflash.single_prefill_with_kv_cache_return_lse(
        inputs.q,
        inputs.k[:30],
        inputs.v[:30],
        out=out,
        lse=lse,
        lse_layout="HN",
        lse_base="ln",
    )
    assert got[0].data_ptr() == out.data_ptr()
    assert got[1].data_ptr() == lse.data_ptr()
    runner.compare(inputs, out, lse.t(), lse_base="ln").check()
