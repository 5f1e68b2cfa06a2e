"""torch.compile on a GPU: plans that change under CUDA graphs that torch captures by itself."""

import preflash
import pytest
import torch
from backends import captured, no_waits, planned, same_bits
from preflash.testing import Case, MaskKind, build, runner

HEADS = {"num_qo_heads": 8, "num_kv_heads": 2, "head_dim": 128}
# Batches of equally many queries, so that only the plan changes; the last splits its keys.
BATCHES = [
    ((33, 5, 0, 170), (400, 90, 7, 170)),
    ((100, 100, 8), (100, 0, 3000)),
    ((208,), (300,)),
    ((1,) * 208, (9,) * 208),
    ((200, 8), (8, 20000)),
]


@pytest.fixture(autouse=True)
def _without_graphs_of_other_tests():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("page_size", [0, 16], ids=["ragged", "paged"])
def test_every_plan_counts(backend, mode, page_size):
    """The kernels around attention go into CUDA graphs; attention sees every plan()."""

    def layer(wrapper, q, *kv):
        out, lse = wrapper.run((q * 2) * 0.5, *kv, return_lse=True)
        return out * 1, lse * 1, (q + out).relu()

    compiled = torch.compile(layer, mode=mode, fullgraph=True)
    how = {"page_size": page_size, "mask": MaskKind.CAUSAL, **HEADS}
    wrapper = None
    for qo_lens, kv_lens in [*BATCHES, *reversed(BATCHES)]:
        inputs = build(Case("compiled", qo_lens, kv_lens, **how), device="cuda")
        if wrapper is None:
            wrapper = runner.make_wrapper(inputs.case, backend=backend, device="cuda")
        runner.plan(wrapper, inputs)
        kv = []  # as many pages or keys for all
        for own in (inputs.k, inputs.v):
            kv.append(own.new_full((4096 if page_size else 32768, *own.shape[1:]), float("nan")))
            kv[-1][: own.shape[0]] = own
        kv = (tuple(kv),) if page_size else kv
        torch.compiler.cudagraph_mark_step_begin()
        out, lse, after = compiled(wrapper, inputs.q, *kv)
        runner.compare(inputs, out, lse).check()
        assert torch.equal(after, (inputs.q + out).relu())


def test_a_model_of_layers(backend):
    """Append, attend and merge in one compiled function, over a cache that is written in place."""
    case = Case("layers", (17, 1, 40), (50, 33, 40), page_size=16, mask=MaskKind.CAUSAL, **HEADS)
    wrapper, inputs = planned(case, backend)
    table = [inputs.indices, inputs.kv_indptr, inputs.last_page_len]
    tokens = inputs.q.shape[0]
    new = torch.randn(2, tokens, 2, 128, device="cuda", dtype=inputs.q.dtype)

    def step(q, new, k, v, appended, *table):
        lengths = preflash.get_seq_lens(table[1], table[2], 16)
        places = preflash.get_batch_indices_positions(appended, lengths, tokens)
        states = []
        for layer in range(2):
            preflash.append_paged_kv_cache(new[0] + layer, new[1], *places, (k, v), *table)
            states.append(wrapper.run(q * 1, (k, v), return_lse=True))
        return preflash.merge_state(*states[0], *states[1])

    for mode in ("default", "reduce-overhead"):
        torch._dynamo.reset()
        compiled = torch.compile(step, mode=mode, fullgraph=True)
        for _ in range(4):
            results = []
            torch.compiler.cudagraph_mark_step_begin()
            for function in (step, compiled):
                caches = [t.clone() for t in inputs.cache]
                merged = function(inputs.q, new, *caches, inputs.qo_indptr, *table)
                results.append((*merged, *caches))
            assert same_bits(*results)


def test_single_requests(backend):
    """Their plans are made where the graphs are warmed up, and are not in their memory."""

    def layer(q, k, v):
        out = preflash.single_prefill_with_kv_cache(q * 1, k, v, causal=True, backend=backend)
        return out + q

    compiled = torch.compile(layer, mode="reduce-overhead", fullgraph=True)
    for tokens in (40, 700) * 3:
        q = torch.randn(tokens, 8, 128, device="cuda", dtype=torch.bfloat16)
        k, v = torch.randn(2, 2048, 2, 128, device="cuda", dtype=torch.bfloat16)
        torch.compiler.cudagraph_mark_step_begin()
        assert torch.equal(compiled(q, k, v), layer(q, k, v))


def test_a_capture_by_hand(backend):
    """A compiled call waits for nothing and can be captured, with the plan of that time."""
    case = Case("captured", (33, 5), (400, 90), page_size=16, **HEADS)
    wrapper, inputs = planned(case, backend)

    def layer(q, k, v):
        return wrapper.run(q * 1, (k, v)) * 1

    compiled = torch.compile(layer, fullgraph=True)
    tensors = (inputs.q.clone(), *inputs.cache)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            expected = compiled(*tensors)
        with no_waits():
            got = compiled(*tensors)
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(got, expected)
    graph, out = captured(lambda: compiled(*tensors))
    for factor in (1.0, -0.5):
        tensors[0].copy_(inputs.q * factor)
        graph.replay()
        assert torch.equal(out, layer(*tensors))
