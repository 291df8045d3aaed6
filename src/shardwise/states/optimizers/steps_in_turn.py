"""Optimizers whose parameters cannot be updated some at a time, as `offload` does: found by steps on small ones.

What is updated then is a substitute of a parameter, another one in every step, and the state of a parameter is in
`optimizer.state[parameter]` meanwhile. An optimizer that keeps state elsewhere (a dictionary of its own, the optimizers
that it is a chain of, a tensor that counts steps) does not find it again.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.errors import ShardwiseError
from shardwise.states.coupled_steps import NUM_STEPS, Place, SmallSteps, are_close, in_groups, is_known, places_of
from shardwise.states.optimizer_copy import copy_with, leaving_no_trace
from shardwise.states.tiers.chunks import Substitute, step_on
from shardwise.states.tiers.step_numbers import StepNumbers


def check_in_turn(optimizers: Sequence[Optimizer]) -> None:
    """Raise an error for a custom optimizer that must update all parameters in one call."""
    for optimizer in optimizers:
        if not is_known(optimizer) and not works_in_turn(optimizer):
            kind = type(optimizer).__name__
            raise ShardwiseError(
                f"{kind} keeps something from step to step that is not in {kind}.state[p], such as a dictionary of its"
                " own, a tensor that counts steps, or the state of another optimizer; with offload, step() is called"
                " for some parameters at a time, and would not find it again",
                remedy="self.state[p] in step() for what belongs to a parameter, and a number (self.t += 1) for what"
                " counts steps; or a plan without offload",
            )


def works_in_turn(optimizer: Optimizer) -> bool:
    """Return whether a few steps are the same with all parameters at once and in turn; True if they cannot be tried."""
    places = places_of(optimizer)
    try:
        with torch.random.fork_rng(devices=[]):
            at_once = _stepped(optimizer, [places])
            in_turn = _stepped(optimizer, [[each for each in places if each[1] == shape] for shape in (0, 1)])
            return are_close(at_once, in_turn)
    except Exception:  # The real step will raise the same error.
        return True


def _stepped(optimizer: Optimizer, turns: Sequence[Sequence[Place]]) -> list[Tensor]:
    """Return small parameters after a few steps: on themselves if there is one turn, else on substitutes."""
    places = sorted(place for turn in turns for place in turn)
    steps = SmallSteps(places)
    weights = {place: nn.Parameter(steps.weights[place]) for place in places}
    twin = copy_with(optimizer, in_groups(optimizer, {place: [each] for place, each in weights.items()}))
    numbers, states = StepNumbers(twin), dict[Place, dict[str, Any]]()
    with leaving_no_trace(optimizer):
        for step in range(NUM_STEPS):
            gradients = steps.gradients(step)
            for place, each in weights.items():
                each.grad = gradients[place]
            if len(turns) == 1:
                twin.step()
                continue
            for turn in turns:
                given = [_substitute(weights[place], states.get(place, {})) for place in turn]
                with numbers.call(step):
                    states.update(zip(turn, step_on(twin, None, given), strict=True))
    return [each.detach() for each in weights.values()]


def _substitute(weight: nn.Parameter, state: dict[str, Any]) -> Substitute:
    """They share memory."""
    stand_in = nn.Parameter(weight.detach())
    vars(stand_in).update(vars(weight))
    stand_in.grad = weight.grad
    return Substitute(weight, stand_in, state)
