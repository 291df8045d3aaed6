"""Compare the first step with one of a single process: the loss, and the gradient of every parameter.

The first rank has computed the step of the whole example before the module was cut (`stages/whole_step.py`). If the
first batch is the example, and the script has changed nothing meanwhile, both must be equal up to rounding. They are
compared before weights change; with offload, where weights change during the backward, only the loss is.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from shardwise.engine.parts import Parts
from shardwise.engine.same_batch import Checksum
from shardwise.engine.tried_again import TriedAgain
from shardwise.errors import ShardwiseError
from shardwise.execution.step_losses import Tally
from shardwise.planner.plan import Offload
from shardwise.stages.split.python_state import PythonState
from shardwise.stages.stage import Batch, Loss
from shardwise.stages.whole_step import Compared, WholeStep
from shardwise.torch_private import accumulated_hooks, gradient_hooks

#: Differences relative to the norm of a gradient, and to that of all gradients: many operations round on the way. A GPU
#: may multiply in TF32.
_NEAR, _NEAR_ALL = {"cpu": 1e-4, "cuda": 2e-2}, {"cpu": 1e-6, "cuda": 1e-3}


class FirstStep:
    """The comparison of one engine. All ranks call its methods alike."""

    def __init__(self, parts: Parts) -> None:
        self._wires, self._plan, self._settings = parts.wires, parts.plan, parts.settings
        self._kind = parts.device.type
        self._compared: Compared | None = None if parts.schedule.staleness else parts.compared
        self._has_gradients = parts.plan.offload == Offload()
        self._before: _Now | None = None
        self._module = parts.module

    @property
    def is_due(self) -> bool:
        """Whether a step is still to be compared."""
        return self._compared is not None

    def begin(self) -> None:
        """Note what a forward and a loss read: if a script changes it before the first step, nothing is compared."""
        if self._compared is not None and self._compared.whole is not None:
            self._before = _Now(self._module, self._compared.loss)

    def drop(self) -> None:
        """Compare nothing: other weights are loaded."""
        self._compared = self._before = None

    def note(self, batch: Batch) -> None:
        """Look just before a step: its batch may be another than the example, and a script may have changed things."""
        compared, before = self._compared, self._before
        if compared is not None and before is not None:
            is_other = Checksum(batch).read() != compared.example
            if is_other or before.has_changed(self._settings):
                self._compared = compared._replace(whole=None)
        self._before = None

    def check(self, tally: Tally, gradients: Callable[[], Mapping[str, Tensor]]) -> None:
        """Refuse a first step that is not that of one process. `gradients` returns those of the sum of its loss."""
        compared = self._compared
        self.drop()
        # Only the first rank knows: loss and forward may have written to its example.
        if compared is None or not self._wires.gather(compared.whole is not None and tally.count != 0)[0]:
            return
        found, problem = gradients() if self._has_gradients else {}, None
        if compared.whole is not None:
            problem = _difference(compared.whole, tally.mean, found, 1 / tally.count, self._kind)
        problem = self._wires.gather(problem)[0]
        if problem is not None:
            raise ShardwiseError(
                f"the first step under {self._plan} is not that of one process: {problem}"
                + (". No weight was changed" if self._has_gradients else ""),
                remedy="rows that are computed each by themselves, and a loss that is a mean or a sum over rows or"
                " labels (docs/habits.md); verify=False to train like this",
            )


class _Now:
    """Everything that a forward and a loss read: Python's state, sampled parameters and buffers, and their hooks."""

    def __init__(self, module: nn.Module, loss: Loss) -> None:
        self._module, self._state = module, PythonState(module, loss)
        self._sum, self._hooks = self._read(), self._find_hooks()

    def _read(self) -> int:
        every = [*self._state.parameters, *self._module.buffers()]
        here = [each for each in every if each.untyped_storage().nbytes()]  # Others come when a layer is called.
        return Checksum({str(place): each.detach() for place, each in enumerate(here)}).read()

    def _find_hooks(self) -> list[int]:
        return [
            len(hooks)
            for each in self._module.parameters()
            for hooks in (gradient_hooks(each), accumulated_hooks(each))
        ]

    def has_changed(self, settings: TriedAgain | None) -> bool:
        """Whether a script has changed any of it; or a trial has, as functions under `lru_cache` forget its entries."""
        was_set = bool(self._state.remembering) or (settings is not None and settings.bits != 0)
        return was_set or self._sum != self._read() or self._hooks != self._find_hooks() or bool(self._state.changed())


@torch.no_grad()
def _difference(whole: WholeStep, loss: float, gradients: Mapping[str, Tensor], scale: float, kind: str) -> str | None:
    """Describe the difference; None if there is none."""
    near, near_all = _NEAR.get(kind, 2e-2), _NEAR_ALL.get(kind, 1e-3)
    wanted = {name: each for name, each in whole.gradients.items() if each is not None and name in gradients}
    size = sum(float(each.double().square().sum()) for each in wanted.values()) ** 0.5
    others: dict[str, float] = {}
    for name, each in wanted.items():
        norm, found = float(each.double().norm()), gradients[name].to(each.device).double() * scale
        distance = float((found - each.double()).norm())
        if not distance <= near * norm + near_all * size:
            others[name] = distance / max(norm, 1e-30)
    if others:
        worst = max(others, key=lambda name: others[name])
        return (
            f"the gradients of {len(others)} of {len(wanted)} parameters differ, that of {worst} by"
            f" {100 * min(others[worst], 99.99):.2g} % of its norm (the loss is {loss:.6g}, and {whole.loss:.6g} there)"
        )
    if not abs(loss - whole.loss) <= 10 * near * abs(whole.loss) + 1e-5:
        return f"the loss is {loss:.6g}, and {whole.loss:.6g} there"
    return None
