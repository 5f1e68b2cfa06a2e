"""Streams, uploads, syncs, devices: what a CUDA library gets wrong beside the numbers."""

import copy
import dataclasses
import functools
import gc

import preflash
import pytest
import torch
from backends import (
    assert_twenty_runs_are_equal,
    check_run,
    no_waits,
    on_every_backend,
    planned,
    poisoned,
    sleep,
)
from far_memory import move_pages
from preflash.testing import Case, MaskKind, build, compare, reference, runner

pytestmark = pytest.mark.gpu

CAUSAL = {"mask": MaskKind.CAUSAL}
CASE = Case("stream", (33, 5, 0, 170), (400, 90, 7, 170), 8, 2, 128, page_size=16, **CAUSAL)
SPLIT = dataclasses.replace(CASE, name="split", fixed_split_size=64)
RAGGED = dataclasses.replace(CASE, name="ragged", page_size=0)
MASKED = dataclasses.replace(CASE, name="masked", mask=MaskKind.CUSTOM)
# So many pages that their indices go to the device by themselves.
LISTED = dataclasses.replace(CASE, name="listed", page_size=1, kv_lens=(9000, 8000, 7, 170))
REPEATED = Case("long", (1, 7, 130, 1), (9000, 4000, 2500, 0), 7, 1, 128, page_size=16, **CAUSAL)


def by_name(*cases):
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


# --- bits --------------------------------------------------------------------


@on_every_backend
@by_name(
    *(CASE, SPLIT, RAGGED, REPEATED),
    dataclasses.replace(REPEATED, name="fixed", fixed_split_size=128),
    dataclasses.replace(REPEATED, name="whole", disable_split_kv=True),
)
def test_runs_and_wrappers_repeat_their_bits(backend, case):
    wrapper, inputs = planned(case, backend)
    first = assert_twenty_runs_are_equal(wrapper, inputs)
    another = runner.planned(inputs, backend=backend)
    assert all(map(torch.equal, runner.run(another, inputs), first))


def alone_and_followed(backend, q, k, v, **options):
    """Plans the first half of q, k and v as the whole batch, and as the first request of two.
    Returns a function that runs both and compares the bits of the first half."""
    tokens, keys = len(q) // 2, len(k) // 2

    def run_of(batch_size):
        wrapper = preflash.BatchPrefillWithRaggedKVCacheWrapper(
            runner.workspace("cuda", 1 << 20), backend=backend
        )
        indptr = torch.arange(batch_size + 1, dtype=torch.int32)
        wrapper.plan(
            indptr * tokens, indptr * keys, q.shape[1], k.shape[1], q.shape[2], sm_scale=1.0,
            q_data_type=q.dtype, disable_split_kv=True, **options,
        )  # fmt: skip
        own = (q[: batch_size * tokens], k[: batch_size * keys], v[: batch_size * keys])
        return functools.partial(wrapper.run, *own, return_lse=True)

    alone, followed = run_of(1), run_of(2)

    def check(**run_options):
        pairs = zip(alone(**run_options), followed(**run_options), strict=True)
        assert all(torch.equal(expected, got[:tokens]) for expected, got in pairs)

    return check


@on_every_backend
@pytest.mark.parametrize("fraction", [0.01, 0.1644, 0.3821, 0.4375, 0.9])
def test_a_soft_cap_does_not_see_the_next_request(backend, fraction):
    """The next request's logits are a hundred times as large. Where a cap's polynomials end (at
    0.1644 and 0.3821 of 50 on fa3, at 7/16 on fa2), a logit is capped in one way beside any others,
    to the last bits."""
    half, cap, score = 100, 50.0, 64.0
    q = torch.zeros(2 * half, 1, 64, dtype=torch.float16, device="cuda")
    k = torch.zeros(600, 1, 64, dtype=torch.float16, device="cuda")
    q[:half, :, 0], q[half:, :, 0], k[:300:7, :, 0] = 1.0, 100.0, score
    scale = torch.tensor(fraction * cap / score)
    check = alone_and_followed(backend, q, k, torch.randn_like(k), logits_soft_cap=cap)
    for step in (-1e5, -1e3, *range(-8, 24), 1e3, 1e5):
        check(q_scale=float(scale * (1.0 + step * 2.0**-24)))


@on_every_backend
def test_a_bias_does_not_see_the_next_request(backend):
    """ALiBi leaves far keys a weight that only shows where V of the others is 0, however large the
    next request's products with those keys are."""
    half, keys, heads = 100, 600, 8
    q = torch.zeros(2 * half, heads, 128, dtype=torch.bfloat16, device="cuda")
    k = torch.zeros(2 * keys, heads, 128, dtype=torch.bfloat16, device="cuda")
    v = torch.zeros_like(k)
    q[half:, :, 0], k[: keys // 2, :, 0], v[: keys * 2 // 3] = 100.0, 64.0, 1.0
    alone_and_followed(backend, q, k, v, pos_encoding_mode="ALIBI")()


# --- streams and uploads -----------------------------------------------------


@on_every_backend
def test_work_is_ordered_on_the_current_stream(backend):
    """Inputs become valid late on a side stream; nothing may run ahead on the default stream."""
    inputs = build(SPLIT, device="cuda", index_device="cpu")
    expected = reference(inputs)
    late = inputs.q.clone()
    inputs.q = torch.full_like(late, float("nan"))
    wrapper = runner.make_wrapper(SPLIT, backend=backend, device="cuda")
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        sleep()
        inputs.q.copy_(late)
        runner.plan(wrapper, inputs)
        result = [part.clone() for part in runner.run(wrapper, inputs)]
    side.synchronize()
    runner.compare(inputs, *result, expected=expected).check()


LENGTHS = [
    dataclasses.replace(CASE, qo_lens=(10 + 7 * i, 3), kv_lens=(300 + 50 * i, 40 + i))
    for i in range(12)
]
MASKED_CASES = [
    Case("mask", (20 + i, 9), (90, 64 + i), 4, 2, 128, mask=MaskKind.CUSTOM, dtype=torch.float16)
    for i in range(6)
]


@on_every_backend
@pytest.mark.parametrize(
    ("cases", "arrays"), [(LENGTHS, "cpu"), (MASKED_CASES, "cuda")], ids=["lengths", "masks"]
)
def test_plans_back_to_back_do_not_overwrite_each_other(backend, cases, arrays):
    """Many plans are uploaded while the stream is still busy; each run gets its own plan."""
    made = [build(case, device="cuda", index_device=arrays, seed=i) for i, case in enumerate(cases)]
    all_expected = [reference(inputs) for inputs in made]
    wrapper = runner.make_wrapper(cases[0], backend=backend, device="cuda")
    torch.cuda.synchronize()
    sleep()
    results = []
    for inputs in made:
        runner.plan(wrapper, inputs, non_blocking=True)
        results.append(runner.run(wrapper, inputs))
        if inputs.custom_mask is not None:
            inputs.custom_mask.zero_()
    torch.cuda.synchronize()
    for inputs, expected, result in zip(made, all_expected, results, strict=True):
        runner.compare(inputs, *result, expected=expected).check()


@on_every_backend
def test_long_page_lists_back_to_back(backend):
    """More of them than the wrapper keeps memory for. Each is uploaded twice, by its plan on a busy
    stream, and at once by a run with another window on a stream that is not. Keys are not split:
    two runs at once would both write partial results to the wrapper's workspace."""
    whole = dataclasses.replace(LISTED, qo_lens=(3, 5, 0, 17), disable_split_kv=True)
    cases = [dataclasses.replace(whole, kv_lens=(9000 + 900 * i, 8000, 7, 170)) for i in range(8)]
    made = [build(case, device="cuda", index_device="cpu", seed=i) for i, case in enumerate(cases)]
    wrapper = runner.make_wrapper(LISTED, backend=backend, device="cuda")
    expected = []
    for inputs in made:
        runner.plan(wrapper, inputs)
        check_run(wrapper, inputs)
        expected.append([wrapper.run(inputs.q, inputs.cache, window_left=w) for w in (-1, 500)])
    torch.cuda.synchronize()
    busy, other = torch.cuda.Stream(), torch.cuda.Stream()
    results = []
    for inputs in made:
        mine = copy.copy(inputs)
        mine.indices = inputs.indices.clone()
        with torch.cuda.stream(busy):
            sleep(20)
            runner.plan(wrapper, mine)
            mine.indices.fill_(-7)
            whole = wrapper.run(inputs.q, inputs.cache)
        with torch.cuda.stream(other):
            results.append([whole, wrapper.run(inputs.q, inputs.cache, window_left=500)])
    torch.cuda.synchronize()
    for got, wanted in zip(results, expected, strict=True):
        assert all(map(torch.equal, got, wanted))


@on_every_backend
@pytest.mark.parametrize("plans", [True, False], ids=["plan and run", "run"])
@by_name(CASE, SPLIT, RAGGED)
def test_the_host_does_not_wait(backend, case, plans):
    """Lengths on the host, indices on the GPU: neither plan nor run waits for the device; nor does
    the run of a plan that read lengths on the GPU."""
    inputs = build(case, device="cuda", index_device="cpu" if plans else "cuda")
    expected = reference(inputs)
    if plans:
        for name in ("qo_indptr", "kv_indptr", "last_page_len"):
            if (array := getattr(inputs, name)) is not None:
                setattr(inputs, name, array.pin_memory())
        if inputs.indices is not None:
            inputs.indices = inputs.indices.cuda()
    wrapper = runner.planned(inputs, backend=backend)
    outputs = poisoned(inputs)
    # The first launch of a kernel loads it, which may wait.
    runner.run(wrapper, inputs, **outputs)
    with no_waits():
        sleep()
        if plans:
            runner.plan(wrapper, inputs, non_blocking=True)
        result = runner.run(wrapper, inputs, **outputs)
        # The device is still asleep: nobody has waited for it, in torch's ways or any other.
        assert not torch.cuda.current_stream().query()
    torch.cuda.synchronize()
    runner.compare(inputs, *result, expected=expected).check()


@on_every_backend
@pytest.mark.parametrize("non_blocking", [False, True])
@by_name(CASE, SPLIT, MASKED, LISTED)
def test_run_on_another_stream_waits_for_the_upload(backend, case, non_blocking):
    """The wait is on the device: the host does not wait, and the caller's arrays may change."""
    inputs = build(case, device="cuda", index_device="cpu")
    if inputs.custom_mask is not None:
        inputs.custom_mask = inputs.custom_mask.cpu()
    expected = reference(inputs)
    wrapper = runner.make_wrapper(case, backend=backend, device="cuda")
    planning, running = torch.cuda.Stream(), torch.cuda.Stream()
    # The workspace may be memory that the oracle has freed and is still writing to.
    torch.cuda.synchronize()
    # The first launch of a kernel loads it, and the first plans allocate: both may wait.
    with torch.cuda.stream(planning):
        for _ in range(3):
            runner.plan(wrapper, inputs)
            runner.run(wrapper, inputs)
    outputs = poisoned(inputs)
    torch.cuda.synchronize()
    with torch.cuda.stream(planning):
        sleep(500)  # a mask's plan allocates pinned memory: tens of milliseconds beside other tests
        runner.plan(wrapper, inputs, non_blocking=non_blocking)
        assert not planning.query()
    for array in (inputs.qo_indptr, inputs.kv_indptr, inputs.indices, inputs.last_page_len):
        array.fill_(-7)
    if inputs.custom_mask is not None:
        inputs.custom_mask.zero_()
    with torch.cuda.stream(running):
        result = runner.run(wrapper, inputs, **outputs)
    assert not planning.query()
    running.synchronize()
    assert planning.query()  # what ran came after the plan
    runner.compare(inputs, *result, expected=expected).check()


# --- devices and addresses ---------------------------------------------------


@on_every_backend
def test_float32_is_refused_on_the_gpu(backend):
    with pytest.raises((NotImplementedError, ValueError), match=r"float32|f32"):
        planned(CASE.with_dtype(torch.float32), backend)


@on_every_backend
@pytest.mark.parametrize("page_size", [1, 16])
def test_offsets_over_2_31(backend, page_size):
    """A pool of more than 2^31 elements; the pages in use lie at its end."""
    case = Case("huge", (9, 200), (130, 333), 4, 2, 128, page_size=page_size, **CAUSAL)
    inputs = build(case, device="cuda")
    page = page_size * 2 * 128
    pages = 2**31 // page + 1000
    if torch.cuda.mem_get_info()[0] < 5 * pages * page:
        pytest.skip("needs 11 GB of free GPU memory")
    pool = functools.partial(torch.full, (pages, page_size, 2, 128), float("nan"), device="cuda")
    where = pages - 1 - torch.arange(inputs.k.shape[0], device="cuda")
    move_pages(inputs, [pool(dtype=torch.bfloat16) for _ in "kv"], where)
    runner.check(inputs, backend=backend)


@on_every_backend
def test_ragged_offsets_over_2_31(backend):
    """The last request of a ragged tensor of more than 2^31 elements."""
    tokens = 2**31 // (8 * 128) + 4000
    if torch.cuda.mem_get_info()[0] < 10 * tokens * 8 * 128:
        pytest.skip("needs 22 GB of free GPU memory")
    case = Case("far", (1, 70), (1, 300), 8, 8, 128, **CAUSAL)
    inputs = build(case, device="cuda")
    k, v = (torch.zeros(tokens, 8, 128, dtype=torch.bfloat16, device="cuda") for _ in "kv")
    k[-300:], v[-300:] = inputs.k[1:301], inputs.v[1:301]
    wrapper = runner.make_wrapper(case, backend=backend, device="cuda")
    indptrs = ([0, 0, 70], [0, tokens - 300, tokens])
    indptrs = (torch.tensor(values, dtype=torch.int32) for values in indptrs)
    options = {"causal": True, "q_data_type": torch.bfloat16, "disable_split_kv": True}
    wrapper.plan(*indptrs, 8, 8, 128, **options)
    result = wrapper.run(inputs.q[1:], k, v, return_lse=True)
    compare(*result, reference(inputs).map(lambda rows: rows[1:])).check()


needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@on_every_backend
@needs_two_gpus
@by_name(CASE, SPLIT)
def test_the_current_device_may_be_another(backend, case):
    """Tensors on cuda:1 while cuda:0 is current; the current device stays what it was."""
    inputs = build(case, device="cuda:1")
    with torch.cuda.device(0):
        runner.check(inputs, backend=backend)
        assert torch.cuda.current_device() == 0


@on_every_backend
@needs_two_gpus
def test_tensors_on_two_gpus_are_refused(backend):
    inputs = build(RAGGED, device="cuda:0")
    wrapper = runner.planned(inputs, backend=backend)
    with pytest.raises(ValueError, match=r"\bk\b"):
        wrapper.run(inputs.q, inputs.k.to("cuda:1"), inputs.v)
    check_run(wrapper, inputs)


# --- memory ------------------------------------------------------------------


@on_every_backend
@pytest.mark.sanitizer
@pytest.mark.parametrize("dim", [64, 96, 128])
def test_the_end_of_the_allocation_is_not_passed(backend, dim):
    """K, V and q end exactly where their memory ends; compute-sanitizer watches the rest."""
    inputs = build(Case("end", (65,), (77,), 2, 1, dim, **CAUSAL), device="cuda")
    inputs.k, inputs.v = inputs.k[:77].clone(), inputs.v[:77].clone()
    runner.check(inputs, backend=backend)


@on_every_backend
@pytest.mark.sanitizer
def test_outputs_are_written_and_nothing_else(backend):
    """Guard rows and columns around out and lse stay as they were."""
    wrapper, inputs = planned(SPLIT, backend)
    tokens = inputs.q.shape[0]
    out = torch.full((tokens + 4, 10, 160), 7.0, dtype=torch.bfloat16, device="cuda")
    lse = torch.full((tokens + 4, 10), 7.0, device="cuda")
    views = out[2:-2, 1:9, 16:144], lse[2:-2, 1:9]
    runner.run(wrapper, inputs, out=views[0], lse=views[1])
    runner.compare(inputs, *views).check()
    for view, whole in zip(views, (out, lse), strict=True):
        view.fill_(7.0)
        assert bool((whole == 7.0).all())


@on_every_backend
def test_memory_does_not_grow(backend):
    """Plans and runs over and over allocate nothing that stays."""
    inputs = build(SPLIT, device="cuda", index_device="cpu")
    wrapper = runner.make_wrapper(SPLIT, backend=backend, device="cuda")

    def taken() -> int:
        torch.cuda.synchronize()
        free = torch.cuda.mem_get_info()[0]
        for _ in range(20):
            runner.plan(wrapper, inputs)
            runner.run(wrapper, inputs)
        torch.cuda.synchronize()
        return free - torch.cuda.mem_get_info()[0]

    taken()
    gc.collect()  # what earlier tests left would be freed meanwhile
    allocated = torch.cuda.memory_allocated()
    # Free memory also moves with the GPU's other users, such as the tests of a neighbouring
    # worker. Theirs is missing after some rounds, what ours keep after every one.
    assert min(taken() for _ in range(50)) <= 0
    assert torch.cuda.memory_allocated() == allocated
