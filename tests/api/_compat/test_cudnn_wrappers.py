"""Batch wrappers of backend="cudnn" take cuDNN's forms of arguments."""

import dataclasses

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
    """Returns arguments and options of plan(), with offsets in elements, lengths of four dims."""
    case = inputs.case
    positional, options = runner.plan_arguments(inputs)
    kv_width = 1 if case.paged else case.num_kv_heads * case.head_dim
    widths = (case.num_qo_heads * case.head_dim, kv_width)
    offsets = (given.to(device) * w for given, w in zip(positional, widths, strict=False))
    lens = (torch.tensor(given).view(-1, 1, 1, 1).to(device) for given in (QO_LENS, KV_LENS))
    options |= dict(zip(("seq_lens_q", "seq_lens"), lens, strict=True))
    options |= {"max_token_per_sequence": max(QO_LENS), "max_sequence_kv": max(KV_LENS)}
    return (*offsets, *positional[2:]), options


def made(case, device="cpu", backend="cudnn", **options):
    """Makes a wrapper of kv_layout NHD: pages in elements are [pages, heads, page_size, head_dim]
    under either layout."""
    if case.paged and backend == "cudnn":
        case = dataclasses.replace(case, layout="NHD")
    return runner.make_wrapper(case, backend=backend, device=device, **options)


CHANGES = {
    "none": {},
    "latent": {"head_dim": 192, "head_dim_vo": 128},
    "as many heads as tokens of a page": {"num_qo_heads": 8, "num_kv_heads": 8, "page_size": 8},
    # cuDNN itself has no kernels for this.
    "others": {
        "window_left": 7, "soft_cap": 30.0, "mask": MaskKind.CUSTOM, "head_dim": 256,
        "dtype": torch.bfloat16, "kv_dtype": torch.float8_e4m3fn,
    },
}  # fmt: skip


@BOTH
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_offsets_in_elements(target, case, change):
    if not case.paged:
        change = {name: value for name, value in change.items() if name != "page_size"}
    inputs = build(dataclasses.replace(case, **change), device=target.device)
    wrapper = made(inputs.case, target.device)
    auto = made(inputs.case, target.device, "auto")
    runner.plan(auto, inputs)
    expected, expected_lse = runner.run(auto, inputs)
    for place in ("cpu", target.device):
        positional, options = in_elements(inputs, place)
        wrapper.plan(*positional, **options)
        out, lse = runner.run(wrapper, inputs)
        runner.compare(inputs, out, lse).check()
        assert torch.equal(out, expected)
        assert torch.equal(lse, expected_lse)
    if case.paged:  # strides of an NHD pool
        k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (inputs.k, inputs.v))
        runner.compare(inputs, wrapper.run(inputs.q, (k, v)), None).check()
    assert wrapper.variant == auto.variant
    assert wrapper.variant in repr(wrapper)
    assert wrapper._backend == auto._backend
    size = wrapper.workspace_size(*positional, **options)
    assert size == wrapper.workspace_size(*runner.plan_arguments(inputs)[0], **options)


@BOTH
def test_offsets_in_tokens_with_lengths(target, case):
    """Pages then have the wrapper's layout. Offsets in elements are for cuDNN's backend alone."""
    case = dataclasses.replace(case, layout="NHD")
    inputs = build(case, device=target.device)
    wrapper, auto = (made(case, target.device, backend) for backend in ("cudnn", "auto"))
    (tokens, _), (elements, options) = runner.plan_arguments(inputs), in_elements(inputs)
    wrapper.plan(*tokens, **options)
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()
    for one, arrays in ((wrapper, (tokens[0] * (6 * 64 + 8), *tokens[1:])), (auto, elements)):
        with pytest.raises(ValueError, match=r"qo_indptr|seq_lens_q|kv_indptr|max"):
            one.plan(*arrays, **options)


@BOTH
def test_cuda_graph_buffers_hold_tokens(target, case):
    """plan() fills the buffers with tokens, so a buffer that counts elements is refused."""
    inputs = build(case, device=target.device)
    positional, options = in_elements(inputs)
    names = ["qo_indptr", "paged_kv_indptr" if case.paged else "kv_indptr"]
    names += ["paged_kv_indices", "paged_kv_last_page_len"] * case.paged
    given = runner.plan_arguments(inputs)[0][: len(names)]
    buffers = {
        f"{name}_buf": torch.full_like(tokens, 7, device=target.device)
        for name, tokens in zip(names, given, strict=True)
    }
    wrapper = made(case, target.device, use_cuda_graph=True, **buffers)
    wrapper.plan(*positional, **options)
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()
    for tokens, buffer in zip(given, buffers.values(), strict=True):
        assert torch.equal(buffer.cpu(), tokens.cpu())
    elements = buffers["qo_indptr_buf"].copy_(positional[0])
    with pytest.raises(ValueError, match="qo_indptr counts elements and is qo_indptr_buf"):
        wrapper.plan(elements, *positional[1:], **options)


@BOTH
def test_the_environment_overrides_the_kernel_and_not_the_forms(monkeypatch, case):
    monkeypatch.setenv("PREFLASH_BACKEND", "cpu")
    inputs, wrapper = build(case), made(case)
    assert "PREFLASH_BACKEND=cpu instead of 'cudnn'" in repr(wrapper)
    positional, options = in_elements(inputs)
    wrapper.plan(*positional, **options)
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()
    assert wrapper._backend == "cpu"
