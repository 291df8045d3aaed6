"""Find the line of user code that is running: the innermost frame outside torch and this library."""

import traceback
from pathlib import Path

import torch

_NOT_THEIRS = (Path(torch.__file__).parent, Path(__file__).parents[2])


def line_of() -> str:
    """Return the line that is running."""
    return _last_of_theirs(traceback.extract_stack())


def line_of_error(error: BaseException) -> str:
    """Return the line that raised an error."""
    return _last_of_theirs(traceback.extract_tb(error.__traceback__))


def _last_of_theirs(frames: traceback.StackSummary) -> str:
    for frame in reversed(frames):
        path = Path(frame.filename)
        if not any(path.is_relative_to(each) for each in _NOT_THEIRS):
            return f"{path.name}:{frame.lineno} ({frame.line})"
    return "an unknown line"
