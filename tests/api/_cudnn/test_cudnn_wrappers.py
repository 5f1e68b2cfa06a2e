"""backend="cudnn" of the batch wrappers: cuDNN's forms of arguments, on the kernels."""

import dataclasses

import preflash
import pytest
import torch
from preflash.testing import Case, MaskKind, build, runner

QO_LENS, KV_LENS = (3, 0, 17, 4, 1, 40), (9, 8, 33, 0, 21, 12)
PAGED = Case(
    "cudnn", QO_LENS, KV_LENS, 6, 2, 64, dtype=torch.float16, page_size=16, layout="HND",
    mask=MaskKind.CAUSAL, sm_scale=0.11,
)  # fmt: skip
RAGGED = dataclasses.replace(PAGED, page_size=0, layout="NHD")
BOTH = pytest.mark.parametrize("case", [RAGGED, PAGED], ids=["ragged", "paged"])


def in_elements(inputs, device="cpu"):
    """Positional arguments and options of plan(): offsets in elements, lengths of four dims."""
    case = inputs.case
    positional, options = runner.plan_arguments(inputs)
    widths = (6 * case.head_dim, 1 if case.paged else 2 * case.head_dim)
    offsets = (given.to(device) * w for given, w in zip(positional, widths, strict=False))
    lens = (torch.tensor(given).view(-1, 1, 1, 1).to(device) for given in (QO_LENS, KV_LENS))
    options |= dict(zip(("seq_lens_q", "seq_lens"), lens, strict=True))
    return (*offsets, *positional[2:]), options


def kept_heads_first(case):
    """A paged cache in elements is [pages, heads, page_size, head_dim] under either kv_layout."""
    return dataclasses.replace(case, layout="NHD") if case.paged else case


@BOTH
@pytest.mark.parametrize("case_change", [{}, {"head_dim": 192, "head_dim_vo": 128}], ids=str)
def test_numbers_and_the_kernel(target, case, case_change):
    inputs = build(dataclasses.replace(case, **case_change), device=target.device)
    case = kept_heads_first(inputs.case)
    wrapper = runner.make_wrapper(case, backend="cudnn", device=target.device)
    auto = runner.make_wrapper(inputs.case, backend="auto", device=target.device)
    runner.plan(auto, inputs)
    expected, expected_lse = runner.run(auto, inputs)
    for place in ("cpu", target.device):
        positional, options = in_elements(inputs, place)
        wrapper.plan(*positional, **options)
        out, lse = runner.run(wrapper, inputs)
        runner.compare(inputs, out, lse).check()
        assert torch.equal(out, expected)
        assert torch.equal(lse, expected_lse)
    assert wrapper.variant == auto.variant
    assert wrapper.variant in repr(wrapper)
    assert wrapper._backend == auto._backend


@BOTH
@pytest.mark.parametrize(
    "change",
    [
        {"window_left": 7},
        {"soft_cap": 30.0},
        {"mask": MaskKind.CUSTOM},
        {"dtype": torch.bfloat16, "kv_dtype": torch.float8_e4m3fn},
        {"head_dim": 256},
    ],
    ids=str,
)
def test_what_cudnn_itself_does_not_serve(target, case, change):
    inputs = build(dataclasses.replace(case, **change), device=target.device)
    case = kept_heads_first(inputs.case)
    wrapper = runner.make_wrapper(case, backend="cudnn", device=target.device)
    positional, options = in_elements(inputs)
    wrapper.plan(*positional, **options)
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()
    size = wrapper.workspace_size(*positional, **options)
    assert size == wrapper.workspace_size(*runner.plan_arguments(inputs)[0], **options)


@BOTH
def test_cuda_graph_buffers_hold_tokens(target, case):
    inputs = build(case, device=target.device)
    names = ["qo_indptr", "paged_kv_indptr" if case.paged else "kv_indptr"]
    offsets = [inputs.qo_indptr, inputs.kv_indptr]
    if case.paged:
        names += ["paged_kv_indices", "paged_kv_last_page_len"]
        offsets += [inputs.indices, inputs.last_page_len]
    buffers = {
        f"{name}_buf": torch.full_like(given, 7, device=target.device)
        for name, given in zip(names, offsets, strict=True)
    }
    kind = type(runner.make_wrapper(case, backend="cudnn", device=target.device))
    wrapper = kind(
        runner.workspace(target.device), "NHD", backend="cudnn", use_cuda_graph=True, **buffers
    )
    positional, options = in_elements(inputs)
    wrapper.plan(*positional, **options)
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()
    for given, buffer in zip(offsets, buffers.values(), strict=True):
        assert torch.equal(buffer.cpu(), given.cpu())


@BOTH
def test_cuda_graph_buffers_hold_no_elements(target, case):
    """plan() fills them with tokens, so that a second plan() would read other offsets."""
    inputs = build(case, device=target.device)
    names = ["qo_indptr", "paged_kv_indptr" if case.paged else "kv_indptr"]
    names += ["paged_kv_indices", "paged_kv_last_page_len"] * case.paged
    positional, options = in_elements(inputs)
    buffers = {
        f"{name}_buf": given.to(target.device).clone()
        for name, given in zip(names, positional, strict=False)
    }
    kind = type(runner.make_wrapper(case, backend="cudnn", device=target.device))
    wrapper = kind(
        runner.workspace(target.device), "NHD", backend="cudnn", use_cuda_graph=True, **buffers
    )
    with pytest.raises(ValueError, match="qo_indptr counts elements and is qo_indptr_buf"):
        wrapper.plan(buffers["qo_indptr_buf"], *positional[1:], **options)


@BOTH
def test_the_environment_overrides_the_kernel_and_not_the_forms(monkeypatch, case):
    monkeypatch.setenv("PREFLASH_BACKEND", "cpu")
    inputs = build(case)
    wrapper = runner.make_wrapper(kept_heads_first(case), backend="cudnn")
    assert "PREFLASH_BACKEND=cpu instead of 'cudnn'" in repr(wrapper)
    positional, options = in_elements(inputs)
    wrapper.plan(*positional, **options)
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()
    assert wrapper._backend == "cpu"


@BOTH
def test_offsets_in_elements_are_for_cudnn_alone(case):
    inputs = build(case)
    positional, options = in_elements(inputs)
    with pytest.raises(ValueError, match=r"seq_lens_q|qo_indptr|kv_indptr"):
        runner.make_wrapper(case, backend="auto").plan(*positional, **options)


@pytest.mark.parametrize(
    "wrapper",
    [preflash.BatchDecodeWithPagedKVCacheWrapper, preflash.BatchAttentionWithAttentionSinkWrapper],
)
def test_other_wrappers_have_no_cudnn(wrapper):
    with pytest.raises(NotImplementedError, match="backend='cudnn' is taken by"):
        wrapper(runner.workspace(), backend="cudnn")
