"""A case on the device of a test, planned."""

from preflash.testing import Case, Inputs, build, runner


def planned(case: Case, target, **options) -> tuple[Inputs, object]:
    """Inputs and a wrapper; options: of plan()."""
    inputs = build(case, device=target.device)
    wrapper = runner.make_wrapper(case, backend=target.backend, device=target.device)
    runner.plan(wrapper, inputs, **options)
    return inputs, wrapper
