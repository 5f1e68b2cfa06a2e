"""Fixtures of the folder's tests."""

import pytest
from preflash._pod import pod_plan


@pytest.fixture
def two_launches(monkeypatch):
    """Makes every pair two launches, as a pair that no kernel takes as one."""
    monkeypatch.setattr(pod_plan, "_forced_apart", True)
