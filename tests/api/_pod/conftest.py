"""Fixtures of the folder's tests."""

import pytest
from graph_stage import recorder  # noqa: F401
from preflash._pod import pod_plan


@pytest.fixture
def two_launches(monkeypatch):
    """Every pair is two launches, as a pair that no kernel takes as one."""
    monkeypatch.setattr(pod_plan, "_forced_apart", True)
