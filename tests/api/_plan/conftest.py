"""Fixtures of the folder's tests."""

import pytest
from graph_stage import recorder  # noqa: F401
from preflash import _core


@pytest.fixture
def answers(monkeypatch):
    """The answers of plan_again(): True for a plan that C++ made by itself."""
    found, again = [], _core.plan_again
    monkeypatch.setattr(
        _core, "plan_again", lambda *given: found.append(again(*given)) or found[-1]
    )
    return found
