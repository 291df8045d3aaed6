"""Find the line of user code that is running, the innermost frame outside torch and this library; and whether it was
compiled, or is in a checkpoint."""

import inspect
import sys
import traceback
from pathlib import Path
from types import FrameType

import torch
from torch import nn
from torch.utils import checkpoint

from shardwise.torch_private import COMPILED_CALL

_NOT_THEIRS = (Path(torch.__file__).parent, Path(__file__).parents[2])
_CHECKPOINT = inspect.unwrap(checkpoint.checkpoint).__code__


def line_of() -> str:
    """Return the line that is running."""
    return _last_of_theirs(traceback.extract_stack())


def compiled_around() -> str | None:
    """Return the name of a function that the user compiles and that is being called; None if there is none."""
    frame = sys._getframe(1) if "torch._dynamo" in sys.modules else None
    while frame is not None:
        if frame.f_code.co_qualname.startswith(COMPILED_CALL) and "fn" in frame.f_locals:
            fn = frame.f_locals["fn"]
            owner = getattr(fn, "__self__", None)
            name = getattr(fn, "__qualname__", type(fn).__name__)
            return type(owner).__name__ if isinstance(owner, nn.Module) and name.startswith("Module.") else str(name)
        frame = frame.f_back
    return None


def checkpoint_around() -> FrameType | None:
    """Return the frame of the outermost `torch.utils.checkpoint.checkpoint` that is running; None if there is none.

    Without gradients it runs its function as it is, and nothing else tells of it.
    """
    found, frame = None, sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is _CHECKPOINT:
            found = frame
    return found


def line_of_error(error: BaseException) -> str:
    """Return the line that raised an error."""
    return _last_of_theirs(traceback.extract_tb(error.__traceback__))


def _last_of_theirs(frames: traceback.StackSummary) -> str:
    for frame in reversed(frames):
        path = Path(frame.filename)
        if not any(path.is_relative_to(each) for each in _NOT_THEIRS):
            return f"{path.name}:{frame.lineno} ({frame.line})"
    return "an unknown line"
