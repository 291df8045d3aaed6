"""A module that is not what it was when its engine was made: told at the next step, and not trained half."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from shardwise.errors import ShardwiseError, some
from shardwise.torch_private import parameter_slots, submodules

_AGAIN = "state = engine.state_dict(), then sw.parallelize(module, ...) again and engine.load_state_dict(state)"


class Unchanged:
    """The parameters of a module, and which of them are trained, as they are when this is made."""

    def __init__(self, module: nn.Module) -> None:
        #: Where each parameter is kept, by which name of its own and of the module's, and whether it is trained.
        self._kept: list[tuple[Mapping[str, Any], str, str, nn.Parameter, bool]] = []
        self._sizes: list[tuple[str, Mapping[str, Any], int, Mapping[str, Any], int]] = []
        for prefix, owner in module.named_modules():
            slots, below = parameter_slots(owner), submodules(owner)
            self._sizes.append((prefix, slots, len(slots), below, len(below)))
            self._kept += [
                (slots, key, f"{prefix}.{key}" if prefix else key, each, each.requires_grad)
                for key, each in slots.items()
                if each is not None
            ]

    def check(self) -> None:
        """Refuse what has become of the module, if nobody would train it."""
        for slots, key, name, parameter, was_trained in self._kept:
            if slots.get(key) is not parameter:
                raise ShardwiseError(
                    f"{name} is another parameter than the engine was made with, which would go on with the old one",
                    remedy=f"module.get_parameter({name!r}).data.copy_(new), or engine.load_state_dict(state)",
                )
            if parameter.requires_grad and not was_trained:
                raise self._unfrozen()
        for prefix, slots, count, below, number in self._sizes:
            if len(slots) != count or len(below) != number:
                raise ShardwiseError(
                    f"{prefix or 'the module'} has {len(slots)} parameters and {len(below)} submodules, and had {count}"
                    f" and {number} when the engine was made: what is new would never be trained",
                    remedy=_AGAIN,
                )

    def _unfrozen(self) -> ShardwiseError:
        names = [name for _, _, name, each, was_trained in self._kept if each.requires_grad and not was_trained]
        return ShardwiseError(
            f"{len(names)} parameters require a gradient now and did not when the engine was made ({some(names)}): no"
            " optimizer has them, and they would never move",
            remedy=f"{_AGAIN}. Or requires_grad_() before the first sw.parallelize, and a group with lr=0.0 until it is"
            " their turn",
        )
