"""Helpers build a case on the device of a test, plan it, and compare its run with the oracle."""

import pytest
import torch
from preflash.testing import Case, Inputs, build, runner
from preflash.testing.oracle import attend, concatenate

PAGED_ARRAYS = ("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")


def unplanned(case: Case, target, **options) -> tuple[Inputs, object]:
    """Returns inputs and a wrapper without a plan; options: of the constructor."""
    inputs = build(case, device=target.device)
    backend = {"backend": target.backend, "device": target.device, **options}
    return inputs, runner.make_wrapper(case, **backend)


def planned(case: Case, target, **options) -> tuple[Inputs, object]:
    """Returns inputs and a planned wrapper; options: of plan()."""
    inputs, wrapper = unplanned(case, target)
    runner.plan(wrapper, inputs, **options)
    return inputs, wrapper


def check_run(inputs: Inputs, wrapper, expected=None, **options) -> tuple:
    """Compares run() into poisoned outputs with the oracle; returns (out, lse)."""
    result = runner.run(wrapper, inputs, **options)
    runner.compare(inputs, *result, expected).check()
    return result


def tensors(inputs: Inputs) -> tuple:
    """Returns the first arguments of run(): q, and the cache or k and v."""
    return (inputs.q, inputs.cache) if inputs.case.paged else (inputs.q, inputs.k, inputs.v)


def plan_arguments(inputs: Inputs) -> dict:
    """Returns the arguments of plan() by name."""
    positional, options = runner.plan_arguments(inputs)
    arrays = PAGED_ARRAYS if inputs.case.paged else ("qo_indptr", "kv_indptr")
    names = (*arrays, "num_qo_heads", "num_kv_heads", "head_dim", "page_size")
    return {**dict(zip(names, positional, strict=False)), **options}


def table(inputs: Inputs) -> tuple:
    """Returns the page table as plan() of decode wrappers takes it."""
    return (inputs.kv_indptr, inputs.indices, inputs.last_page_len)


def bounds_of(inputs: Inputs) -> dict:
    """Returns the options of plan() for upper bounds: those of the case, whose number of keys runs
    read."""
    lens = torch.tensor(inputs.case.kv_lens, dtype=torch.int32, device=inputs.q.device)
    return {"seq_lens": lens, "lengths_are_upper_bounds": True}


def shared_prefix(case: Case, device, prefix: int) -> tuple:
    """Returns inputs of a paged case, (k, v) of a prefix of its requests in the case's layout, and
    the results of attention over the prefix and the pages."""
    inputs, generator = build(case, device=device), torch.Generator().manual_seed(7)
    shape = (2, prefix, case.num_kv_heads, case.head_dim)
    k, v = torch.randn(shape, generator=generator).to(case.dtype).to(device)
    expected = concatenate([
        attend(one.q, torch.cat([k, one.k]), torch.cat([v, one.v]), inputs.pipeline)
        for one in map(inputs.request, range(case.batch_size))
    ])  # fmt: skip
    expected.spread = expected.spread + 2 * expected.out.abs()  # the roundings of the merge
    if case.layout == "HND":
        k, v = k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()
    return inputs, (k, v), expected


def mistakes(*rows) -> list:
    """Returns parameters (argument, value, error, says) of rows (argument, error, *values).

    A value is wrong for the argument, or a function that makes a wrong value of the right one. In
    a list [value, says], `says` is a pattern of the message, else the argument's name.
    """
    found = []
    for argument, error, *values in rows:
        for value in values:
            value, says = value if isinstance(value, list) else (value, rf"\b{argument}\b")
            text = getattr(value, "__name__", str(value).replace("\n", " ")[:24])
            found.append(pytest.param(argument, value, error, says, id=f"{argument}-{text}"))
    return found


def spoil(arguments: dict, argument: str, value, target=None) -> None:
    """Puts a wrong value of mistakes() into the arguments of a call, on the target's device."""
    if callable(value):
        arguments[argument] = value(arguments.get(argument))
    else:
        arguments[argument] = target.to(value) if target and hasattr(value, "device") else value
