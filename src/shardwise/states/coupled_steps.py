"""Custom optimizers whose step on one parameter depends on others: by a norm of all gradients in `step` (LAMB), or by a
learning rate found from all of them (D-Adaptation, Prodigy). Those whose step on an element depends on others of its
parameter (LARS). And optimizers that draw random numbers (SGLD).

A rank that has pieces, the parameters of a stage, or some at a time would compute such a norm over these only, and draw
other numbers for them. Such a class is detected by steps on small parameters, with all of them, with some alone, and
with pieces of them.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.errors import ShardwiseError
from shardwise.states.optimizer_copy import copy_with, leaving_no_trace
from shardwise.states.parameter_group import ELEMENTWISE, MATRIXWISE

#: At most this many groups are tried: the first ones.
MOST_GROUPS = 16
#: A matrix and a vector of each group.
_SHAPES = ((4, 4), (4,))
#: Scales of gradients that clipping by norm would shorten, and that it would not. Each parameter has another one.
_SCALES = (10.0, 1e-3, 1.0, 0.1)
#: What is done in every fifth or tenth step, or after a few, is done.
NUM_STEPS = 12
#: The first element is this much larger than others: a piece with it is not like a piece without.
_LARGER = 30.0
_SEED = 0

#: A small parameter: the number of its group, and that of its shape.
Place = tuple[int, int]
#: Splits a small parameter into the pieces that ranks would have.
Cut = Callable[[Tensor], Sequence[Tensor]]


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
        if not is_known(optimizer) and is_coupled(optimizer):
            raise ShardwiseError(
                f"what {kind}.step() does to a parameter depends on others (a norm or a sum over all), and on this rank"
                f" it would see {pieces}",
                remedy="clip= of sw.parallelize for a norm of all gradients; or a plan of dp with zero=0",
            )


def check_elementwise(optimizers: Sequence[Optimizer], pieces: str, *, are_flat: bool) -> None:
    """Raise an error for an optimizer that was said to treat every number by itself, and does not. `are_flat`: pieces
    are elements in a row, and not rows or columns."""
    for optimizer in optimizers:
        if not is_known(optimizer) and not is_elementwise(optimizer, are_flat=are_flat):
            kind = type(optimizer).__name__
            raise ShardwiseError(
                f"what {kind}.step() does to an element of a parameter depends on others of it, or on its shape, and on"
                f" this rank it would see {pieces}; but sw.Share(whole=False) says that every number is treated by"
                " itself",
                remedy="sw.Share(make=..., whole=True)",
            )


def is_known(optimizer: Optimizer) -> bool:
    """Whether it is one of torch's or of ours, of which it is known what they do."""
    return type(optimizer) in ELEMENTWISE | MATRIXWISE


def draws(optimizer: Optimizer) -> bool:
    """Return whether steps of a custom optimizer draw from torch's own generator; False if they cannot be tried."""
    kind = type(optimizer)
    if is_known(optimizer):
        return False
    places, own = places_of(optimizer), vars(kind).get("step")
    try:
        with torch.random.fork_rng(devices=[]):
            _stepped(optimizer, places)
            now = torch.get_rng_state()
            torch.manual_seed(_SEED)
            return not torch.equal(torch.get_rng_state(), now)
    except Exception:  # The real step will raise the same error.
        return False
    finally:
        # Copies let torch wrap the step of a class, which fails for optimizers that never called `super().__init__()`.
        if own is not None and vars(kind)["step"] is not own:
            kind.step = own  # type: ignore[method-assign]


def is_coupled(optimizer: Optimizer) -> bool:
    """Return whether a step on some parameters alone differs from one on all; False if it cannot be tried."""
    places = places_of(optimizer)
    rules: list[Callable[[int, int], bool]] = [lambda _, shape: not shape, lambda _, shape: bool(shape)]
    if len(optimizer.param_groups) > 1:
        rules.append(lambda group, _: group % 2 == 1)
    return any(_differs(optimizer, rules, places, infinite=infinite) for infinite in (None, places[0]))


def _differs(
    optimizer: Optimizer, rules: Sequence[Callable[[int, int], bool]], places: list[Place], infinite: Place | None
) -> bool:
    try:
        with torch.random.fork_rng(devices=[]):
            every = _stepped(optimizer, places, infinite=infinite)
            return any(
                not are_close(every[place], alone)
                for rule in rules
                for place, alone in _stepped(
                    optimizer, places, [each for each in places if rule(*each)], infinite=infinite
                ).items()
            )
    except Exception:  # The real step will raise the same error.
        return False


def is_elementwise(optimizer: Optimizer, *, are_flat: bool) -> bool:
    """Return whether steps on pieces are those on whole parameters; True if it cannot be tried."""
    places = places_of(optimizer)
    cuts = (_in_a_row,) if are_flat else (_rows, _columns)
    try:
        with torch.random.fork_rng(devices=[]):
            whole = _stepped(optimizer, places)
            for cut in cuts:
                pieces = _stepped(optimizer, places, cut=cut)
                if not all(
                    are_close([piece for each in whole[at] for piece in cut(each)], pieces[at]) for at in places
                ):
                    return False
    except Exception:  # The real step will raise the same error.
        return True
    return True


def _in_a_row(whole: Tensor) -> Sequence[Tensor]:
    return whole.flatten().tensor_split([1 + whole.numel() // 3])


def _rows(whole: Tensor) -> Sequence[Tensor]:
    return whole.tensor_split(2)


def _columns(whole: Tensor) -> Sequence[Tensor]:
    return whole.tensor_split(2, dim=-1)


def places_of(optimizer: Optimizer) -> list[Place]:
    """Return the small parameters of each group, by their shape."""
    groups = range(min(len(optimizer.param_groups), MOST_GROUPS))
    return [(group, shape) for group in groups for shape in range(len(_SHAPES))]


def are_close(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """Whether two steps have come to the same weights."""
    return all(torch.allclose(*each, rtol=1e-9, atol=1e-9, equal_nan=True) for each in zip(one, other, strict=True))


class SmallSteps:
    """The weights that a trial begins with, and the gradients of its steps: the same in all trials."""

    def __init__(self, places: Sequence[Place], infinite: Place | None = None) -> None:
        self._places, self._infinite = places, infinite
        self._generator = torch.Generator().manual_seed(_SEED)
        self.weights = {place: self._drawn(place) for place in places}

    def gradients(self, step: int) -> dict[Place, Tensor]:
        """Return those of the next step."""
        found = {}
        for number, place in enumerate(self._places):
            found[place] = self._drawn(place) * _SCALES[(step + number) % len(_SCALES)]
            if place == self._infinite and step % 4 == 1:
                found[place].fill_(torch.inf)
        return found

    def _drawn(self, place: Place) -> Tensor:
        found = torch.randn(_SHAPES[place[1]], generator=self._generator, dtype=torch.float64)
        found.view(-1)[0] *= _LARGER
        return found


def _stepped(
    optimizer: Optimizer,
    places: Sequence[Place],
    kept: Sequence[Place] | None = None,
    *,
    cut: Cut = lambda whole: [whole],
    infinite: Place | None = None,
) -> Mapping[Place, Sequence[Tensor]]:
    """Return small parameters, or their pieces, after a few steps with only those in `kept`."""
    steps = SmallSteps(places, infinite)
    kept = places if kept is None else kept
    weights = {place: [nn.Parameter(each.clone()) for each in cut(steps.weights[place])] for place in kept}
    twin = copy_with(optimizer, in_groups(optimizer, weights))
    torch.manual_seed(_SEED)
    with leaving_no_trace(optimizer):
        for step in range(NUM_STEPS):
            gradients = steps.gradients(step)
            for place, pieces in weights.items():
                for piece, gradient in zip(pieces, cut(gradients[place]), strict=True):
                    piece.grad = gradient.clone()
            twin.step()
    return {place: [each.detach() for each in pieces] for place, pieces in weights.items()}


def in_groups(optimizer: Optimizer, weights: Mapping[Place, Sequence[nn.Parameter]]) -> list[list[nn.Parameter]]:
    """Return small parameters by the groups of the optimizer; with the attributes that its own have."""
    found: list[list[nn.Parameter]] = []
    for number, group in enumerate(optimizer.param_groups):
        found.append([each for place, pieces in weights.items() if place[0] == number for each in pieces])
        for each in found[-1]:
            vars(each).update(next((vars(own) for own in group["params"]), {}))
    return found
