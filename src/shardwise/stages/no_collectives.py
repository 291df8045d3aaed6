"""Detect collectives in a trial: one rank may try a forward and a loss for all only if they do not communicate.

Every rank has the same module and the same example, so one of them can try both, and the others use its result. But a
loss that gathers outputs of all ranks would wait for the others. So the first runs of such a trial are watched, and
stop at the first collective; then all ranks run the trial.
"""

from typing import Any

from shardwise.torch_private import TorchDispatchMode

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
