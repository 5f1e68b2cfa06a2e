"""A refused call of prefill with decode names its argument and launches neither side, and the
wrapper works on."""

import re

import pytest
import torch
from pods import DECODE, BatchPod, Pod
from preflash.testing import Case

HEADS, HEAD_DIM, PAGE, ROWS, KEYS = 4, 64, 16, 7, 40
HALF = {"dtype": torch.float16}
SMALL = (
    Case("prefill", (ROWS,), (KEYS,), HEADS, 2, HEAD_DIM, **HALF),
    Case("decode", (1, 1), (21, 9), HEADS, 2, HEAD_DIM, page_size=PAGE, sm_scale=0.3, **HALF),
)


@pytest.fixture(params=[1, 2], ids=["one launch", "two launches"])
def pod(target, request):
    if request.param == 2:
        request.getfixturevalue("two_launches")
    made = Pod(target, SMALL)
    made.prefill.k, made.prefill.v = made.prefill.k[:KEYS], made.prefill.v[:KEYS]
    made.plan()
    return made


def on(memory, rows: int, *dims: int, dtype=torch.float16):
    """Returns a tensor [rows, HEADS, *dims] at the beginning of other memory."""
    shape = torch.Size((rows, HEADS, *dims))
    return memory.view(-1).view(dtype)[: shape.numel()].view(shape)


def q(pod, rows: int = ROWS):
    return torch.zeros(rows, HEADS, HEAD_DIM, dtype=torch.float16, device=pod.device)


def on_q(pod):
    memory = q(pod, ROWS + 2)
    return {"out_p": memory[:ROWS], "q_d": memory[:2]}


def outs_overlap(pod):
    memory = q(pod, ROWS + 2)
    return {"out_p": memory[:ROWS], "out_d": memory[ROWS - 1 : ROWS + 1]}


def lse_on_out(pod):
    memory = q(pod)
    return {"out_d": memory[:2], "lse_p": on(memory, ROWS, dtype=torch.float32)}


def pair(change):
    """Changes the decode side's cache, as (k, v)."""
    return lambda pod: {"paged_kv_cache_d": tuple(change(x) for x in (pod.decode.k, pod.decode.v))}


def placed(name: str, output: str, memory, other: str):
    """Returns a row of the table, with an output at the beginning of other memory."""

    def place(pod):
        rows = ROWS if name.endswith("_p") else 2
        if name.startswith("lse"):
            return {name: on(memory(pod), rows, dtype=torch.float32)}
        return {name: on(memory(pod), rows, HEAD_DIM)}

    return place, ValueError, f"{output} {SHARES} {other}"


SHARES = "shares memory with"
# changes of run()'s arguments, exception, piece of its message
REFUSED = [
    # Options of the decode side that differ from plan()'s.
    ({"kv_layout_d": "HND"}, ValueError, "kv_layout_d='HND': the decode side was planned with"),
    ({"kv_layout_d": "DHN"}, ValueError, "kv_layout_d='DHN': must be one of NHD, HND"),
    ({"pos_encoding_mode_d": "ALIBI"}, ValueError, "mode_d='ALIBI'.* planned with 'NONE'"),
    ({"pos_encoding_mode_d": None}, TypeError, "pos_encoding_mode_d must be a str"),
    ({"sm_scale_d": 0.31}, ValueError, "sm_scale_d=0.31: the decode side was planned with 0.3"),
    ({"sm_scale_d": torch.ones(2)}, ValueError, "sm_scale_d has 2 elements"),
    ({"window_left_d": 5}, ValueError, "window_left_d=5: .* planned with -1; leave it out"),
    ({"window_left_d": -2}, ValueError, "window_left_d=-2: must be in"),
    ({"window_left_d": torch.ones(2)}, TypeError, "window_left_d must be an integer"),
    ({"rope_scale_d": 2.0}, ValueError, "rope_scale_d=2.0: .* planned with 1.0"),
    ({"rope_theta_d": 5e5}, ValueError, "rope_theta_d=500000.0: .* planned with 10000.0"),
    ({"rope_theta_d": torch.ones(2)}, TypeError, "rope_theta_d must be a float"),
    ({"custom_mask_d": torch.ones(3)}, ValueError, "custom_mask_d: plan.. made the decode side"),
    ({"packed_custom_mask_d": torch.ones(3)}, ValueError, "packed_custom_mask_d: plan"),
    # Options of the prefill side, and of both.
    ({"kv_layout_p": "DHN"}, ValueError, "prefill side: kv_layout='DHN'"),
    ({"window_left_p": -2}, ValueError, "prefill side: window_left=-2"),
    ({"sm_scale_p": torch.ones(2)}, ValueError, "prefill side: sm_scale has 2 elements; must be a"),
    ({"return_lse_p": 2}, (TypeError, ValueError), "return_lse_p must be True or False"),
    ({"custom_mask_p": torch.ones(KEYS, ROWS) > 0}, ValueError, "prefill side: custom_mask"),
    (
        lambda pod: {"packed_custom_mask_p": q(pod)[:, 0, :KEYS].byte().contiguous()},
        ValueError,
        "packed_custom_mask has .* custom_mask=",
    ),
    ({"q_scale": torch.ones(2)}, ValueError, "q_scale has 2 elements"),
    # Tensors of the prefill side.
    (lambda pod: {"q_p": pod.prefill.q[:, :3]}, ValueError, "prefill side: num_qo_heads = 3"),
    ({"q_p": None}, TypeError, "prefill side: q_p"),
    (lambda pod: {"v_p": pod.prefill.v[:-1]}, ValueError, r"prefill side: v has \d+ tokens and k"),
    # Tensors of the decode side.
    (lambda pod: {"q_d": pod.decode.q[:-1]}, ValueError, "decode side: q has 1 rows"),
    (lambda pod: {"q_d": pod.decode.q.float()}, TypeError, "decode side: q is torch"),
    (
        lambda pod: {"paged_kv_cache_d": (pod.decode.k,) * 3},
        TypeError,
        "decode side: paged_kv_cache must be a tensor or a tuple",
    ),
    (pair(lambda x: x[:, : PAGE // 2]), (TypeError, ValueError), "decode side"),
    (pair(torch.Tensor.float), (TypeError, ValueError), "decode side"),
    (lambda pod: {"out_d": q(pod, 3)}, ValueError, "decode side: out"),
    (lambda pod: {"lse_d": q(pod, 3)[..., 0].float()}, ValueError, "decode side: lse"),
    # Memory that outputs share.
    (outs_overlap, ValueError, f"prefill side's out {SHARES} decode side's out"),
    (on_q, ValueError, f"prefill side's out {SHARES} decode side's q"),
    (lse_on_out, ValueError, f"prefill side's lse {SHARES} decode side's out"),
    placed("out_p", "prefill side's out", lambda pod: pod.decode.k, "decode side's k"),
    placed("out_d", "decode side's out", lambda pod: pod.prefill.v, "prefill side's v"),
    placed("out_d", "decode side's out", lambda pod: pod.prefill.q, "prefill side's q"),
    placed("out_d", "decode side(: |'s )out", lambda pod: pod.decode.k, ""),
    placed("lse_d", "decode side's lse", lambda pod: pod.prefill.q, "prefill side's q"),
    placed("out_p", "prefill side's out", lambda pod: pod.workspace, "float_workspace_buffer"),
    placed("out_d", "decode side's out", lambda pod: pod.workspace, "float_workspace_buffer"),
]


def refusal_id(value) -> str:
    return re.sub(r"[^a-z_' ]", "", value)[:40] if isinstance(value, str) else ""


@pytest.mark.parametrize(("changes", "error", "match"), REFUSED, ids=refusal_id)
def test_run(pod, changes, error, match):
    """The first run() is refused, and one after a run that passed every check."""
    changes = changes(pod) if callable(changes) else changes
    given = {**pod.tensors(), **pod.outputs(), **changes}
    tensors = {name: t for name, t in given.items() if isinstance(t, torch.Tensor)}
    before = {name: t.clone() for name, t in tensors.items()}
    for _ in range(2):
        with pytest.raises(error, match=match):
            pod.run(**given)
        for name, value in tensors.items():
            assert torch.equal(value.view(torch.uint8), before[name].view(torch.uint8)), name
        pod.check()


@pytest.mark.parametrize("runs_before", [0, 2])
def test_tensors_that_require_grad(pod, runs_before):
    """Inputs are refused, and so are outputs, whose old values autograd would use."""
    for _ in range(runs_before):
        pod.run()
    given = {**pod.tensors(), **pod.outputs()}
    given["paged_kv_cache_d"] = torch.stack((pod.decode.k, pod.decode.v), 1)
    outputs = {name: given[name] for name in pod.outputs()}
    for name, value in given.items():
        side = "prefill" if name.endswith("_p") else "decode"
        leaf = {name: value.clone().requires_grad_()}
        for output in outputs.values():
            output.fill_(torch.nan)
        with pytest.raises(NotImplementedError, match=f"^{side} side: {name[:-2]} requires grad"):
            pod.run(**{**given, **leaf})
        written = [output for key, output in outputs.items() if key != name]
        assert all(bool(output.isnan().all()) for output in written), name
        with torch.no_grad():
            pod.run(**{**given, **leaf})
        assert not any(bool(output.isnan().any()) for output in written), name


def test_inside_of_vmap(pod):
    both = torch.stack([pod.decode.q, pod.decode.q])
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^decode side: q has no memory .*torch\.func"):
            torch.vmap(lambda q: pod.run(q_d=q))(both)
        pod.run()


def test_parts_of_one_tensor_are_apart(pod):
    """Columns of one memory, in one side and across sides, are accepted; and so is q itself."""
    wide = torch.zeros(ROWS, HEADS, 3 * HEAD_DIM, dtype=torch.float16, device=pod.device)
    out_p, out_d, q_p = wide.split(HEAD_DIM, dim=-1)
    q_p.copy_(pod.prefill.q)
    q_d = pod.decode.q.clone()
    pod.check(q_p=q_p, q_d=q_d, out_p=out_p, out_d=out_d[:2])
    pod.check(q_p=q_p, q_d=q_d, out_p=q_p, out_d=q_d)


def test_options_may_be_repeated(pod):
    repeated = {
        "causal_d": True,
        "kv_layout_d": "NHD",
        "pos_encoding_mode_d": "NONE",
        "rope_scale_d": 1.0,
        "rope_theta_d": 1e4,
        "use_fp16_qk_reduction": True,
        "enable_pdl": True,
    }
    pod.check(sm_scale_d=0.3, window_left_d=-1, **repeated)
    pod.check(sm_scale_d=torch.tensor([0.3]), window_left_d=torch.tensor(-1), **repeated)


@pytest.mark.parametrize("kind", [Pod, BatchPod])
def test_run_before_plan_and_with_too_many_arguments(target, kind):
    pod = kind(target)
    with pytest.raises(ValueError, match="before plan"):
        pod.run()
    pod.plan()
    if kind is Pod:  # whose run() has *args
        with pytest.raises(TypeError, match="positional arguments too many"):
            pod.wrapper.run(*pod.tensors().values(), *([None] * 25), 7)


def backwards(place: int):
    def arrays(pod):
        found = pod.arrays()
        found[place] = found[place].flip(0).contiguous()
        return {"arrays": found}

    return arrays


# The wrapper, its method, changes of the method's arguments, exception and piece of the message.
OTHER_CALLS = [
    *((kind, "plan", {"window_left": -7}, ValueError, "window_left") for kind in (Pod, BatchPod)),
    (Pod, "plan", {"pos_encoding_mode": "SPIN"}, ValueError, "pos_encoding_mode"),
    (BatchPod, "plan", backwards(1), ValueError, "prefill side: .*indptr"),
    (BatchPod, "plan", backwards(5), ValueError, "decode side: .*indptr"),
    (
        BatchPod,
        "run",
        {"custom_mask_p": torch.ones(7) > 0},
        ValueError,
        "prefill side: custom_mask",
    ),
    (BatchPod, "run", {"causal_p": "yes"}, (TypeError, ValueError), "causal_p"),
]


@pytest.mark.parametrize(("kind", "method", "changes", "error", "match"), OTHER_CALLS)
def test_other_calls(target, kind, method, changes, error, match):
    pod = kind(target)
    pod.plan()
    with pytest.raises(error, match=match):
        getattr(pod, method)(**(changes(pod) if callable(changes) else changes))
    pod.check()


def test_constructor(target):
    with pytest.raises(NotImplementedError, match="jit_args"):
        Pod(target, (SMALL[0], DECODE), jit_args=[1])
