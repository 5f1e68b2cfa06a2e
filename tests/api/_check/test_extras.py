"""A package that is an extra and is not there: the error holds the pip line that installs it."""

from __future__ import annotations

import importlib
import pathlib
import re
import sys

import pytest
from preflash._check import extras

ROOT = pathlib.Path(__file__).parents[3]


@pytest.mark.parametrize("module", extras.EXTRAS)
def test_the_pip_line_names_an_extra_of_this_distribution(module):
    (extra,) = re.fullmatch(r"pip install 'preflash\[(\w+)\]'", extras.pip_line(module)).groups()
    text = (ROOT / "pyproject.toml").read_text()
    (table,) = re.findall(r"^\[project\.optional-dependencies\]\n(.*?)^\[", text, re.M | re.S)
    assert re.search(rf"^{extra} = \[\"", table, re.M)


def test_is_installed():
    assert extras.is_installed("json")
    assert not extras.is_installed("preflash_no_such_package")


def test_transformers_that_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "preflash.integrations.transformers", raising=False)
    with pytest.raises(ImportError, match=r"transformers.*pip install 'preflash\[transformers\]'$"):
        importlib.import_module("preflash.integrations.transformers")
