"""Detect collectives in a trial: one rank may try a forward and a loss for all only if they do not communicate.

Every rank has the same module and the same example, so one of them can try both, and the others use its result. But a
loss that gathers outputs of all ranks would wait for the others. So the first runs of such a trial are watched, and
stop at the first collective; then all ranks run the trial.
"""

from typing import Any

from torch import Tensor

from shardwise.torch_private import TorchDispatchMode, pytree

_NAMESPACES = frozenset({"c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd"})


class CollectiveMetError(BaseException):
    """A collective was about to begin. Not an `Exception`, because trials catch those as results of the module."""


class NoCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes a collective raise before anything is sent."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        if func.namespace in _NAMESPACES:
            raise CollectiveMetError(str(func))
        return func(*args, **(kwargs or {}))


class SeenCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records whether a collective has begun within it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.are_there = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        self.are_there = self.are_there or func.namespace in _NAMESPACES
        return func(*args, **(kwargs or {}))


class ChangedCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets other ranks be told other numbers than this one has: a result that depends on what ranks tell changes.

    Sums are told twice the numbers, and gathered tensors are shifted. Broadcasts are left alone, since ranks agree by
    them on what one has drawn; so are integers that are gathered, which may be the bytes of an object.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        name = str(func).partition(".")[2]
        if func.namespace in _NAMESPACES and "reduce" in name and "scatter" not in name:
            if func.namespace == "c10d":
                for each in args[0]:
                    each.mul_(2)  # The sum is written there.
            else:
                args = (args[0] * 2, *args[1:])
        elif func.namespace in _NAMESPACES and "gather" in name:
            at = 1 if func.namespace == "c10d" else 0  # Before it are the tensors that are written.
            args = (*args[:at], pytree.tree_map(_shifted, args[at]), *args[at + 1 :])
        return func(*args, **(kwargs or {}))


def _shifted(given: Any) -> Any:
    is_number = isinstance(given, Tensor) and given.is_floating_point()
    return given * 2 + 1 if is_number else given
