"""Experts kept equally busy while a run trains: routers' biases after every step, places now and then.

Every rank knows the load of every layer, so all decide alike. What a checkpoint must know beside the weights (of which
biases are a part) is where experts lie and what load they have had there: so a run that goes on places them as one that
was never stopped would.
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
    """The balance of one engine. All ranks call it alike."""

    def __init__(self, engine: Engine, choice: BalanceChoice) -> None:
        self._engine, self._choice = engine, choice

    @property
    def looks(self) -> bool:
        """Whether there is a load to look at."""
        return self._engine.loads.are_there

    def after_step(self, step: int) -> tuple[float | None, int]:
        """Look at the load of a step, the `step`-th of the run, and do what the recipe says.

        Returns the imbalance, None where nobody counts, and how many experts were moved.
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
        """What a checkpoint says of it, in JSON's types."""
        experts = self._engine.sharded.experts
        places = {} if experts is None else {name: each.placement.ranks for name, each in experts.layers.items()}
        return {_KEY: {"places": places, "load": self._engine.loads.since_placed()}} if places else {}

    def take(self, extra: Mapping[str, Any]) -> None:
        """Go on from what a checkpoint says, before its weights are read.

        Places are for as many ranks as had them. On more or fewer, experts lie in order until they are next placed.
        """
        said, experts = extra.get(_KEY, {}), self._engine.sharded.experts
        for name, ranks in said.get("places", {}).items():
            if experts is not None and name in experts.layers and len(ranks) == experts.group.size:
                experts.layers[name].place(Placement(tuple(map(tuple, ranks))))
        self._engine.loads.begin_anew(said.get("load"))


def imbalance_of(load: Load) -> float | None:
    """The load of the busiest expert over the mean, in the layer where that is highest; 1 is even."""
    found = [max(each) * len(each) / sum(each) for each in load.values() if any(each)]
    return max(found, default=None)
