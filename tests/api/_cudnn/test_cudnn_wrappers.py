"""backend="cudnn" of the batch wrappers, on a fake cuDNN that computes from declared strides."""

import copy
import dataclasses
import itertools
import math

import preflash
import pytest
import torch
from fake_cudnn import FakeCudnn, install
from preflash._cudnn import graph as _graph
from preflash.cli.batches import batches
from preflash.cli.bench import baselines
from preflash.cli.bench.rows import Baseline, Row, quick_rows
from preflash.testing import Case, KvForm, MaskKind, build, poison, runner

QO_LENS, KV_LENS = (3, 0, 17, 4, 1, 40), (9, 8, 33, 0, 21, 12)


def make_case(page_size, layout="NHD", *, dims=(128, 128), causal=True, form=KvForm.SEPARATE):
    return Case(
        "cudnn", QO_LENS, KV_LENS, 6, 2, dims[0], dims[1], torch.float16, page_size, layout, form,
        MaskKind.CAUSAL if causal else MaskKind.NONE, sm_scale=0.11,
    )  # fmt: skip


PAGED, RAGGED = make_case(16), make_case(0)
BOTH = pytest.mark.parametrize("case", [RAGGED, PAGED], ids=["ragged", "paged"])


@pytest.fixture
def fake(monkeypatch):
    return install(monkeypatch, FakeCudnn())


def planned(case, **options):
    inputs = build(case)
    wrapper = runner.make_wrapper(case, backend="cudnn")
    runner.plan(wrapper, inputs, **options)
    return inputs, wrapper


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [0, 1, 16])
@pytest.mark.parametrize("dims", [(128, 128), (192, 128)])
def test_numbers(fake, page_size, layout, causal, dims):
    inputs, wrapper = planned(make_case(page_size, layout, dims=dims, causal=causal))
    for _ in range(2):
        runner.compare(inputs, *runner.run(wrapper, inputs)).check()
    assert len(fake.runs) == 2
    assert len(fake.graphs) == 1
    assert wrapper._backend == "cudnn"
    assert wrapper.variant == f"cudnn_float16_{'d128' if dims[0] == 128 else 'd192_128'}"
    assert "cudnn" in repr(wrapper)


@pytest.mark.parametrize("form", [KvForm.COMBINED, KvForm.HALVES, KvForm.PADDED])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_caches_of_any_strides(fake, layout, form):
    inputs, wrapper = planned(make_case(16, layout, form=form))
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()
    assert len(fake.runs) == 1


def test_page_indices_on_either_side_and_flat_pages(fake):
    inputs, wrapper = planned(dataclasses.replace(make_case(1), form=KvForm.FLAT))
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()


@BOTH
def test_rows_of_nobody_stay(fake, case):
    inputs, wrapper = planned(case)
    rows, used = inputs.q.shape[0] + 5, sum(QO_LENS)
    q = torch.cat([inputs.q, poison((5, *inputs.q.shape[1:]), inputs.q.dtype)])
    out, lse = torch.full((rows, 6, 128), 7.0, dtype=q.dtype), torch.full((6, rows), 7.0)
    keys = (inputs.cache,) if case.page_size else (inputs.k, inputs.v)
    wrapper.run(q, *keys, out=out, lse=lse, lse_layout="HN", lse_base="ln", return_lse=True)
    runner.compare(inputs, out[:used], lse.T[:used].contiguous() / math.log(2)).check()
    assert (out[used:] == 7.0).all()
    assert (lse[:, used:] == 7.0).all()


@BOTH
def test_scales_of_a_run(fake, case):
    inputs, wrapper = planned(dataclasses.replace(case, sm_scale=0.11 / 6))
    inputs = dataclasses.replace(inputs, case=case)
    keys = (inputs.cache,) if case.page_size else (inputs.k, inputs.v)
    out, lse = wrapper.run(inputs.q, *keys, q_scale=2.0, k_scale=3.0, return_lse=True)
    runner.compare(inputs, out, lse).check()
    with pytest.raises(NotImplementedError, match=r"backend='cudnn'.*v_scale.*'auto'"):
        wrapper.run(inputs.q, *keys, v_scale=2.0)


@BOTH
@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"logits_soft_cap": 30.0}, "logits_soft_cap"),
        ({"pos_encoding_mode": "ALIBI"}, "pos_encoding_mode"),
        ({"pos_encoding_mode": "ROPE_LLAMA"}, "pos_encoding_mode"),
        ({"window_left": 3}, "window_left"),
        ({"custom_mask": torch.ones(4096, dtype=torch.bool)}, "custom_mask"),
        ({"fixed_split_size": 256}, "fixed_split_size"),
        ({"disable_split_kv": True}, "disable_split_kv"),
        ({"head_dim_vo": 192}, "head_dim 128"),
        ({"kv_data_type": torch.float8_e4m3fn}, "float16 or bfloat16"),
        ({"q_data_type": torch.float32, "kv_data_type": torch.float32}, "float16 or bfloat16"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_what_cudnn_does_not_serve_is_refused_at_plan(fake, case, options, name):
    inputs, wrapper = planned(case)
    with pytest.raises(NotImplementedError, match=rf"backend='cudnn'.*{name}.*use backend="):
        runner.plan(wrapper, inputs, **options)
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()


def test_page_size_is_a_power_of_two(fake):
    with pytest.raises(NotImplementedError, match=r"page_size=5 must be a power of two"):
        planned(make_case(5))


@BOTH
def test_batches_are_checked_like_any_other(fake, case):
    inputs, wrapper = planned(case)
    falling = dataclasses.replace(inputs, qo_indptr=torch.tensor([0, 5, 3, 6, 7, 8, 9]).int())
    with pytest.raises(ValueError, match="qo_indptr"):
        runner.plan(wrapper, falling)
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()


@BOTH
def test_what_a_run_does_not_serve(fake, case):
    inputs, wrapper = planned(case)
    keys = (inputs.cache,) if case.page_size else (inputs.k, inputs.v)
    with pytest.raises(NotImplementedError, match=r"backend='cudnn'.*sinks"):
        wrapper.run(inputs.q, *keys, sinks=torch.zeros(6))
    with pytest.raises(NotImplementedError, match=r"backend='cudnn'.*window_left"):
        wrapper.run(inputs.q, *keys, window_left=4)
    with pytest.raises(NotImplementedError, match=r"backend='cudnn'.*skip_softmax.*'auto'"):
        wrapper.run(inputs.q, *keys, skip_softmax_threshold_scale_factor=1.0)
    with pytest.raises(NotImplementedError, match=r"backend='cudnn'.*apart in memory"):
        wrapper.run(inputs.q, *keys, out=inputs.q)
    with pytest.raises(ValueError, match="q has shape"):
        wrapper.run(inputs.q[:5], *keys)
    assert fake.runs == []
    fake.refuse = "no engine"
    with pytest.raises(NotImplementedError, match=r"backend='cudnn'.*no engine.*'auto'"):
        wrapper.run(inputs.q, *keys)


@BOTH
def test_a_small_workspace(fake, case):
    inputs, wrapper = planned(case)
    fake.workspace_bytes = 1 << 40
    with pytest.raises(NotImplementedError, match=r"float_workspace_buffer has \d+ bytes"):
        runner.run(wrapper, inputs)


@BOTH
def test_cuda_graph_mode_and_sizes_are_refused(fake, case):
    cls = type(planned(case)[1])
    with pytest.raises(NotImplementedError, match="is_cuda_graph_compatible"):
        cls(runner.workspace(), backend="cudnn", use_cuda_graph=True)
    inputs, wrapper = planned(case)
    arguments, options = runner.plan_arguments(inputs)
    with pytest.raises(NotImplementedError, match="128 MB"):
        wrapper.workspace_size(*arguments, **options)


@BOTH
def test_plans_follow_one_another_and_copies_keep_theirs(fake, case):
    inputs, wrapper = planned(case)
    other = copy.copy(wrapper)
    full = dataclasses.replace(case, mask=MaskKind.NONE)
    again = dataclasses.replace(inputs, case=full)
    runner.plan(wrapper, again)
    runner.compare(again, *runner.run(wrapper, again)).check()
    runner.compare(inputs, *runner.run(other, inputs)).check()
    runner.plan(wrapper, inputs)
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()
    assert len(fake.graphs) == 2


@BOTH
def test_longer_batches_share_graphs(fake, case):
    """The longest lengths are rounded up to powers of two."""
    for longest in (33, 40, 64):
        kv_lens = (9, 8, longest, 0, 21, 12)
        inputs, wrapper = planned(dataclasses.replace(case, kv_lens=kv_lens))
        runner.compare(inputs, *runner.run(wrapper, inputs)).check()
    pools = {graph.attention["k"].dim[0] for graph in fake.graphs}
    assert len(fake.graphs) == len(pools)


@BOTH
def test_batches_without_keys_or_queries(fake, case):
    for lengths in ({"kv_lens": (0,) * 6}, {"qo_lens": (0,) * 6}):
        inputs, wrapper = planned(dataclasses.replace(case, **lengths))
        runner.compare(inputs, *runner.run(wrapper, inputs)).check()
    assert fake.runs == []


@pytest.mark.parametrize(
    "wrapper",
    [preflash.BatchDecodeWithPagedKVCacheWrapper, preflash.BatchAttentionWithAttentionSinkWrapper],
)
def test_other_wrappers_have_no_cudnn(fake, wrapper):
    with pytest.raises(NotImplementedError, match="backend='cudnn' is served by"):
        wrapper(runner.workspace(), backend="cudnn")


@pytest.mark.parametrize("head_dim", [64, 256])
def test_head_dims_of_other_kernels(fake, head_dim):
    with pytest.raises(NotImplementedError, match=rf"head_dim 128.*{head_dim} and {head_dim}"):
        planned(make_case(16, dims=(head_dim, head_dim)))


@BOTH
def test_where_cudnn_is_not(case):
    with pytest.raises(NotImplementedError, match=r"backend='cudnn'.*CUDA tensors.*use backend="):
        planned(case)


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [0, 16])
def test_cudnn_itself(page_size):
    pytest.importorskip("cudnn", reason="nvidia-cudnn-frontend is not installed")
    if _graph.why_missing() is not None:
        pytest.skip(_graph.why_missing())
    case = make_case(page_size)
    inputs = build(case, device="cuda")
    if page_size:  # cuDNN multiplies the rest of a last page by 0
        inputs.k.nan_to_num_(0.0, 0.0, 0.0)
        inputs.v.nan_to_num_(0.0, 0.0, 0.0)
    wrapper = runner.make_wrapper(case, backend="cudnn", device="cuda")
    runner.plan(wrapper, inputs)
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = runner.run(wrapper, inputs)
    out.fill_(7.0)
    graph.replay()
    runner.compare(inputs, out, lse).check()


def test_the_frontend_is_a_column(fake):
    """Of `bench`: one plan for all sets of a row."""
    case = dataclasses.replace(quick_rows()[2].case, kv_lens=(256, 144, 64, 16))
    for page_size, form in ((0, KvForm.SEPARATE), (16, KvForm.COMBINED)):
        one = dataclasses.replace(case, page_size=page_size, form=form)
        row = Row(one, baselines=(Baseline.FRONTEND,))
        (prepare,) = baselines.baselines_of(row, torch.device("cuda")).values()
        sets = list(itertools.islice(batches(one, torch.device("cpu")), 2))
        calls = [prepare(inputs) for inputs in sets]
        for inputs, call in zip(sets, calls, strict=True):
            runner.compare(inputs, call(), None).check()
