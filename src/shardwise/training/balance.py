"""Load balancing of experts during training: router biases after every step, expert placement every few steps.

Every rank knows the load of every layer, so all decide the same. Besides the weights, which include the biases, a
checkpoint has the placement of experts and their load since they were placed. So a resumed run places experts as an
uninterrupted one would.
"""

from collections.abc import Mapping
from typing import Any

from shardwise.engine.engine import Engine
from shardwise.nets.balance import correct_balance
from shardwise.sharding.expert.load import Load
from shardwise.sharding.expert.placement import Placement
from shardwise.training.recipe import BalanceChoice

_KEY = "experts"


class Balancer:
    """Balances the experts of one engine. All ranks make the same calls."""

    def __init__(self, engine: Engine, choice: BalanceChoice) -> None:
        self._engine, self._choice = engine, choice

    @property
    def looks(self) -> bool:
        """Whether the engine measures expert load."""
        return self._engine.loads.are_there

    def after_step(self, step: int) -> tuple[float | None, int]:
        """Correct biases and move experts, as the recipe says, by the load of step `step`, counted from 1.

        Return the imbalance (None if no load is measured) and the number of experts moved.
        """
        engine, choice = self._engine, self._choice
        load = engine.expert_load()
        if choice.bias_rate:
            correct_balance(engine.module, choice.bias_rate, load)
        moved: Mapping[str, int] = {}
        if choice.place_every and step % choice.place_every == 0:
            moved = engine.rebalance_experts()
        return imbalance_of(load), sum(moved.values())

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, in JSON types."""
        experts = self._engine.sharded.experts
        places = {} if experts is None else {name: each.placement.ranks for name, each in experts.layers.items()}
        return {_KEY: {"places": places, "load": self._engine.loads.since_placed()}} if places else {}

    def take(self, extra: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint, before its weights are read.

        A placement is valid only for its number of ranks. On more or fewer, experts are in order until next placed.
        """
        said, experts = extra.get(_KEY, {}), self._engine.sharded.experts
        for name, ranks in said.get("places", {}).items():
            if experts is not None and name in experts.layers and len(ranks) == experts.group.size:
                experts.layers[name].place(Placement(tuple(map(tuple, ranks))))
        self._engine.loads.begin_anew(said.get("load"))


def imbalance_of(load: Load) -> float | None:
    """Return the highest load of an expert over the mean of its layer, maximised over layers. 1 is balanced."""
    found = [max(each) * len(each) / sum(each) for each in load.values() if any(each)]
    return max(found, default=None)
