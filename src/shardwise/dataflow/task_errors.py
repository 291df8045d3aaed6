"""Errors of tasks: refused at submission, before anything is put into a stream, or raised later while running.

Work runs long after it was submitted, so its errors name the task, the kernel, the place and the line.
"""

from types import CodeType

from torch import Tensor

from shardwise.dataflow.data import Data
from shardwise.dataflow.launch import Call
from shardwise.errors import ShardwiseError

#: Arguments of these types need no check. Checking whether a value is a tensor is slow.
PLAIN = frozenset({Data, int, float, bool, str, type(None)})


class TaskError(ShardwiseError):
    """A task failed. The exception it raised is the `__cause__`."""


def check_call(call: Call, keeper: object) -> None:
    """Refuse a task with another machine's data, with writes to read-only data, or that cannot be launched."""
    for data in call.reads:
        if data.keeper is not keeper:
            raise _of_another_machine(data)
    for data in call.writes:
        if data.keeper is not keeper:
            raise _of_another_machine(data)
        if data.unwritable is not None:
            raise ShardwiseError(
                f"{call.name} writes {data.name}, which {data.unwritable}", remedy="machine.data(tensor.clone())"
            )
    if call.launch.is_kernel:
        _check_kernel(call)


def _check_kernel(call: Call) -> None:
    if call.grid is None:
        raise ShardwiseError(
            f"{call.name} is a Triton kernel and was given no grid", remedy="grid=(triton.cdiv(n, BLOCK),)"
        )
    given = [each for argument in call.args for each in (argument if type(argument) is tuple else (argument,))]
    for argument in given:
        if type(argument) not in PLAIN and isinstance(argument, Tensor):
            raise ShardwiseError(
                f"{call.name} is given a tensor of {list(argument.shape)} that the machine does not know",
                remedy="machine.data(tensor)",
            )


def compiled_on_cpu(call: Call, place: str) -> ShardwiseError:
    """Return the error: Triton fixes whether a kernel is compiled or interpreted when `@triton.jit` makes it."""
    return ShardwiseError(
        f"{call.name} is a Triton kernel that was made to be compiled for a GPU, and {place} is on the CPU",
        remedy='os.environ["TRITON_INTERPRET"] = "1" above the kernel\'s @triton.jit: Triton interprets it then',
    )


def _of_another_machine(data: Data) -> ShardwiseError:
    return ShardwiseError(f"{data.name} belongs to another machine", remedy=f"machine.data({data.name}.get())")


def blame_task(name: str, kernel: str, place: str, code: CodeType, line: int, error: Exception) -> Exception:
    """Turn a task's exception into an error that says which task it was."""
    what = name if name == kernel else f"{name} ({kernel})"
    where = f"{code.co_filename}, line {line}"
    return _caused(TaskError(f"task {what} failed at {place}: {_text(error)}; it was submitted in {where}"), error)


def blame_copy(name: str, source: str, target: str, error: Exception) -> Exception:
    """Turn a copy's exception into an error that says which copy it was."""
    return _caused(TaskError(f"the copy of {name} from {source} to {target} failed: {_text(error)}"), error)


def _text(error: Exception) -> str:
    first = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _caused(made: TaskError, error: Exception) -> TaskError:
    made.__cause__ = error
    return made
