"""A refused call of prefill with decode names its argument and launches neither side, and the
wrapper works on."""

import pytest
import torch
from planned_cases import mistakes, spoil
from pods import BatchPod, Pod
from preflash.testing import Case
from refusals import refused

HEADS, HEAD_DIM, PAGE, ROWS, KEYS = 4, 64, 16, 7, 40
HALF = {"dtype": torch.float16}
SMALL = (
    Case("prefill", (ROWS,), (KEYS,), HEADS, 2, HEAD_DIM, **HALF),
    Case("decode", (1, 1), (21, 9), HEADS, 2, HEAD_DIM, page_size=PAGE, sm_scale=0.3, **HALF),
)


@pytest.fixture(params=[False, True], ids=["one launch", "two launches"])
def pod(target, request):
    """Batch-invariant sides are two launches."""
    made = Pod(target, SMALL)
    made.invariant = request.param
    made.plan(batch_invariant=made.invariant)
    return made


def pair(change):
    return lambda cache: tuple(map(change, cache))


def longer(t):
    return torch.cat([t, t[:1]])


TWO, EITHER = torch.ones(2), (TypeError, ValueError)
# Rows of mistakes().
REFUSED = [
    # Options of the decode side that differ from plan()'s.
    ("kv_layout_d", ValueError, ["HND", "kv_layout_d='HND': the decode side was planned with"],
     ["DHN", "kv_layout_d='DHN': must be one of NHD, HND"]),
    ("pos_encoding_mode_d", ValueError, ["ALIBI", "mode_d='ALIBI'.* planned with 'NONE'"]),
    ("pos_encoding_mode_d", TypeError, [None, "pos_encoding_mode_d must be a str"]),
    ("sm_scale_d", ValueError, [0.31, "sm_scale_d=0.31: the decode side was planned with 0.3"],
     [TWO, "sm_scale_d has 2 elements"]),
    ("window_left_d", ValueError, [5, "window_left_d=5: .* planned with -1; leave it out"],
     [-2, "window_left_d=-2: must be in"]),
    ("window_left_d", TypeError, [TWO, "window_left_d must be an integer"]),
    ("rope_scale_d", ValueError, [2.0, "rope_scale_d=2.0: .* planned with 1.0"]),
    ("rope_theta_d", ValueError, [5e5, "rope_theta_d=500000.0: .* planned with 10000.0"]),
    ("rope_theta_d", TypeError, [TWO, "rope_theta_d must be a float"]),
    ("custom_mask_d", ValueError, [TWO, "custom_mask_d: plan.. made the decode side"]),
    ("packed_custom_mask_d", ValueError, [TWO, "packed_custom_mask_d: plan"]),
    # Options of the prefill side, and of both.
    ("kv_layout_p", ValueError, ["DHN", "prefill side: kv_layout='DHN'"]),
    ("window_left_p", ValueError, [-2, "prefill side: window_left=-2"]),
    ("sm_scale_p", ValueError, [TWO, "prefill side: sm_scale has 2 elements; must be a"]),
    ("return_lse_p", EITHER, [2, "return_lse_p must be True or False"]),
    ("custom_mask_p", ValueError, [torch.ones(KEYS, ROWS) > 0, "prefill side: custom_mask"]),
    ("packed_custom_mask_p", ValueError,
     [torch.ones(ROWS, KEYS).byte(), "packed_custom_mask has .* custom_mask="]),
    ("q_scale", ValueError, [TWO, "q_scale has 2 elements"]),
    # Tensors.
    ("q_p", ValueError, [lambda t: t[:, :3], "prefill side: num_qo_heads = 3"]),
    ("q_p", TypeError, [None, "prefill side: q_p"]),
    ("v_p", ValueError, [lambda t: t[:-1], r"prefill side: v has \d+ tokens and k"]),
    ("q_d", ValueError, [lambda t: t[:-1], "decode side: q has 1 rows"]),
    ("q_d", TypeError, [torch.Tensor.float, "decode side: q is torch"]),
    ("paged_kv_cache_d", TypeError,
     [lambda cache: cache[:1] * 3, "decode side: paged_kv_cache must be a tensor or a tuple"]),
    ("paged_kv_cache_d", EITHER, [pair(lambda x: x[:, : PAGE // 2]), "decode side"],
     [pair(torch.Tensor.float), "decode side"]),
    ("out_d", ValueError, [longer, "decode side: out"]),
    ("lse_d", ValueError, [longer, "decode side: lse"]),
]  # fmt: skip


def check_refusal(pod, changed: dict, error, says) -> None:
    """The first run() is refused, and one after a run that passed every check."""
    given = {**pod.tensors(), **pod.outputs(), **changed}
    tensors = {name: t for name, t in given.items() if isinstance(t, torch.Tensor)}
    before = {name: t.clone() for name, t in tensors.items()}
    for _ in range(2):
        refused(says, pod.run, error=error, **given)
        for name, value in tensors.items():
            assert torch.equal(value.view(torch.uint8), before[name].view(torch.uint8)), name
        pod.check()


@pytest.mark.parametrize(("argument", "value", "error", "says"), mistakes(*REFUSED))
def test_run(pod, argument, value, error, says):
    changed = {**pod.tensors(), **pod.outputs()}
    spoil(changed, argument, value)
    check_refusal(pod, {argument: changed[argument]}, error, says)


def fresh(pod):
    return torch.zeros(ROWS, HEADS, HEAD_DIM, dtype=torch.float16, device=pod.device)


def beginning(memory, like):
    return memory.view(-1).view(like.dtype)[: like.numel()].view(like.shape)


# Arguments at the beginning of one memory, and both sides of the message.
SHARED = [
    (("out_p", "out_d"), fresh, "prefill side's out", "decode side's out"),
    (("out_p", "q_d"), fresh, "prefill side's out", "decode side's q"),
    (("lse_p", "out_d"), fresh, "prefill side's lse", "decode side's out"),
    (("out_p",), lambda pod: pod.decode.k, "prefill side's out", "decode side's k"),
    (("out_d",), lambda pod: pod.prefill.v, "decode side's out", "prefill side's v"),
    (("out_d",), lambda pod: pod.prefill.q, "decode side's out", "prefill side's q"),
    (("out_d",), lambda pod: pod.decode.k, "decode side(: |'s )out", ""),
    (("lse_d",), lambda pod: pod.prefill.q, "decode side's lse", "prefill side's q"),
    (("out_p",), lambda pod: pod.workspace, "prefill side's out", "float_workspace_buffer"),
    (("out_d",), lambda pod: pod.workspace, "decode side's out", "float_workspace_buffer"),
]


@pytest.mark.parametrize(("names", "memory", "output", "other"), SHARED)
def test_memory_that_outputs_share(pod, names, memory, output, other):
    given, right = memory(pod), {**pod.tensors(), **pod.outputs()}
    changed = {name: beginning(given, right[name]) for name in names}
    check_refusal(pod, changed, ValueError, f"{output} shares memory with {other}")


def test_tensors_that_require_grad(pod):
    """Inputs are refused, and so are outputs, whose old values autograd would use; before and after
    runs that passed every check."""
    given = {**pod.tensors(), **pod.outputs()}
    given["paged_kv_cache_d"] = torch.stack((pod.decode.k, pod.decode.v), 1)
    outputs = {name: given[name] for name in pod.outputs()}
    for name, value in [*given.items()] * 2:
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
    options = {"kv_layout_d": "NHD", "pos_encoding_mode_d": "NONE", "causal_d": True}
    options |= {"rope_scale_d": 1.0, "rope_theta_d": 1e4, "use_fp16_qk_reduction": True}
    for scale, window_left in ((0.3, -1), (torch.tensor([0.3]), torch.tensor(-1))):
        pod.check(sm_scale_d=scale, window_left_d=window_left, enable_pdl=True, **options)
    assert pod.wrapper.launches == 2 or not pod.invariant


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
    (
        Pod,
        "run_by_position",
        {"more": [None] * 25 + [7]},
        TypeError,
        "positional arguments too many",
    ),
    (Pod, "remake", {"jit_args": [1]}, NotImplementedError, "jit_args"),
    (BatchPod, "plan", backwards(1), ValueError, "prefill side: .*indptr"),
    (BatchPod, "plan", backwards(5), ValueError, "decode side: .*indptr"),
    (BatchPod, "run", {"custom_mask_p": TWO > 0}, ValueError, "prefill side: custom_mask"),
    (BatchPod, "run", {"causal_p": "yes"}, EITHER, "causal_p"),
]


@pytest.mark.parametrize(("kind", "method", "changes", "error", "match"), OTHER_CALLS)
def test_other_calls(target, kind, method, changes, error, match):
    pod = kind(target)
    refused("before plan", pod.run)
    pod.plan()
    calls = {
        "plan": pod.plan,
        "run": pod.run,
        "run_by_position": lambda more: pod.wrapper.run(*pod.tensors().values(), *more),
        "remake": lambda **options: kind(target, **options),
    }
    refused(match, calls[method], error=error, **changes(pod) if callable(changes) else changes)
    pod.check()
