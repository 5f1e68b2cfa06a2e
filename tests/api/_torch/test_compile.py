"""Graphs of torch.compile(fullgraph=True) hold our calls as operators, and see every plan() without
being compiled again."""

import copy
import inspect
import re

import preflash
import pytest
import torch
from compiled_calls import NAMES, RAGGED, WHOLE, assert_same, calls_of
from planned_cases import planned
from preflash.testing import Case, MaskKind, build, runner
from refusals import refused
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx.experimental.proxy_tensor import make_fx


@pytest.fixture(autouse=True)
def _without_graphs_of_other_tests():
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        yield
    torch._dynamo.reset()


class Operators(torch.fx.Interpreter):
    """Runs a graph and keeps the arguments of our operators."""

    def __init__(self, graph):
        super().__init__(graph)
        self.seen = []

    def call_function(self, target, args, kwargs):
        if str(target).startswith("preflash."):
            copies = torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
            self.seen.append((target.default, *copies))
        return super().call_function(target, args, kwargs)


def check_compiled(call, times=2, **options):
    compiled = torch.compile(call.function, fullgraph=True, **options)
    for _ in range(times):
        tensors, expected_tensors = call.fresh(), call.fresh()
        with torch.no_grad():
            assert_same(compiled(*tensors), call.function(*expected_tensors))
        assert_same(tensors, expected_tensors)


# One call with each operator.
CHECKED = [
    "sinks_and_scale", "lse", "into", "forward", "forward_lse", "single_mask", "single_lse",
    "single_into", "merge_state", "merge_states", "in_place", "packbits", "segment_packbits",
    "append",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_one_graph(target, name):
    call, graphs = calls_of(target)[name], []

    def backend(graph, inputs):
        graphs.append(Operators(graph))
        return graphs[-1].run

    check_compiled(call, 1, backend=backend)
    (graph,) = graphs
    assert {operator._opname for operator, _, _ in graph.seen} == set(call.operators.split())
    for operator, args, kwargs in graph.seen if name in CHECKED else ():
        torch.library.opcheck(operator, args, kwargs)


@pytest.mark.parametrize(
    "name", ["into", "into_q", "into_lse", "cascade", "blocks", "append_whole"]
)
def test_functionalized(target, name):
    """Compilers see a graph without mutation."""
    check_compiled(calls_of(target)[name], backend="aot_eager")


@pytest.mark.parametrize("name", ["paged", "into", "append_halves"])
def test_inductor(target, name):
    check_compiled(calls_of(target)[name])


def test_every_call_and_operator_is_tested(target):
    calls = calls_of(target)
    assert list(calls) == NAMES
    assert {name for n in CHECKED for name in calls[n].operators.split()} == every_operator()


def every_operator():
    names = torch._C._dispatch_get_all_op_names()
    return {n.removeprefix("preflash::") for n in names if n.startswith("preflash::")}


def test_cuda_graphs_leave_out_what_a_plan_changes():
    """torch captures by itself with mode="reduce-overhead", and would miss a later plan()."""
    for name in every_operator():
        tags = getattr(torch.ops.preflash, name).default.tags
        unsafe = name.startswith(("run", "forward", "single")) or name.endswith("packbits")
        assert (torch.Tag.cudagraph_unsafe in tags) == unsafe


def compiled_layer(backend="aot_eager"):
    counter = CompileCounterWithBackend(backend)

    def layer(wrapper, q, *kv, **options):
        return wrapper.run(q * 1, *kv, **options)

    return torch.compile(layer, backend=counter, fullgraph=True), counter


# One request without keys, one without queries; four batches with the same number of queries.
BATCHES = [
    ((33, 5, 0), (40, 90, 7)), ((20, 18), (0, 17)), ((38,), (1,)), ((1,) * 38, (3,) * 38),
    ((50, 60), (80, 70)), ((2,), (900,)),
]  # fmt: skip


# A plan compiles nothing. Without a mark torch compiles for one token count, then for any.
@pytest.mark.parametrize(("marked", "compilations"), [(True, 1), (False, 2)])
@pytest.mark.parametrize("page_size", [0, 4], ids=["ragged", "paged"])
def test_plans(target, page_size, marked, compilations):
    compiled, counter = compiled_layer()
    wrapper = None
    for i, (qo_lens, kv_lens) in enumerate(BATCHES):
        mask = MaskKind.CAUSAL if i % 2 else MaskKind.NONE
        case = Case("plan", qo_lens, kv_lens, 4, 2, 64, page_size=page_size, mask=mask)
        inputs = build(case, device=target.device)
        if wrapper is None:
            wrapper = runner.make_wrapper(case, backend=target.backend, device=target.device)
        runner.plan(wrapper, inputs)
        q, k, v = inputs.q, *(inputs.cache if page_size else (inputs.k, inputs.v))
        for t in (k, v, *([q] if marked else [])):  # as many tokens or pages as there may be
            torch._dynamo.mark_dynamic(t, 0)
        kv = ((k, v),) if page_size else (k, v)
        out, lse = compiled(wrapper, q, *kv, return_lse=True)
        runner.compare(inputs, out, lse).check()
    assert counter.frame_count == compilations


def test_values_that_change(target):
    """Floats and ints of a call become inputs of the graph, and mean what they say."""
    inputs, wrapper = planned(RAGGED, target)
    compiled, _ = compiled_layer()
    arguments = (wrapper, inputs.q, inputs.k, inputs.v)
    for scale, window in ((0.5, 3), (0.25, 5), (2.0, 0), (2.0, -1)):
        options = {"v_scale": scale, "q_scale": scale, "window_left": window}
        assert_same(compiled(*arguments, **options), wrapper.run(*arguments[1:], **options))


def test_every_wrapper_is_its_own(target):
    """One graph may hold two wrappers; one compiled function serves them and a copy."""
    (inputs, first), (_, second) = planned(RAGGED, target), planned(RAGGED, target)
    positional, options = runner.plan_arguments(inputs)
    second.plan(*positional, **{**options, "causal": True})
    tensors = (inputs.q, inputs.k, inputs.v)
    expected = [first.run(*tensors), second.run(*tensors)]
    assert not torch.equal(*expected)

    def both(q, k, v):
        return first.run(q, k, v), second.run(q, k, v)

    assert_same(torch.compile(both, backend="aot_eager", fullgraph=True)(*tensors), expected)
    third = copy.copy(second)
    third.plan(*positional, **{**options, "window_left": 2})
    compiled, counter = compiled_layer()
    for _ in range(2):
        for wrapper in (first, second, third):
            assert_same(compiled(wrapper, *tensors), wrapper.run(*tensors))
    assert counter.frame_count == 3


def test_the_cache_is_written_where_it_is(target):
    """Inductor's code for append() and run() allocates no cache."""
    if target.device != "cpu":
        pytest.skip("the code is C++ on the CPU")
    inputs, wrapper = planned(WHOLE, target)
    key, value, whole, *table = calls_of(target)["append_whole"].fresh()
    places = torch.zeros(4, dtype=torch.int32), torch.arange(4, dtype=torch.int32)

    def layer(key, value, whole, q, kv):
        preflash.append_paged_kv_cache(key, value, *places, whole, *table)
        k, v = whole[:, 0], whole[:, 1]
        preflash.append_paged_kv_cache(key + 1, value, *places, (k, v), *table)
        return wrapper.run(q * 2, kv)

    expected_whole = whole.clone()
    expected = layer(key, value, expected_whole, inputs.q, inputs.cache)
    out, (code,) = torch._inductor.utils.run_and_get_code(
        torch.compile(layer, fullgraph=True), key, value, whole, inputs.q, inputs.cache
    )
    assert_same([out, whole], [expected, expected_whole])
    # Rows of keys, values and queries have three dimensions; caches more.
    allocated = re.findall(r"empty_strided_cpu\(\(([^)]*)\)", code)
    assert max(len(re.findall(r"\w+", shape)) for shape in allocated) == 3


def test_gradients(target):
    """Autograd and torch.func, for which the gradient of an operator would be zeros, are refused
    in graphs, which then serve calls without gradients."""
    inputs, wrapper = planned(RAGGED, target)
    tensors = (inputs.q, inputs.k, inputs.v)
    leaves = (inputs.q.clone().requires_grad_(), *tensors[1:])

    def loss(q, k, v):
        return wrapper.run(q, k, v).float().sum()

    compiled = torch.compile(loss, backend="eager", fullgraph=True)
    functional, in_parts = (
        torch.compile(loss, backend="aot_eager", fullgraph=fullgraph) for fullgraph in (True, False)
    )
    gradient = torch.func.grad(loss)
    wrong = [(call, leaves) for call in (compiled, functional, in_parts, make_fx(loss)(*tensors))]
    wrong += [(make_fx(loss, tracing_mode=mode), leaves) for mode in ("real", "fake", "symbolic")]
    wrong += [(torch.compile(gradient, backend="eager"), tensors), (make_fx(gradient), tensors)]
    wrong += [(torch.func.grad(torch.compile(loss, backend="eager")), tensors)]
    wrong += [(of(compiled), tensors) for of in (torch.func.jacrev, torch.func.grad)]
    for call, given in wrong:
        torch._dynamo.reset()
        assert_same(compiled(*tensors), loss(*tensors))
        refused("forward only", call, *given, error=(NotImplementedError, RuntimeError))
    assert_same(compiled(*tensors), loss(*tensors))
    with torch.no_grad():
        for call in (compiled, functional, in_parts):
            assert_same(call(*leaves), loss(*tensors))


def test_causal_in_the_place_of_a_mask(target):
    q = torch.zeros(3, 2, 64, device=target.device)
    single = torch.compile(preflash.single_prefill_with_kv_cache, backend="eager")
    refused(r"custom_mask=True.* pass causal=True by name", single, q, q, q, True, error=TypeError)


def test_what_is_refused_is_refused_when_it_runs(target):
    """Errors are those of the ordinary call; a right call after them needs no other graph."""
    inputs, wrapper = planned(RAGGED, target)
    unplanned = runner.make_wrapper(RAGGED, backend=target.backend, device=target.device)
    kv = (inputs.k, inputs.v)
    compiled, counter = compiled_layer()
    for one, q, options, error, says in (
        (unplanned, inputs.q, {}, ValueError, r"run\(\) before plan\(\)"),
        (wrapper, inputs.q[:30], {}, ValueError, "q has shape"),
        (wrapper, inputs.q.half(), {}, TypeError, r"q is torch\.float16"),
        (
            wrapper,
            inputs.q,
            {"out": kv[0][:38, :1].expand(38, 4, 64)},
            ValueError,
            "out has strides",
        ),
    ):
        refused(says, compiled, one, q, *kv, error=error, **options)
    compilations = counter.frame_count
    runner.plan(unplanned, inputs)
    for one in (unplanned, wrapper):
        assert_same(compiled(one, inputs.q, *kv), wrapper.run(inputs.q, *kv))
    assert counter.frame_count == compilations


def test_plan_is_no_part_of_a_graph(target):
    inputs, wrapper = planned(RAGGED, target)
    positional, options = runner.plan_arguments(inputs)

    def step(q, k, v):
        wrapper.plan(*positional, **{**options, "causal": True})
        return wrapper.run(q * 1, k, v)

    tensors = (inputs.q, inputs.k, inputs.v)
    with pytest.raises(torch._dynamo.exc.Unsupported) as caught:
        torch.compile(step, backend="eager", fullgraph=True)(*tensors)
    if "reason" in inspect.signature(torch.compiler.disable).parameters:  # torch 2.7
        assert "call it outside of torch.compile" in str(caught.value)
    assert_same(torch.compile(step, backend="eager")(*tensors), step(*tensors))


def test_fp8_output_dtype_that_changes():
    """A graph has the dtype of the plan that it was made under, and no other goes into it."""
    case = Case("fp8", (33, 5), (40, 90), 4, 2, 64, dtype=torch.float8_e4m3fn)
    inputs, wrapper = build(case), runner.make_wrapper(case, backend="cpu")
    positional, options = runner.plan_arguments(inputs)
    tensors = (inputs.q, inputs.k, inputs.v)

    def call(q, k, v):
        return wrapper.run(q, k, v) + 1

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    for o_data_type in (torch.float16, torch.bfloat16):
        torch._dynamo.reset()
        wrapper.plan(*positional, **{**options, "o_data_type": o_data_type})
        assert_same(compiled(*tensors), call(*tensors))
    wrapper.plan(*positional, **{**options, "o_data_type": torch.float16})
    refused(r"o_data_type=torch\.float16 in plan\(\).*bfloat16", compiled, *tensors)
