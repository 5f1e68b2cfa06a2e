"""The stubs of the public modules agree with the signatures that the package has at run time."""

import ast
import importlib
import inspect

import pytest
import stubs


def test_stubs_are_refreshed():
    for name, text in stubs.stub_texts().items():
        path = stubs.DIRECTORY / f"{name}.pyi"
        assert path.read_text() == text, "`make stubs` writes the stubs of these signatures"


def definitions(body):
    """Returns the functions of a module or class: by name, the nodes of all overloads."""
    found = {}
    for node in body:
        if isinstance(node, ast.FunctionDef):
            found.setdefault(node.name, []).append(node)
    return found


def signature_of(node):
    """Returns the signature that Python makes of a definition without its annotations."""
    for argument in ast.walk(node.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    node.decorator_list, node.returns = [], None
    names = {"torch": importlib.import_module("torch")}
    exec(ast.unparse(node), names)
    return inspect.signature(names[node.name])


def plain(signature):
    return [(p.name, p.kind, p.default) for p in signature.parameters.values()]


def public_functions(tree, module):
    """Yields place, nodes and run-time object of every function and method of a stub."""
    for function, nodes in definitions(tree.body).items():
        yield function, nodes, getattr(module, function)
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            for method, nodes in definitions(node.body).items():
                yield f"{node.name}.{method}", nodes, getattr(getattr(module, node.name), method)


@pytest.mark.parametrize("name", stubs.MODULES)
def test_stubs_have_the_names_and_defaults_of_run_time(name):
    """The first overload has them. run_return_lse() shows the parameters of run() instead."""
    module = importlib.import_module(f"preflash.{name}")
    tree = ast.parse((stubs.DIRECTORY / f"{name}.pyi").read_text())
    exported = next(node for node in tree.body if isinstance(node, ast.Assign))
    assert ast.literal_eval(exported.value) == module.__all__
    functions = list(public_functions(tree, module))
    assert functions
    for place, nodes, function in functions:
        if isinstance(function, property):
            continue
        expected = inspect.signature(function)
        if not place.endswith(".run_return_lse"):
            assert plain(signature_of(nodes[0])) == plain(expected), place
        flags = {"return_lse", "return_lse_p", "save_softmax_stats"}
        assert (len(nodes) > 1) == bool(flags & set(expected.parameters)), place
