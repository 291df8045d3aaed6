"""Arguments that a unit writes to in place: `nn.ReLU(inplace=True)` as its first layer, a board with a row per block.

A recomputed unit must find them as its first run did. Which arguments it writes to is known once it has run: before its
first call all of its tensors are copied, before all others only those that are known to be written.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from shardwise.errors import ShardwiseError
from shardwise.stages.split.switch import Inner
from shardwise.torch_private import version_of

#: An argument's place, or its name.
_Key = int | str


def _each_once(tensors: Mapping[_Key, Tensor], make: Callable[[Tensor], Tensor]) -> dict[_Key, Tensor]:
    """Make something of each tensor; of one that is passed twice, one thing for both.

    `nn.MultiheadAttention` projects keys and values in one product if they are the same object.
    """
    made: dict[int, Tensor] = {}
    for each in tensors.values():
        if id(each) not in made:
            made[id(each)] = make(each)
    return {key: made[id(each)] for key, each in tensors.items()}


class WrittenArguments:
    """The arguments that one unit was seen to write to; unknown before its first call."""

    def __init__(self, unit: str) -> None:
        self._unit = unit
        self._known: frozenset[_Key] | None = None

    def kept(
        self, call: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Inner, tuple[Any, ...], dict[str, Any]]:
        """Wrap a call so that later runs find the arguments of its first one; return it with the arguments to pass.

        Copied arguments are passed as None: torch's checkpoint holds its arguments until the recomputation, and refuses
        those that were written to since.
        """
        given: list[tuple[_Key, Any]] = [*enumerate(args), *kwargs.items()]
        tensors = {key: each for key, each in given if isinstance(each, Tensor)}
        first = {key: each for key, each in tensors.items() if self._known is None or key in self._known}
        copies = _each_once(first, lambda each: each.detach().clone().requires_grad_(each.requires_grad))
        versions = {key: (each, version_of(each)) for key, each in tensors.items()}

        def run(*args: Any, **kwargs: Any) -> Any:
            is_first = bool(versions)
            # A leaf that requires a gradient cannot be written to in place, so pass a clone of each copy.
            held = dict(first) if is_first else _each_once(copies, Tensor.clone)
            result = call(
                *(held.get(place, each) for place, each in enumerate(args)),
                **{key: held.get(key, each) for key, each in kwargs.items()},
            )
            if is_first:
                written = frozenset(key for key, (each, version) in versions.items() if version_of(each) != version)
                self._learn(written)
                copies.update({key: each for key, each in first.items() if key not in written})
                first.clear()
                versions.clear()
            return result

        return (
            run,
            tuple(None if place in first else each for place, each in enumerate(args)),
            {key: None if key in first else each for key, each in kwargs.items()},
        )

    def _learn(self, written: frozenset[_Key]) -> None:
        if self._known is not None and not written <= self._known:
            raise ShardwiseError(
                f"{self._unit} writes into a tensor that it is given, which it did not in its first call: computed"
                " again in the backward, it would find what it has written",
                remedy="a copy of it in the forward (x = x.clone()), or a plan without recompute",
            )
        self._known = written if self._known is None else self._known
