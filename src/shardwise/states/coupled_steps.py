"""Custom optimizers whose step on one parameter depends on others: by a norm of all gradients in `step` (LAMB), or by a
learning rate found from all of them (D-Adaptation, Prodigy). And optimizers that draw random numbers (SGLD).

A rank that has pieces, the parameters of a stage, or some at a time would compute such a norm over these only, and draw
other numbers for them. Such a class is detected by steps on small parameters, with all of them and with some alone.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.errors import ShardwiseError
from shardwise.states.parameter_group import ELEMENTWISE, MATRIXWISE
from shardwise.torch_private import without_step_hooks

#: At most this many groups are tried: the first ones.
_MOST_GROUPS = 16
#: A matrix and a vector of each group.
_SHAPES = ((4, 4), (4,))
#: Scales of gradients that clipping by norm would shorten, and that it would not.
_SCALES = (10.0, 1e-3)
_SEED = 0


def check_coupled(optimizers: Sequence[Optimizer], pieces: str) -> None:
    """Raise an error for an optimizer with coupled steps that does not have all parameters; `pieces`: what it has."""
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        if draws(optimizer):
            raise ShardwiseError(
                f"{kind}.step() draws random numbers, and on this rank it would see {pieces}: parameters would get"
                " other numbers than on one device",
                remedy="a plan of dp with zero=0; or noise that the script adds between steps, by engine.state_dict()"
                " and engine.load_state_dict(state)",
            )
        if type(optimizer) not in ELEMENTWISE | MATRIXWISE and is_coupled(optimizer):
            raise ShardwiseError(
                f"what {kind}.step() does to a parameter depends on others (a norm or a sum over all), and on this rank"
                f" it would see {pieces}",
                remedy="clip= of sw.parallelize for a norm of all gradients; or a plan of dp with zero=0",
            )


def draws(optimizer: Optimizer) -> bool:
    """Return whether steps of a custom optimizer draw from torch's own generator; False if they cannot be tried."""
    kind = type(optimizer)
    if kind in ELEMENTWISE | MATRIXWISE:
        return False
    places, own = _places(optimizer), vars(kind).get("step")
    try:
        with torch.random.fork_rng(devices=[]):
            _stepped(optimizer, places, places)
            now = torch.get_rng_state()
            torch.manual_seed(_SEED)
            return not torch.equal(torch.get_rng_state(), now)
    except Exception:  # The real step will raise the same error.
        return False
    finally:
        # Copies let torch wrap the step of a class, which fails for optimizers that never called `super().__init__()`.
        if own is not None and vars(kind)["step"] is not own:
            kind.step = own  # type: ignore[method-assign]


def _places(optimizer: Optimizer) -> list[tuple[int, int]]:
    """Return the small parameters of each group, by their shape."""
    groups = range(min(len(optimizer.param_groups), _MOST_GROUPS))
    return [(group, shape) for group in groups for shape in range(len(_SHAPES))]


def is_coupled(optimizer: Optimizer) -> bool:
    """Return whether a step on some parameters alone differs from one on all; False if it cannot be tried."""
    places = _places(optimizer)
    rules: list[Callable[[int, int], bool]] = [lambda _, shape: not shape, lambda _, shape: bool(shape)]
    if len(optimizer.param_groups) > 1:
        rules.append(lambda group, _: group % 2 == 1)
    try:
        with torch.random.fork_rng(devices=[]):
            every = _stepped(optimizer, places, places)
            return any(
                not torch.allclose(every[place], alone, rtol=1e-9, atol=1e-9, equal_nan=True)
                for rule in rules
                for place, alone in _stepped(optimizer, places, [each for each in places if rule(*each)]).items()
            )
    except Exception:  # The real step will raise the same error.
        return False


def _stepped(optimizer: Optimizer, places: list[Any], kept: list[Any]) -> dict[Any, Tensor]:
    """Return small parameters by group and shape, after a few steps with only those in `kept`."""
    generator = torch.Generator().manual_seed(0)
    weights = {place: nn.Parameter(_drawn(place[1], generator)) for place in places}
    twin = without_step_hooks(optimizer)
    # Parameters are not copied: they may be large, or not there while offloaded.
    memo: dict[int, Any] = {id(each): each for group in optimizer.param_groups for each in group["params"]}
    memo[id(optimizer)] = twin
    for key, value in vars(optimizer).items():
        if key not in ("param_groups", "state", "step") and not key.startswith("_"):
            vars(twin)[key] = copy.deepcopy(value, memo)
    twin.param_groups = [
        {**group, "params": [weights[place] for place in kept if place[0] == number]}
        for number, group in enumerate(optimizer.param_groups[:_MOST_GROUPS])
    ]
    torch.manual_seed(_SEED)
    for scale in _SCALES:
        for place, each in weights.items():
            each.grad = scale * _drawn(place[1], generator)
        twin.step()
    return {place: weights[place].detach() for place in kept}


def _drawn(shape: int, generator: torch.Generator) -> Tensor:
    return torch.randn(_SHAPES[shape], generator=generator, dtype=torch.float64)
