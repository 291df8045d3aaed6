"""What one rank may try for all of them: a forward and a loss in which ranks do not talk to each other.

Every rank has the same module and the same example, so one of them can try both, and the others take its word. But a
loss that gathers outputs of all ranks would wait for the others there. The first runs of such a trial are watched for
that, and end at the first collective: then all ranks try.
"""

from typing import Any

from shardwise.torch_private import TorchDispatchMode

_NAMESPACES = frozenset({"c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd"})


class CollectiveMetError(BaseException):
    """A collective was about to begin. No `Exception`: whoever tries something takes those for what it does."""


class NoCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within it a collective raises before anything is sent."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        if func.namespace in _NAMESPACES:
            raise CollectiveMetError(str(func))
        return func(*args, **(kwargs or {}))


class SeenCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees whether a collective has begun within it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.are_there = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        self.are_there = self.are_there or func.namespace in _NAMESPACES
        return func(*args, **(kwargs or {}))
