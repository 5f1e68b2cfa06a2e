"""Refusals of calls: an error, and a pattern of its message."""

import pytest


def refused(says: str, call, *arguments, error=ValueError, **options) -> None:
    """Requires an error of a call whose message matches."""
    with pytest.raises(error, match=says):
        call(*arguments, **options)


def all_refused(says: str, calls) -> None:
    for call in calls:
        refused(says, call)
