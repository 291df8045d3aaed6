"""Room for the frames of deep calls, so that Python does not ask the system for memory again and again.

CPython 3.11 keeps frames in pieces of 16 KiB, of 60 to 100 calls. The first frame that does not fit maps a new piece,
and its return unmaps it. A loop whose calls cross the end of a piece does both each time: 7 us a call instead of 0.05
(Xeon 2.5 GHz). Under pytest calls are a hundred deep before a test begins, and some loop of it is always at an end.
"""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

#: A piece is at least as large as its first frame, rounded up to a power of two: this makes it 1 MiB. Half of that is
#: for the calls inside. What is not used takes no memory.
_SLOTS = 66_000

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


def with_room(function: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
    """Return a function that calls another, and has room for 2,000 calls inside each other in it."""

    def call(*args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
        return function(*args, **kwargs)

    call.__code__ = call.__code__.replace(co_stacksize=_SLOTS)
    return call
