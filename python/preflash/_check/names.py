"""Names of arguments in errors: what a call does not have, and what its caller calls them."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

_UNKNOWN = re.compile(r"unexpected keyword argument '(\w+)'$")


def with_nearest(
    message: str, names: Iterable[str], ways_out: Mapping[str, str] = MappingProxyType({})
) -> str:
    """A TypeError's message about an unknown keyword with its way out or with the nearest name, as
    Python 3.13 has it; every other message as it is."""
    import difflib  # needed once something is wrong

    unknown = _UNKNOWN.search(message)
    if unknown and unknown[1] in ways_out:
        return f"{message}: {ways_out[unknown[1]]}"
    near = difflib.get_close_matches(unknown[1], names, n=1) if unknown else []
    return f"{message}. Did you mean {near[0]!r}?" if near else message


REFUSALS = (TypeError, ValueError, NotImplementedError)


def raise_renamed(error: Exception, names: Mapping[str, str]) -> NoReturn:
    """Raises the error of REFUSALS with its words replaced by `names`. Its cause is the original
    error, whose traceback ends at the check and whose message has the words of the source."""
    says = re.sub(r"\w+", lambda word: names.get(word[0], word[0]), str(error))
    if says == str(error):
        raise error
    raise type(error)(says) from error


@contextlib.contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Makes errors name the arguments as the caller's caller knows them."""
    try:
        yield
    except REFUSALS as error:
        raise_renamed(error, names)


def tells_nearest(function: Function) -> Function:
    """Adds the nearest name to what a call says of an unknown keyword. It costs every call a call
    of Python's: for constructors, not for run()."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            if error.__traceback__.tb_next is None:  # not of the function's body
                names = inspect.signature(function).parameters
                raise TypeError(with_nearest(str(error), names)) from None
            raise

    return call
