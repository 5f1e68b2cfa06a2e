"""MultiLevelCascadeAttentionWrapper computes attention over the concatenated keys."""

import copy
import itertools

import preflash
import pytest
import torch
from interrupts import interrupted
from preflash.testing import Case, KvForm, build, compare, oracle, poison, runner
from preflash.testing.inputs import indptr
from preflash.testing.oracle import Pipeline
from refusals import refused

PAGE, HEADS, KV_HEADS, DIM = 16, 8, 2, 64
QUERIES = (1, 3, 2, 1, 4)  # of every sequence
# Nodes of each level: (the sequences that share the node, its keys).
LEVELS = (
    (((0, 1, 2, 3, 4), 70),),
    (((0, 1, 2), 33), ((3, 4), 16)),
    tuple(((i,), keys) for i, keys in enumerate((5, 40, 17, 1, 90))),
)
SCALE = DIM**-0.5


class Tree:
    """A pool, a page table for every level, and the keys of every sequence."""

    def __init__(self, device, levels=LEVELS, dtype=torch.bfloat16, seed=0):
        nodes = [node for level in levels for node in level]
        rows, keys = ([sum(QUERIES[i] for i in who) for who, _ in nodes], [n for _, n in nodes])
        sizes = (HEADS, KV_HEADS, DIM, DIM, dtype, PAGE)
        case = Case("tree", tuple(rows), tuple(keys), *sizes, form=KvForm.COMBINED)
        inputs = build(case, device=device, seed=seed)
        self.q, self.cache = inputs.q[-sum(QUERIES) :], inputs.cache
        self.keys = [[] for _ in QUERIES]
        for node, (who, _) in enumerate(nodes):
            for i in who:
                self.keys[i].append(inputs.request(node))
        sizes = list(map(len, levels))
        pages = torch.tensor([len(own) for own in inputs.page_table]).split(sizes)
        self.tables = (
            [indptr(own.tolist(), device) for own in torch.tensor(rows).split(sizes)],
            [indptr(own.tolist(), device) for own in pages],
            list(inputs.indices.split([int(own.sum()) for own in pages])),
            list(inputs.last_page_len.split(sizes)),
        )

    def expected(self, pipeline):
        whole = oracle.concatenate([
            oracle.attend(q, *(torch.cat([getattr(one, n) for one in own]) for n in "kv"), pipeline)
            for q, own in zip(self.q.split(QUERIES), self.keys, strict=True)
        ])  # fmt: skip
        whole.spread = whole.spread + len(self.tables[0]) * whole.out.abs()  # roundings of merges
        return whole


ARGUMENTS = (HEADS, KV_HEADS, DIM, PAGE)
BF16 = {"q_data_type": torch.bfloat16}


def made(target, levels=LEVELS, **options):
    tree = Tree(target.device, levels)
    wrapper = preflash.MultiLevelCascadeAttentionWrapper(
        len(levels), runner.workspace(target.device), "NHD"
    )
    wrapper.plan(*tree.tables, *ARGUMENTS, **{**BF16, **options})
    return tree, wrapper


def report(wrapper, tree, pipeline=None, out=None):
    """Compares a run, or its output, with the oracle; pipeline: by default full attention."""
    pipeline = pipeline or Pipeline(SCALE)
    out = wrapper.run(tree.q, tree.cache) if out is None else out
    return compare(out, None, tree.expected(pipeline), soft_cap=pipeline.soft_cap)


def check(*given):
    report(*given).check()


@pytest.mark.parametrize("levels", [1, 2, 3])
@pytest.mark.parametrize(("causal", "soft_cap"), [(False, None), (True, None), (True, 20.0)])
def test_numbers(target, levels, causal, soft_cap):
    """With causal, a sequence's queries are its last tokens, which are on the last level. One level
    alone takes windows."""
    levels, window = (*LEVELS[: levels - 1], LEVELS[-1]), 9 if levels == 1 else -1
    options = {"causal": causal, "logits_soft_cap": soft_cap, "window_left": window}
    tree, wrapper = made(target, levels, **options)
    check(wrapper, tree, Pipeline(SCALE, causal, window, soft_cap or 0.0))


def test_plan_again_and_other_spellings(target):
    _, wrapper = made(target)
    for seed in (0, 5):
        tree = Tree(target.device, LEVELS, torch.float16, seed)
        wrapper.begin_forward(*tree.tables, *ARGUMENTS, sm_scale=0.2)
        check(wrapper, tree, Pipeline(0.2), wrapper.forward(tree.q, tree.cache))
        wrapper.end_forward()


def test_padded_q(target):
    tree, wrapper = made(target)
    q = torch.cat([tree.q, poison((4, HEADS, DIM), torch.bfloat16, target.device)])
    out = wrapper.run(q, tree.cache)
    assert out.shape == q.shape
    check(wrapper, tree, None, out[: tree.q.shape[0]])


def test_upper_bounds_of_a_level(target):
    """The own level of the requests is planned with full last pages, whose tail is NaN."""
    tree, wrapper = made(target)
    tree.tables[3][-1] = torch.full_like(tree.tables[3][-1], PAGE)
    lens = torch.tensor([keys for _, keys in LEVELS[-1]], dtype=torch.int32, device=target.device)
    bounds = {"causal": True, "lengths_are_upper_bounds": True}
    wrapper.plan(*tree.tables, *ARGUMENTS, **BF16, **bounds, seq_lens_arr=[None, None, lens])
    check(wrapper, tree, Pipeline(SCALE, causal=True))


def test_an_interrupted_plan(target):
    """No run merges levels of two batches, and a wrapper of both has no variant."""
    other, ends = Tree(target.device, seed=3), {"whole": 0, "none": 0}
    for step in itertools.count(step=131):
        tree, wrapper = made(target)
        if not interrupted(lambda w=wrapper: w.plan(*other.tables, *ARGUMENTS, **BF16), step):
            break
        if wrapper.variant is not None:
            ends["whole"] += 1
            assert any(report(wrapper, one).ok for one in (tree, other))
            continue
        ends["none"] += 1
        assert "not planned" in repr(wrapper)
        refused(r"did not come to its end: call plan\(\) again", wrapper.run, other.q, other.cache)
        wrapper.plan(*other.tables, *ARGUMENTS, **BF16)
        check(wrapper, other)
    assert min(ends.values()) > 0, ends


def test_a_copy_plans_for_itself_in_its_own_workspaces(target):
    tree, wrapper = made(target)
    duplicate, other = copy.copy(wrapper), Tree(target.device, seed=3)
    check(duplicate, tree)
    own = [runner.workspace(target.device, 1 << 20) for _ in LEVELS]
    duplicate.reset_workspace_buffer(runner.workspace(target.device), own)
    duplicate.plan(*other.tables, *ARGUMENTS, **BF16)
    check(wrapper, tree)
    check(duplicate, other)


def other_plan(wrapper, device, at=0, change=lambda arrays: arrays, **options):
    """Plans another batch, with the arrays of all levels at an index changed."""
    tables = list(Tree(device, LEVELS, seed=1).tables)
    tables[at] = change(tables[at])
    wrapper.plan(*tables, *ARGUMENTS, **BF16, **options)


def one_query_less(arrays):
    fewer = arrays[1].clone()
    fewer[-1] -= 1
    return [arrays[0], fewer, arrays[2]]


def reset(wrapper, device, last):
    buffers = [torch.empty(1 << 20, dtype=torch.uint8, device=device) for _ in range(3)]
    wrapper.reset_workspace_buffer(buffers[2], [*buffers[:2], last(buffers)])


def make(device, levels, *arguments):
    work = runner.workspace(device)
    preflash.MultiLevelCascadeAttentionWrapper(levels, work, *arguments).run(work, work)


def plans(*change, **options):
    return lambda *to: other_plan(*to, *change, **options)


BOUNDS = {"lengths_are_upper_bounds": True}
REFUSED = [
    (plans(0, one_query_less), ValueError, r"qo_indptr_arr\[1\] goes from 0 to 10"),
    (plans(2, lambda arrays: arrays[:-1]), ValueError, "paged_kv_indices_arr has 2 tensors"),
    (plans(3, lambda arrays: [*arrays[:-1], arrays[-1] + PAGE]), ValueError, "last_page_len"),
    (plans(window_left=8), NotImplementedError, "window_left=8"),
    (plans(pos_encoding_mode="ALIBI"), NotImplementedError, "ALIBI"),
    (plans(causal="yes"), TypeError, "causal"),
    *((plans(**BOUNDS, seq_lens_arr=none), ValueError, "no seq_lens_arr")
      for none in (None, [None] * 3)),
    (plans(**BOUNDS, seq_lens_arr=[1]), TypeError, "list of num_levels = 3 tensors or None"),
    (lambda *to: reset(*to, lambda buffers: buffers[0].new_empty(16)), ValueError,
     "int_workspace_buffer has 16 bytes"),
    (lambda *to: reset(*to, lambda buffers: buffers[0]), ValueError,
     r"buffers\[2\] shares memory with .*buffers\[0\]"),
    (lambda _, device: make(device, 2, "NHD", True), ValueError, "=None with use_cuda_gr"),
    (lambda _, device: make(device, 0), ValueError, "num_levels"),
    (lambda _, device: make(device, 2, "NHD", False, [torch.empty(1)]), ValueError,
     "qo_indptr_buf_arr has 1 tensors"),
    (lambda _, device: make(device, 2), ValueError, "before plan"),
]  # fmt: skip


def test_a_refusal_changes_no_level(target):
    tree, wrapper = made(target)
    before = wrapper.run(tree.q, tree.cache)
    for call, error, says in REFUSED:
        refused(says, call, wrapper, target.device, error=error)
        assert torch.equal(wrapper.run(tree.q, tree.cache), before)
