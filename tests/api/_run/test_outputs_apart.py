"""out and lse need memory of their own; q itself may be written to, and packed tensors shared."""

import functools

import preflash
import pytest
import torch
from planned_cases import planned
from preflash.testing import Case, MaskKind, build, runner
from refusals import refused

HEADS, HEAD_DIM = 4, 64
CASE = Case("apart", (200, 3, 0, 70), (300, 90, 7, 70), HEADS, HEADS, HEAD_DIM,
            mask=MaskKind.CAUSAL, disable_split_kv=True)  # fmt: skip
SPLIT = Case("split", (40,), (600,), HEADS, HEADS, HEAD_DIM, fixed_split_size=64)
TOKENS = sum(CASE.qo_lens)


def on(memory: torch.Tensor, like: torch.Tensor, begin: int = 0, *, lse: bool = False):
    """Returns a tensor like q, or for its LSE, in other memory from one of its elements on."""
    shape, dtype = (like.shape[:2], torch.float32) if lse else (like.shape, like.dtype)
    return memory.view(-1)[begin:].view(dtype)[: shape.numel()].view(shape)


def a_row_after_q(inputs, _):
    memory = torch.cat([inputs.q, inputs.q[:1]])
    return {"q": memory[:-1], "out": memory[1:]}


def q_of_other_strides(inputs, _):
    memory = torch.cat([inputs.q, inputs.q], 1)
    return {"q": memory[:, :HEADS], "out": on(memory, inputs.q)}


def lse_in_out(inputs, _):
    out = torch.empty_like(inputs.q)
    return {"out": out, "lse": on(out, out, lse=True)}


def lse_in_sinks(inputs, _):
    lse = torch.zeros(inputs.q.shape[0], HEADS, device=inputs.q.device)
    return {"lse": lse, "sinks": lse[-1]}


# Outputs, q and sinks, made of inputs and a workspace. Where a plan does not use the workspace, a
# later plan may, and graphs reserve memory there.
SHARED = {
    "out shares memory with k": [lambda x, _: {"out": on(x.k, x.q)}],
    "out shares memory with v": [lambda x, _: {"out": on(x.v, x.q)}],
    "out shares memory with q": [a_row_after_q, q_of_other_strides],
    "lse shares memory with q": [lambda x, _: {"lse": on(x.q, x.q, lse=True)}],
    "lse shares memory with out": [lse_in_out],
    "lse shares memory with sinks": [lse_in_sinks],
    "out shares memory with float_workspace_buffer": [
        lambda x, workspace: {"out": on(workspace, x.q)},
        lambda x, workspace: {"out": on(workspace, x.q, 1 << 20)},
    ],
    "lse shares memory with float_workspace_buffer": [
        lambda x, workspace: {"lse": on(workspace, x.q, lse=True)},
        lambda x, workspace: {"lse": on(workspace, x.q, 1 << 20, lse=True)},
    ],
}


def inside(name: str):
    return lambda x, workspace: {name: on(workspace, getattr(x, name)).copy_(getattr(x, name))}


IN_WORKSPACE = {
    f"float_workspace_buffer shares memory with {name},": [inside(name)] for name in "qkv"
}
ROWS = [(CASE, *row) for row in SHARED.items()]
ROWS += [(SPLIT, *row) for row in (SHARED | IN_WORKSPACE).items()]


@pytest.mark.parametrize(("case", "says", "places"), ROWS)
def test_shared_memory(target, case, says, places):
    """run() refuses shared memory in a first call, and after calls that it remembers."""
    inputs = build(case, device=target.device)
    workspace = runner.workspace(target.device)
    wrapper = runner.make_wrapper(case, backend=target.backend, buffer=workspace)
    positional, options = runner.plan_arguments(inputs)
    assert (wrapper.workspace_size(*positional, **options)[0] > 0) == (case is SPLIT)
    for place in places:
        runner.plan(wrapper, inputs)
        given = {"q": inputs.q, "k": inputs.k, "v": inputs.v, **place(inputs, workspace)}
        for _ in range(3):
            before = [t.clone().view(torch.uint8) for t in given.values()]
            refused(says, wrapper.run, **given)
            assert all(map(torch.equal, before, (t.view(torch.uint8) for t in given.values())))
            out = torch.empty_like(inputs.q)
            wrapper.run(inputs.q, inputs.k, inputs.v, out=out)
            runner.compare(inputs, out, None).check()


@pytest.mark.parametrize("split", [0, 64])
def test_q_itself_may_be_written(target, split):
    """Many tiles, heads and chunks: an item reads its rows of q before it writes them."""
    case = Case("in_place", (700, 3, 129, 1), (900, 90, 260, 2000), 8, 2, 128,
                mask=MaskKind.CAUSAL, fixed_split_size=split)  # fmt: skip
    inputs, wrapper = planned(case, target)
    expected, expected_lse = wrapper.run(inputs.q, inputs.k, inputs.v, return_lse=True)
    for _ in range(3):
        q = inputs.q.clone()
        out, lse = wrapper.run(q, inputs.k, inputs.v, out=q, return_lse=True)
        assert out is q
        assert torch.equal(out, expected)
        assert torch.equal(lse, expected_lse)


def test_q_itself_if_ctas_share_its_rows(target):
    """Two CTAs of fa3 make half of the columns each: one may write q before the other reads it."""
    case = Case("in_place_512", (70, 3), (90, 260), 4, 2, 512, mask=MaskKind.CAUSAL)
    inputs, wrapper = planned(case, target)
    q = inputs.q.clone()
    if wrapper.variant.startswith("sm90"):
        refused("out shares memory with q", wrapper.run, q, inputs.k, inputs.v, out=q)
        assert torch.equal(q.view(torch.int16), inputs.q.view(torch.int16))
        return
    out, lse = wrapper.run(q, inputs.k, inputs.v, out=q, return_lse=True)
    runner.compare(inputs, out, lse).check()


@pytest.mark.parametrize("dim", [1, 2], ids=["by_token", "by_head"])
def test_parts_of_one_packed_tensor(target, dim):
    """out may lie between k and v if q, k and v are rows of one projection."""
    inputs, wrapper = planned(CASE, target)
    tokens = max(TOKENS, sum(CASE.kv_lens))
    parts = [torch.zeros(tokens, HEADS, HEAD_DIM, dtype=CASE.dtype) for _ in range(4)]
    packed = torch.stack(parts, dim).to(target.device)
    q, k, out, v = packed.unbind(dim)
    q[:TOKENS] = inputs.q
    k[: inputs.k.shape[0]], v[: inputs.v.shape[0]] = inputs.k[:tokens], inputs.v[:tokens]
    run = functools.partial(wrapper.run, q[:TOKENS], k, v)
    run(out=out[:TOKENS])
    runner.compare(inputs, out[:TOKENS], None).check()
    wrong = [("k", k[1 : TOKENS + 1])]
    if dim == 2:  # begins in out's part and ends in v's, or begins in k's and ends in out's
        for name, shift in (("v", 8), ("k", -8)):
            shifted = packed.view(-1)[2 * HEAD_DIM + shift :]
            wrong.append((name, shifted.as_strided(out[:TOKENS].shape, out.stride())))
    for name, other in wrong:
        refused(f"out shares memory with {name}", run, out=other)


def test_single_requests(target):
    """test_cudnn.py and test_fmha_v2_refusals.py have the other functions."""
    x, y, z = torch.randn(3, 3, 2, 128, device=target.device).half()
    single = functools.partial(preflash.single_prefill_with_kv_cache, backend=target.backend)
    refused("out shares memory with k", single, x, y, z, out=y)
    refused("out shares memory with v", single, x, y, z, out=z)


def test_workspaces_share_no_memory(target):
    inputs, wrapper = planned(SPLIT, target)
    memory = runner.workspace(target.device, 4 << 20)
    for buffers in ((memory, memory), (memory[: 3 << 20], memory[2 << 20 :])):
        says = "int_workspace_buffer shares memory with float"
        refused(says, wrapper.reset_workspace_buffer, *buffers)
    wrapper.reset_workspace_buffer(memory[: 3 << 20], memory[3 << 20 :])
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()
