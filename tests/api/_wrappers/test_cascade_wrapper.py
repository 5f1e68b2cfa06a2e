"""MultiLevelCascadeAttentionWrapper against attention over the concatenated keys."""

import copy

import preflash
import pytest
import torch
from preflash.testing import compare, oracle, poison, runner
from preflash.testing.inputs import indptr
from preflash.testing.oracle import Pipeline

PAGE, HEADS, KV_HEADS, DIM = 16, 8, 2, 64
QUERIES = (1, 3, 2, 1, 4)  # of every sequence
# What shares a prefix, level by level: (sequences of each node, its keys).
LEVELS = (
    (((0, 1, 2, 3, 4), 70),),
    (((0, 1, 2), 33), ((3, 4), 16)),
    tuple(((i,), keys) for i, keys in enumerate((5, 40, 17, 1, 90))),
)
SCALE = DIM**-0.5


class Tree:
    """A pool, a page table for every level, and the keys of every sequence."""

    def __init__(self, device, levels=LEVELS, dtype=torch.bfloat16, seed=0):
        generator = torch.Generator().manual_seed(seed)
        pages = sum(-(-keys // PAGE) for level in levels for _, keys in level)
        shape = (pages + 3, 2, PAGE, KV_HEADS, DIM)
        self.cache = torch.randn(shape, generator=generator).to(dtype)
        self.q = torch.randn(sum(QUERIES), HEADS, DIM, generator=generator).to(dtype)
        order = iter(torch.randperm(pages + 3, generator=generator).tolist())
        self.keys = [[] for _ in QUERIES]
        self.values = [[] for _ in QUERIES]
        self.tables = ([], [], [], [])
        for level in levels:
            node_pages = [[next(order) for _ in range(-(-keys // PAGE))] for _, keys in level]
            for (sequences, keys), own in zip(level, node_pages, strict=True):
                for i in sequences:
                    self.keys[i].append(self.cache[own, 0].flatten(0, 1)[:keys])
                    self.values[i].append(self.cache[own, 1].flatten(0, 1)[:keys])
                last = keys - PAGE * (len(own) - 1)
                self.cache[own[-1], :, last:] = float("nan")  # nobody's
            table = (
                indptr([sum(QUERIES[i] for i in sequences) for sequences, _ in level]),
                indptr([len(own) for own in node_pages]),
                torch.tensor([page for own in node_pages for page in own], dtype=torch.int32),
                torch.tensor([(keys - 1) % PAGE + 1 for _, keys in level], dtype=torch.int32),
            )
            for arrays, array in zip(self.tables, table, strict=True):
                arrays.append(array.to(device))
        self.cache, self.q = self.cache.to(device), self.q.to(device)

    def expected(self, pipeline):
        parts, begin = [], 0
        for keys, values, count in zip(self.keys, self.values, QUERIES, strict=True):
            q = self.q[begin : begin + count].cpu()
            parts.append(oracle.attend(q, torch.cat(keys), torch.cat(values), pipeline))
            begin += count
        whole = oracle.concatenate(parts)
        whole.spread = whole.spread + len(self.tables[0]) * whole.out.abs()  # roundings of merges
        return whole.map(lambda t: t.to(self.q.device))


def made(target, levels=LEVELS):
    tree = Tree(target.device, levels)
    wrapper = preflash.MultiLevelCascadeAttentionWrapper(
        len(levels), runner.workspace(target.device), "NHD"
    )
    return tree, wrapper


@pytest.mark.parametrize("levels", [1, 2, 3])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("soft_cap", [None, 20.0])
def test_numbers(target, levels, causal, soft_cap):
    """With causal, a sequence's queries are its last tokens, which are on the last level."""
    lowest = tuple(((i,), keys) for i, keys in enumerate((5, 40, 17, 1, 90)))
    tree, wrapper = made(target, (*LEVELS[: levels - 1], lowest))
    wrapper.plan(
        *tree.tables, HEADS, KV_HEADS, DIM, PAGE, causal=causal, logits_soft_cap=soft_cap,
        q_data_type=torch.bfloat16,
    )  # fmt: skip
    out = wrapper.run(tree.q, tree.cache)
    pipeline = Pipeline(SCALE, causal, -1, soft_cap or 0.0)
    compare(out, None, tree.expected(pipeline), soft_cap=soft_cap or 0.0).check()


def test_plan_again_and_other_spellings(target):
    tree, wrapper = made(target)
    for seed in (0, 5):
        tree = Tree(target.device, LEVELS, torch.float16, seed)
        wrapper.begin_forward(*tree.tables, HEADS, KV_HEADS, DIM, PAGE, sm_scale=0.2)
        out = wrapper.forward(tree.q, tree.cache)
        wrapper.end_forward()
        compare(out, None, tree.expected(Pipeline(0.2))).check()


def test_padded_q(target):
    tree, wrapper = made(target)
    wrapper.plan(*tree.tables, HEADS, KV_HEADS, DIM, PAGE, q_data_type=torch.bfloat16)
    q = torch.cat([tree.q, poison((4, HEADS, DIM), torch.bfloat16, target.device)])
    out = wrapper.run(q, tree.cache)
    assert out.shape == q.shape
    compare(out[: tree.q.shape[0]], None, tree.expected(Pipeline(SCALE))).check()


def test_own_workspaces(target):
    tree, wrapper = made(target)
    wrapper.reset_workspace_buffer(
        runner.workspace(target.device),
        [runner.workspace(target.device, 1 << 20) for _ in LEVELS],
    )
    wrapper.plan(*tree.tables, HEADS, KV_HEADS, DIM, PAGE, q_data_type=torch.bfloat16)
    compare(wrapper.run(tree.q, tree.cache), None, tree.expected(Pipeline(SCALE))).check()


def drop_last_query(tables):
    tables[0][1] = tables[0][1].clone()
    tables[0][1][-1] -= 1


def drop_level(tables):
    tables[2].pop()


def spoil_last_level(tables):
    tables[3][-1] = tables[3][-1] + PAGE


REFUSED = {
    "queries": (drop_last_query, {}, ValueError, r"qo_indptr_arr\[1\] goes from 0 to 10"),
    "levels": (drop_level, {}, ValueError, "paged_kv_indices_arr has 2 tensors"),
    "last_level": (spoil_last_level, {}, ValueError, "paged_kv_last_page_len"),
    "window": (lambda _: None, {"window_left": 8}, NotImplementedError, "window_left=8"),
    "alibi": (lambda _: None, {"pos_encoding_mode": "ALIBI"}, NotImplementedError, "ALIBI"),
    "causal": (lambda _: None, {"causal": "yes"}, TypeError, "causal"),
}


@pytest.mark.parametrize("mistake", REFUSED.values(), ids=REFUSED)
def test_a_refused_plan_changes_no_level(target, mistake):
    spoil, options, error, match = mistake
    tree, wrapper = made(target)
    wrapper.plan(*tree.tables, HEADS, KV_HEADS, DIM, PAGE, q_data_type=torch.bfloat16)
    other = Tree(target.device, LEVELS, seed=1)
    spoil(other.tables)
    with pytest.raises(error, match=match):
        wrapper.plan(
            *other.tables, HEADS, KV_HEADS, DIM, PAGE, q_data_type=torch.bfloat16, **options
        )
    compare(wrapper.run(tree.q, tree.cache), None, tree.expected(Pipeline(SCALE))).check()


def test_upper_bounds_of_a_level(target):
    """The own level of the requests is planned with full last pages, whose tail is NaN."""
    tree, wrapper = made(target)
    tables = [list(arrays) for arrays in tree.tables]
    own = [keys for _, keys in LEVELS[-1]]
    tables[3][-1] = torch.full_like(tables[3][-1], PAGE)
    lens = torch.tensor(own, dtype=torch.int32, device=target.device)
    options = {"causal": True, "q_data_type": torch.bfloat16, "lengths_are_upper_bounds": True}
    heads = (HEADS, KV_HEADS, DIM, PAGE)
    wrapper.plan(*tables, *heads, **options, seq_lens_arr=[None, None, lens])
    out = wrapper.run(tree.q, tree.cache)
    compare(out, None, tree.expected(Pipeline(SCALE, causal=True))).check()
    for wrong, match in ((None, "no seq_lens_arr"), ([None] * 3, "no seq_lens_arr")):
        with pytest.raises(ValueError, match=match):
            wrapper.plan(*tables, *heads, **options, seq_lens_arr=wrong)
    with pytest.raises(TypeError, match="list of num_levels = 3 tensors or None"):
        wrapper.plan(*tables, *heads, **options, seq_lens_arr=[lens])


def test_an_interrupted_plan_is_told(target, monkeypatch):
    """No run merges levels of two batches."""
    tree, wrapper = made(target)
    wrapper.plan(*tree.tables, HEADS, KV_HEADS, DIM, PAGE, q_data_type=torch.bfloat16)
    wrapper.run(tree.q, tree.cache)
    other = Tree(target.device, seed=3)

    def interrupt(plan, copy_in):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(wrapper._levels[-1], "_install", interrupt)
        with pytest.raises(KeyboardInterrupt):
            wrapper.plan(*other.tables, HEADS, KV_HEADS, DIM, PAGE, q_data_type=torch.bfloat16)
    with pytest.raises(ValueError, match=r"did not come to its end: call plan\(\) again"):
        wrapper.run(tree.q, tree.cache)
    wrapper.plan(*other.tables, HEADS, KV_HEADS, DIM, PAGE, q_data_type=torch.bfloat16)
    compare(wrapper.run(other.q, other.cache), None, other.expected(Pipeline(SCALE))).check()


def test_a_copy_plans_for_itself(target):
    tree, wrapper = made(target)
    wrapper.plan(*tree.tables, HEADS, KV_HEADS, DIM, PAGE, q_data_type=torch.bfloat16)
    duplicate, other = copy.copy(wrapper), Tree(target.device, seed=3)
    compare(duplicate.run(tree.q, tree.cache), None, tree.expected(Pipeline(SCALE))).check()
    duplicate.plan(*other.tables, HEADS, KV_HEADS, DIM, PAGE, q_data_type=torch.bfloat16)
    for one, its in ((wrapper, tree), (duplicate, other)):
        compare(one.run(its.q, its.cache), None, its.expected(Pipeline(SCALE))).check()


def test_constructor_refusals(target):
    work = runner.workspace(target.device)
    make = preflash.MultiLevelCascadeAttentionWrapper
    with pytest.raises(ValueError, match=r"=None with use_cuda_graph=True"):
        make(2, work, "NHD", True)
    with pytest.raises(ValueError, match="num_levels"):
        make(0, work)
    with pytest.raises(ValueError, match="qo_indptr_buf_arr has 1 tensors"):
        make(2, work, qo_indptr_buf_arr=[work])
    with pytest.raises(ValueError, match="before plan"):
        make(2, work).run(work, work)


def test_one_level_takes_windows(target):
    tree, wrapper = made(target, LEVELS[2:])
    wrapper.plan(
        *tree.tables, HEADS, KV_HEADS, DIM, PAGE, window_left=9, q_data_type=torch.bfloat16
    )
    expected = tree.expected(Pipeline(SCALE, False, 9))
    compare(wrapper.run(tree.q, tree.cache), None, expected).check()


def test_a_refused_reset_changes_no_level(target):
    tree, wrapper = made(target)
    wrapper.plan(*tree.tables, HEADS, KV_HEADS, DIM, PAGE, q_data_type=torch.bfloat16)
    before = [level._plan for level in wrapper._levels]
    big, small = (
        torch.empty(size, dtype=torch.uint8, device=target.device) for size in (1 << 20, 16)
    )
    buffers = [big.clone() for _ in before[1:]]
    with pytest.raises(ValueError, match="int_workspace_buffer has 16 bytes"):
        wrapper.reset_workspace_buffer(big, [*buffers, small])
    with pytest.raises(ValueError, match=r"buffers\[2\] shares memory with .*buffers\[0\]"):
        wrapper.reset_workspace_buffer(big, [*buffers, buffers[0]])
    assert all(a is b._plan for a, b in zip(before, wrapper._levels, strict=True))
