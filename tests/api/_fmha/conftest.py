"""Lengths on a GPU are not read by the host; the CPU takes their path in one fixture."""

import types

import pytest
from preflash._fmha.lengths import FmhaLengths


@pytest.fixture
def unread_lengths(monkeypatch):
    """Hides the lengths from the host, and returns the CPU as a target.

    Plans are for the longest requests then, and each call replaces their lengths and pages. No
    public call does so without a GPU.
    """
    monkeypatch.setattr(FmhaLengths, "on_host", property(lambda self: False))
    return types.SimpleNamespace(device="cpu", backend="cpu")
