"""A copy of a small module that is never cut, for steps of whole batches in one process.

The step of the example is computed before the module is cut (`whole_step.py`). What differs later on (labels that only
later batches ignore, a branch that the example does not take, weights that have moved) is seen by later steps only.
For these one process keeps a copy, and loads the weights of all ranks into it. Values that forwards or scripts set are
not copied: where there are any, nothing is compared. Dropout is compared if its masks are those of the ranks
(`WholeCopy.begin`).
"""

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.stages.rows import changed
from shardwise.stages.split.loss_copy import loss_of_copy
from shardwise.stages.split.module_copy import copied
from shardwise.stages.stage import Batch, Loss
from shardwise.stages.trial_run import Context
from shardwise.stages.whole_step import WholeStep, difference, is_quick, whole_step
from shardwise.torch_private import gradient_hooks

#: Later steps are compared where one takes this share of what the first may take.
_SHARE = 1 / 8


class WholeCopy:
    """The copy and its loss. `num_parts` and `in_turn` are those of `whole_step`."""

    def __init__(self, module: nn.Module, loss: Loss, precision: Context, *, num_parts: int, in_turn: bool) -> None:
        self.module = copied(module, {id(each): _of_its_own(each) for each in module.parameters()})
        self._loss = loss_of_copy(loss, module, self.module)
        self._precision, self._num_parts, self._in_turn = precision, num_parts, in_turn
        #: Called before a forward with its batch and the number of the step, to drop what the ranks drop.
        self.begin: Callable[[Batch, int], None] | None = None

    @torch.no_grad()
    def load(self, state: Mapping[str, Any]) -> None:
        """Take the weights and buffers of a state of the whole module."""
        for name, each in (*self.module.named_parameters(), *self.module.named_buffers()):
            if name in state:
                each.copy_(state[name])
            elif isinstance(each, nn.Parameter):
                raise LookupError(name)

    def is_quick(self, batch: Batch) -> bool:
        return is_quick(self.module, batch, _SHARE)

    def step(self, batch: Batch, number: int = 0) -> WholeStep | None:
        """Compute the whole step of a batch, as `whole_step` does."""
        if self.begin is not None:
            self.begin(batch, number)
        return whole_step(
            self.module, self._loss, batch, self._precision, num_parts=self._num_parts, in_turn=self._in_turn
        )

    def is_rounded(self, whole: WholeStep, batch: Batch, number: int, kind: str) -> bool:
        """Whether rounding alone may explain a difference to this step of the batch: in double precision it is another
        step too. Where that cannot be computed, it is taken for exact. The copy computes in double precision then."""
        self.module.double()
        exact = self.step(changed(batch, _in_double), number)
        return exact is not None and difference(whole, exact.loss, exact.gradients, kind, closer=10.0) is not None


def keep_copy(
    module: nn.Module, loss: Loss, example: Batch, precision: Context, whole: WholeStep, *, num_parts: int,
    in_turn: bool,
) -> WholeCopy | None:  # fmt: skip
    """Return a copy that computes the same step of the example as the module; None if there is no such copy."""
    # Hooks on parameters are not copied.
    if whole.leaves or any(gradient_hooks(each) for each in module.parameters()):
        return None
    try:
        made = WholeCopy(module, loss, precision, num_parts=num_parts, in_turn=in_turn)
        again = made.step(example)
    except Exception:  # What cannot be copied is computed without a copy.
        return None
    are_alike = (
        again is not None
        and not again.leaves
        and all((again.gradients[name] is None) == (each is None) for name, each in whole.gradients.items())
        and difference(whole, again.loss, again.gradients, "cpu") is None
    )
    return made if are_alike else None


def _of_its_own(parameter: nn.Parameter) -> nn.Parameter:
    made = deepcopy(parameter)
    vars(made).update(vars(parameter))
    return made


def _in_double(_: str, each: Any) -> Any:
    is_number = isinstance(each, Tensor) and each.is_floating_point()
    return each.double() if is_number else None
