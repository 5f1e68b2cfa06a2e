"""out and lse need memory of their own; q itself may be written to, and packed tensors shared."""

import dataclasses

import preflash
import pytest
import torch
from fuzz import fmha_problems
from planned_cases import planned as planned_case
from preflash.testing import Case, MaskKind, build, runner

attention = preflash.trtllm_fmha_v2_prefill

HEADS, HEAD_DIM = 4, 64
CASE = Case("apart", (200, 3, 0, 70), (300, 90, 7, 70), HEADS, HEADS, HEAD_DIM,
            mask=MaskKind.CAUSAL)  # fmt: skip
TOKENS = sum(CASE.qo_lens)


@pytest.fixture
def planned(target):
    return planned_case(CASE, target)


def test_out_on_k_or_v(planned):
    inputs, wrapper = planned
    for name in ("k", "v"):
        bits = getattr(inputs, name).view(torch.int16)  # garbage that nobody owns is NaN
        before = bits.clone()
        on_it = getattr(inputs, name)[:TOKENS]
        with pytest.raises(ValueError, match=f"out shares memory with {name}"):
            wrapper.run(inputs.q, inputs.k, inputs.v, out=on_it)
        assert torch.equal(bits, before)


def test_out_beside_q(planned):
    inputs, wrapper = planned
    memory = torch.empty(TOKENS + 1, HEADS, HEAD_DIM, dtype=CASE.dtype, device=inputs.q.device)
    q, out = memory[:-1], memory[1:]
    q.copy_(inputs.q)
    with pytest.raises(ValueError, match="out shares memory with q"):
        wrapper.run(q, inputs.k, inputs.v, out=out)


def test_lse_inside_out_or_q(planned):
    inputs, wrapper = planned
    out = torch.empty_like(inputs.q)
    lse = out.view(-1).view(torch.float32)[: TOKENS * HEADS].view(TOKENS, HEADS)
    with pytest.raises(ValueError, match="lse shares memory with out"):
        wrapper.run(inputs.q, inputs.k, inputs.v, out=out, lse=lse)
    lse = inputs.q.view(-1).view(torch.float32)[: TOKENS * HEADS].view(TOKENS, HEADS)
    with pytest.raises(ValueError, match="lse shares memory with q"):
        wrapper.run(inputs.q, inputs.k, inputs.v, lse=lse)


def test_out_in_the_workspace_of_a_split(target):
    case = Case("split", (40,), (600,), HEADS, HEADS, HEAD_DIM, fixed_split_size=64)
    inputs = build(case, device=target.device)
    buffer = runner.workspace(target.device)
    wrapper = runner.make_wrapper(case, backend=target.backend, device=target.device, buffer=buffer)
    runner.plan(wrapper, inputs)
    out = buffer[: inputs.q.numel() * 2].view(case.dtype).view(inputs.q.shape)
    with pytest.raises(ValueError, match="out shares memory with float_workspace_buffer"):
        wrapper.run(inputs.q, inputs.k, inputs.v, out=out)


@pytest.mark.parametrize("at", [0, 1 << 20])
@pytest.mark.parametrize("name", ["out", "lse"])
def test_outputs_in_a_workspace_that_the_plan_does_not_use(target, name, at):
    """A later plan may, and a graph's buffers have room for one."""
    case = dataclasses.replace(CASE, disable_split_kv=True)
    inputs = build(case, device=target.device)
    buffer = runner.workspace(target.device)
    wrapper = runner.make_wrapper(case, backend=target.backend, device=target.device, buffer=buffer)
    runner.plan(wrapper, inputs)
    assert wrapper._plan_info.float_bytes == 0
    shape, dtype = inputs.q.shape, case.dtype
    if name == "lse":
        shape, dtype = shape[:2], torch.float32
    inside = buffer[at:].view(dtype)[: shape.numel()].view(shape)
    for _ in range(3):
        with pytest.raises(ValueError, match=f"{name} shares memory with float_workspace_buffer"):
            wrapper.run(inputs.q, inputs.k, inputs.v, **{name: inside})
        out = torch.empty_like(inputs.q)
        wrapper.run(inputs.q, inputs.k, inputs.v, out=out)
        runner.compare(inputs, out, None).check()


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_inputs_in_the_workspace_of_a_split(target, name):
    case = Case("split", (40,), (600,), HEADS, HEADS, HEAD_DIM, fixed_split_size=64)
    inputs = build(case, device=target.device)
    buffer = runner.workspace(target.device)
    wrapper = runner.make_wrapper(case, backend=target.backend, device=target.device, buffer=buffer)
    runner.plan(wrapper, inputs)
    tensors = {one: getattr(inputs, one) for one in ("q", "k", "v")}
    given = tensors[name]
    tensors[name] = buffer[: given.numel() * 2].view(case.dtype).view(given.shape)
    tensors[name].copy_(given)
    with pytest.raises(ValueError, match=f"float_workspace_buffer shares memory with {name},"):
        wrapper.run(*tensors.values())
    assert torch.equal(tensors[name].view(torch.int16), given.view(torch.int16))


@pytest.mark.parametrize("split", [0, 64])
def test_q_itself_may_be_written(target, split):
    """Many tiles, heads and chunks: an item reads its rows of q before it writes them."""
    case = Case("in_place", (700, 3, 129, 1), (900, 90, 260, 2000), 8, 2, 128,
                mask=MaskKind.CAUSAL, fixed_split_size=split)  # fmt: skip
    inputs = build(case, device=target.device)
    wrapper = runner.make_wrapper(case, backend=target.backend, device=target.device)
    runner.plan(wrapper, inputs)
    expected, expected_lse = wrapper.run(inputs.q, inputs.k, inputs.v, return_lse=True)
    for _ in range(5):
        q = inputs.q.clone()
        out, lse = wrapper.run(q, inputs.k, inputs.v, out=q, return_lse=True)
        assert out is q
        assert torch.equal(out, expected)
        assert torch.equal(lse, expected_lse)


def test_q_itself_where_ctas_share_its_rows(target):
    """Two CTAs of fa3 make half of the columns each: one may write q before the other reads it."""
    case = Case("in_place_512", (70, 3), (90, 260), 4, 2, 512, mask=MaskKind.CAUSAL)
    inputs = build(case, device=target.device)
    wrapper = runner.make_wrapper(case, backend=target.backend, device=target.device)
    runner.plan(wrapper, inputs)
    q = inputs.q.clone()
    if wrapper.variant.startswith("sm90"):
        with pytest.raises(ValueError, match="out shares memory with q"):
            wrapper.run(q, inputs.k, inputs.v, out=q)
        assert torch.equal(q.view(torch.int16), inputs.q.view(torch.int16))
        return
    out, lse = wrapper.run(q, inputs.k, inputs.v, out=q, return_lse=True)
    runner.compare(inputs, out, lse).check()


def test_parts_of_one_packed_tensor(planned):
    """out may lie between k and v where q, k and v are rows of one projection."""
    inputs, wrapper = planned
    tokens = max(TOKENS, sum(CASE.kv_lens))
    packed = torch.zeros(tokens, 4, HEADS, HEAD_DIM, dtype=CASE.dtype, device=inputs.q.device)
    q, k, out, v = (packed[:, i] for i in range(4))
    q[:TOKENS] = inputs.q
    k[: inputs.k.shape[0]], v[: inputs.v.shape[0]] = inputs.k[:tokens], inputs.v[:tokens]
    wrapper.run(q[:TOKENS], k, v, out=out[:TOKENS])
    runner.compare(inputs, out[:TOKENS], None).check()
    by_head = torch.zeros(tokens, HEADS, 4, HEAD_DIM, dtype=CASE.dtype, device=inputs.q.device)
    by_head.copy_(packed.transpose(1, 2))
    q, k, out, v = (by_head[:, :, i] for i in range(4))
    out.zero_()
    wrapper.run(q[:TOKENS], k, v, out=out[:TOKENS])
    runner.compare(inputs, out[:TOKENS], None).check()
    with pytest.raises(ValueError, match="out shares memory with k"):
        wrapper.run(q[:TOKENS], k, v, out=by_head[1 : TOKENS + 1, :, 1])
    with pytest.raises(ValueError, match="out shares memory with v"):
        wrapper.run(q[:TOKENS], k, v, out=packed_shift(by_head, TOKENS))


def packed_shift(by_head: torch.Tensor, tokens: int) -> torch.Tensor:
    """[tokens, heads, head_dim] that begins in out's part and ends in v's."""
    shifted = by_head.view(-1)[2 * HEAD_DIM + 8 :]
    return shifted.as_strided((tokens, HEADS, HEAD_DIM), by_head.select(2, 2).stride())


def test_single_refuses_too(target):
    q = torch.randn(64, 2, 64, device=target.device).half()
    k, v = torch.randn(2, 64, 2, 64, device=target.device).half()
    for name, value in (("k", k), ("v", v)):
        with pytest.raises(ValueError, match=f"out shares memory with {name}"):
            preflash.single_prefill_with_kv_cache(q, k, v, out=value, backend=target.backend)


def test_functions_with_a_workspace_refuse_too(target):
    q = torch.ones(3, 2, 128, dtype=torch.float16, device=target.device)
    memory = runner.workspace(target.device)
    inside = memory.view(q.dtype)[1024:][: q.numel()].view(q.shape)
    lengths = torch.tensor([3], dtype=torch.int32)
    with pytest.raises(ValueError, match="out shares memory with workspace_buffer"):
        preflash.cudnn_batch_prefill_with_kv_cache(
            q, q, q, 0.1, memory, max_token_per_sequence=3, max_sequence_kv=3,
            actual_seq_lens_q=lengths, actual_seq_lens_kv=lengths, causal=True, return_lse=False,
            out=inside, backend=target.backend,
        )  # fmt: skip
    inputs = fmha_problems.build(fmha_problems.FmhaCase((3,), (5,)), target.device)
    arguments = inputs.arguments | {"workspace_buffer": memory}
    out = attention(**arguments, backend=target.backend)
    inside = memory[1024:].view(out.dtype)[: out.numel()].view(out.shape)
    with pytest.raises(ValueError, match="out shares memory with workspace_buffer"):
        attention(**arguments | {"out": inside}, backend=target.backend)


def test_workspaces_share_no_memory(target):
    case = Case("split", (40,), (600,), HEADS, HEADS, HEAD_DIM, fixed_split_size=64)
    inputs = build(case, device=target.device)
    wrapper = runner.make_wrapper(case, backend=target.backend, device=target.device)
    runner.plan(wrapper, inputs)
    memory = runner.workspace(target.device, 4 << 20)
    for buffers in ((memory, memory), (memory[: 3 << 20], memory[2 << 20 :])):
        with pytest.raises(ValueError, match="int_workspace_buffer shares memory with float"):
            wrapper.reset_workspace_buffer(*buffers)
    wrapper.reset_workspace_buffer(memory[: 3 << 20], memory[3 << 20 :])
    out, lse = wrapper.run(inputs.q, inputs.k, inputs.v, return_lse=True)
    runner.compare(inputs, out, lse).check()
