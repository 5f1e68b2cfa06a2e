"""Refusals of a run of prefill and decode, as one launch or two: each names the argument, and
nothing is written."""

import preflash
import pytest
import torch
from preflash._pod import pod_plan
from preflash.testing import runner

HEADS, KV_HEADS, HEAD_DIM, PAGE, ROWS, KEYS = 4, 2, 64, 16, 7, 40


@pytest.fixture(params=[1, 2], ids=["one launch", "two launches"])
def pod(target, monkeypatch, request):
    if request.param == 2:
        monkeypatch.setattr(pod_plan, "_forced_apart", True)
    return Pod(target)


class Pod:
    """A planned wrapper, and tensors that fit."""

    def __init__(self, target):
        self.device = target.device
        self.wrapper = preflash.PODWithPagedKVCacheWrapper(
            runner.workspace(self.device), backend=target.backend
        )
        arrays = (torch.tensor(n, dtype=torch.int32) for n in ([0, 2, 3], [0, 1, 2], [5, 9]))
        self.wrapper.plan(*arrays, HEADS, KV_HEADS, HEAD_DIM, PAGE, sm_scale=0.3)
        self.q_p = self.tensor(ROWS, HEADS, HEAD_DIM)
        self.k_p, self.v_p = (self.tensor(KEYS, KV_HEADS, HEAD_DIM) for _ in "kv")
        self.q_d = self.tensor(2, HEADS, HEAD_DIM)
        self.cache = self.tensor(3, 2, PAGE, KV_HEADS, HEAD_DIM)

    def tensor(self, *shape):
        return torch.randn(*shape, device="cpu").to(self.device, torch.float16)

    def run(self, **options):
        names = ("q_p", "k_p", "v_p", "q_d")
        tensors = [options.pop(name, getattr(self, name)) for name in names]
        return self.wrapper.run(*tensors, options.pop("cache", self.cache), **options)


def on(memory, *shape, dtype=torch.float16):
    """A tensor of this shape at the beginning of other memory."""
    count = torch.Size(shape).numel()
    return memory.view(-1).view(dtype)[:count].view(shape)


def test_outputs_on_the_other_side(pod):
    memory = pod.tensor(ROWS + 2, HEADS, HEAD_DIM)
    both, rows = (ROWS, HEADS, HEAD_DIM), (2, HEADS, HEAD_DIM)
    pod.run()
    for options, message in (
        ({"out_p": memory[:ROWS], "out_d": memory[ROWS - 1 : ROWS + 1]},
         "prefill side's out shares memory with decode side's out"),
        ({"out_p": memory[:ROWS], "q_d": memory[:2]},
         "prefill side's out shares memory with decode side's q"),
        ({"out_p": on(pod.cache, *both)}, "prefill side's out shares memory with decode side's k"),
        ({"out_d": on(pod.v_p, *rows)}, "decode side's out shares memory with prefill side's v"),
        ({"out_d": pod.q_p[:2]}, "decode side's out shares memory with prefill side's q"),
        ({"lse_d": on(pod.q_p, 2, HEADS, dtype=torch.float32)},
         "decode side's lse shares memory with prefill side's q"),
        ({"out_d": memory[:2], "lse_p": on(memory, ROWS, HEADS, dtype=torch.float32)},
         "prefill side's lse shares memory with decode side's out"),
    ):  # fmt: skip
        before = [t.clone() for t in (memory, pod.cache, pod.q_p, pod.v_p)]
        with pytest.raises(ValueError, match=message):
            pod.run(**options)
        after = (memory, pod.cache, pod.q_p, pod.v_p)
        assert all(map(torch.equal, before, after)), message


def test_parts_of_one_tensor_are_apart(pod):
    """Columns of one memory, in either side and across them; and q itself."""
    expected = pod.run()
    wide = pod.tensor(ROWS, HEADS, 3 * HEAD_DIM)
    out_p, out_d, q_p = wide.split(HEAD_DIM, dim=-1)
    q_p.copy_(pod.q_p)
    q_d = pod.q_d.clone()
    got = pod.run(q_p=q_p, q_d=q_d, out_p=out_p, out_d=out_d[:2])
    assert all(map(torch.equal, got, expected))
    got = pod.run(q_p=q_p, q_d=q_d, out_p=q_p, out_d=q_d)
    assert all(map(torch.equal, got, expected))


def test_nothing_is_launched_for_a_wrong_decode_side(pod):
    """The decode side's q passed in a run before, so its cached checks are skipped."""
    pod.run()
    with pytest.raises(TypeError, match="decode side: paged_kv_cache must be a tensor or a tuple"):
        pod.run(cache=(pod.cache[:, 0],) * 3)
    out_p = torch.full_like(pod.q_p, torch.nan)
    lse_p = out_p.new_full((ROWS, HEADS), torch.nan, dtype=torch.float32)
    for options in (
        {"cache": pod.cache[:, :, : PAGE // 2]},
        {"cache": pod.cache.float()},
        {"out_d": pod.tensor(3, HEADS, HEAD_DIM)},
        {"lse_d": pod.tensor(3, HEADS).float()},
        {"out_d": on(pod.cache, 2, HEADS, HEAD_DIM)},
    ):
        with pytest.raises((TypeError, ValueError), match="decode side"):
            pod.run(out_p=out_p, lse_p=lse_p, **options)
        assert out_p.isnan().all()
        assert lse_p.isnan().all()


@pytest.mark.parametrize("runs_before", [0, 2])
def test_nothing_is_launched_for_what_requires_grad(pod, runs_before):
    """Inputs, and outputs, with whose old values autograd would go on."""
    outputs = {
        f"{name}_{side}": pod.tensor(rows, HEADS, *dims).to(dtype)
        for side, rows in (("p", ROWS), ("d", 2))
        for name, dims, dtype in (("out", (HEAD_DIM,), torch.float16), ("lse", (), torch.float32))
    }
    given = {name: getattr(pod, name) for name in ("q_p", "k_p", "v_p", "q_d", "cache")} | outputs
    for _ in range(runs_before):
        pod.run(**given)
    for name, value in given.items():
        side, what = ("prefill", name[:-2]) if name.endswith("_p") else ("decode", name[:-2])
        what = "paged_kv_cache" if name == "cache" else what
        for output in outputs.values():
            output.fill_(torch.nan)
        leaf = value.clone().requires_grad_()
        with pytest.raises(NotImplementedError, match=f"^{side} side: {what} requires grad"):
            pod.run(**{**given, name: leaf})
        written = [output for key, output in outputs.items() if key != name]
        assert all(bool(output.isnan().all()) for output in written), name
        with torch.no_grad():
            pod.run(**{**given, name: leaf})
        assert not any(bool(output.isnan().any()) for output in written), name


def test_outputs_in_the_workspace(pod):
    """Outputs in an unused part of the workspace are refused before either side is launched."""
    memory = pod.wrapper._decode._float_workspace_buffer
    for name, side, rows in (("out_p", "prefill", ROWS), ("out_d", "decode", 2)):
        other = {"out_p": "out_d", "out_d": "out_p"}[name]
        out = torch.full((ROWS + 2 - rows, HEADS, HEAD_DIM), torch.nan, device=pod.device).half()
        inside = on(memory, rows, HEADS, HEAD_DIM)
        with pytest.raises(
            ValueError, match=f"{side} side's out shares memory with float_workspace_buffer"
        ):
            pod.run(**{name: inside, other: out})
        assert bool(out.isnan().all())
    pod.run()


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("sm_scale_d", torch.ones(2), "sm_scale_d has 2 elements"),
        ("sm_scale_d", 0.31, "sm_scale_d=0.31: the decode side was planned with 0.3"),
        ("window_left_d", torch.ones(2), "window_left_d must be an integer"),
        ("window_left_d", -2, "window_left_d=-2: must be in"),
        ("window_left_d", 5, "window_left_d=5: the decode side was planned with -1"),
        ("rope_theta_d", torch.ones(2), "rope_theta_d must be a float"),
        ("kv_layout_d", "DHN", "kv_layout_d='DHN': must be one of NHD, HND"),
        ("pos_encoding_mode_d", None, "pos_encoding_mode_d must be a str"),
        ("sm_scale_p", torch.ones(2), "prefill side: sm_scale has 2 elements; must be a float or"),
        ("return_lse_p", 2, "return_lse_p must be True or False"),
        ("custom_mask_p", torch.ones(KEYS, ROWS, dtype=torch.bool), "prefill side: custom_mask"),
    ],
)
def test_options_are_refused_by_name(pod, option, value, message):
    expected = pod.run()
    with pytest.raises((TypeError, ValueError), match=message):
        pod.run(**{option: value})
    assert all(map(torch.equal, pod.run(), expected))


def test_options_may_be_repeated_in_tensors(pod):
    expected = pod.run()
    repeated = {"sm_scale_d": torch.tensor([0.3]), "window_left_d": torch.tensor(-1)}
    assert all(map(torch.equal, pod.run(**repeated, rope_scale_d=1.0), expected))


def test_inside_of_vmap(pod):
    both = torch.stack([pod.q_d, pod.q_d])
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^decode side: q has no memory .*torch\.func"):
            torch.vmap(lambda q: pod.run(q_d=q))(both)
        pod.run()
