"""The stubs of the public modules agree with the signatures that the package has at run time."""

import importlib
import inspect
import operator
import types

import pytest
import stubs


def test_stubs_are_refreshed():
    for name, text in stubs.stub_texts().items():
        path = stubs.DIRECTORY / f"{name}.pyi"
        assert path.read_text() == text, "`make stubs` writes the stubs of these signatures"


def executed(name):
    """Executes a stub. Returns its names, and the first definitions of overloads by place."""
    first = {}
    text = (stubs.DIRECTORY / f"{name}.pyi").read_text().replace(", overload\n", "\n")
    names = {"__name__": f"preflash.{name}", "__package__": "preflash"}
    names["overload"] = lambda function: first.setdefault(function.__qualname__, function)
    exec(f"from __future__ import annotations\n{text}", names)
    return names, first


def functions_of(names, module):
    """Returns the functions and methods that a stub defines."""
    owners = [names, *(vars(one) for one in names.values() if isinstance(one, type))]
    found = [one for owner in owners for one in owner.values()]
    return [
        one for one in found if isinstance(one, types.FunctionType) and one.__module__ == module
    ]


@pytest.mark.parametrize("name", stubs.MODULES)
def test_stubs_have_the_names_and_defaults_of_run_time(name):
    """The first overload has them. run_return_lse() shows the parameters of run() instead."""
    module = importlib.import_module(f"preflash.{name}")
    names, overloaded = executed(name)
    assert names["__all__"] == module.__all__
    functions = functions_of(names, module.__name__)
    assert functions
    for function in functions:
        place = function.__qualname__
        expected = inspect.signature(operator.attrgetter(place)(module))
        if not place.endswith(".run_return_lse"):
            shown, wanted = (
                [(p.name, p.kind, p.default) for p in signature.parameters.values()]
                for signature in (inspect.signature(function), expected)
            )
            assert shown == wanted, place
        flags = {"return_lse", "return_lse_p", "save_softmax_stats"}
        assert (place in overloaded) == bool(flags & set(expected.parameters)), place
