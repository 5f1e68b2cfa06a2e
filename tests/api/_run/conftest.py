"""Fixtures of the folder's tests."""

from graph_stage import recorder  # noqa: F401
