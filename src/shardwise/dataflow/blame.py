"""Errors of work that ran long after it was submitted: they name the task, the kernel, the place and the line."""

from types import CodeType

from shardwise.errors import ShardwiseError


class TaskError(ShardwiseError):
    """A task failed. What it raised is the cause."""


def blame_task(name: str, kernel: str, place: str, code: CodeType, line: int, error: Exception) -> Exception:
    """Turn what a task raised into an error that says which task it was."""
    what = name if name == kernel else f"{name} ({kernel})"
    where = f"{code.co_filename}, line {line}"
    return _caused(TaskError(f"task {what} failed at {place}: {_text(error)}; it was submitted in {where}"), error)


def blame_copy(name: str, source: str, target: str, error: Exception) -> Exception:
    """Turn what a copy raised into an error that says which copy it was."""
    return _caused(TaskError(f"the copy of {name} from {source} to {target} failed: {_text(error)}"), error)


def _text(error: Exception) -> str:
    first = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _caused(made: TaskError, error: Exception) -> TaskError:
    made.__cause__ = error
    return made
