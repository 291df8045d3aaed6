"""Compare the first steps with those of a single process: the loss, and the gradient of every parameter.

The first rank has computed the step of the whole example before the module was cut (`stages/whole_step.py`). If the
first batch is the example, both must be equal up to rounding. The first rank also keeps a copy of the module, if there
can be one (`stages/whole_copy.py`). Before a few later steps it loads the weights of all ranks, and computes the step
of the whole batch. Steps are compared before weights change; with offload, where weights change during the backward,
only losses are. Nothing is compared once a script has set what a forward or a loss reads: the copy has it not.
"""

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

from torch import Tensor, nn

from shardwise.engine.dropped_alike import DropAlike
from shardwise.engine.parts import Parts
from shardwise.engine.rank_device import batch_on
from shardwise.engine.same_batch import Checksum
from shardwise.engine.tried_again import TriedAgain
from shardwise.engine.whole_example import Compared
from shardwise.errors import ShardwiseError
from shardwise.execution.step_losses import Tally
from shardwise.planner.plan import Offload
from shardwise.ranks.rank_error import RankError
from shardwise.stages.split.python_state import PythonState
from shardwise.stages.stage import Batch, Loss
from shardwise.stages.whole_step import WholeStep, difference
from shardwise.torch_private import accumulated_hooks, gradient_hooks, is_persistent

#: Which steps of an engine are compared: more at the beginning.
_STEPS = (1, 2, 3, 5, 9, 17)
#: In place of a difference, where parts of the batch need not drop what the whole drops.
_NOT_TOLD = "not told"


class _Way(Enum):
    """What a step is compared with."""

    NOTHING = 0
    EXAMPLE = 1
    COPY = 2


class FirstSteps:
    """The comparisons of one engine. All ranks call its methods alike; only the first has anything to compare with."""

    def __init__(self, parts: Parts) -> None:
        self._wires, self._plan, self._settings = parts.wires, parts.plan, parts.settings
        self._device, self._module = parts.device, parts.module
        self._compared: Compared | None = None if parts.schedule.staleness else parts.compared
        self._has_gradients = parts.plan.offload == Offload()
        self._drops: DropAlike | None = None
        if self._compared is not None and self._compared.copy is not None and not parts.options.compile:
            self._drops = self._compared.copy.begin = DropAlike.attached(self._compared.copy.module, parts)
        self._before: _Now | None = None
        self._num_begun, self._size = 0, 0.0
        #: The steps that were compared, and are equal.
        self.compared: list[int] = []
        #: The step that is under way, and its batch.
        self._whole: WholeStep | None = None
        self._batch: Batch = {}
        self._number = 0
        self._way = _Way.NOTHING

    @property
    def is_due(self) -> bool:
        """Whether a step is still to be compared."""
        return self._compared is not None and self._num_begun < _STEPS[-1]

    def begin(self) -> None:
        """Note what forwards and losses read, when the engine was made and after every step. The copy has nothing that
        the step itself has set: a hook of an optimizer sets a temperature."""
        if self._compared is not None and self._before is not None and self._before.is_other_state():
            self._compared = self._compared._replace(copy=None)
        compared = self._compared
        if not self.is_due:
            self._compared = self._before = None
        elif compared is not None and (compared.whole is not None or compared.copy is not None):
            self._before = _Now(self._module, compared.loss, with_numbers=compared.whole is not None)

    def drop(self) -> None:
        """Other weights are loaded than those with which the step of the example was computed."""
        if self._compared is not None:
            self._compared = self._compared._replace(whole=None)

    def note(self, batch: Batch, number: int, state: Callable[[], Mapping[str, Any]], *, is_timed: bool) -> None:
        """Look just before a step: its batch may be another than the example, and a script may have changed things.
        `number` is that of the step for dropout. `state` returns that of the whole module, on all ranks. Nothing is
        done beside a step that is timed."""
        self._way, self._whole = _Way.NOTHING, None  # The last step may have raised before it was compared.
        if not self.is_due:
            return
        self._num_begun += 1
        if self._before is not None and self._before.has_changed(self._settings):
            self._compared, self._before = self._compared and self._compared._replace(whole=None, copy=None), None
        if self._num_begun not in _STEPS or is_timed:
            self.drop()
            return
        self._way = self._wires.gather(self._find_way(batch))[0]
        self._batch, self._number = batch, number
        if self._way is _Way.EXAMPLE:
            self._whole = self._compared and self._compared.whole
        elif self._way is _Way.COPY:
            self._compute(state)
        self.drop()

    def _find_way(self, batch: Batch) -> _Way:
        """Decide on the first rank: others have nothing to compare with."""
        compared, before = self._compared, self._before
        if compared is None or before is None:
            return _Way.NOTHING
        has_example = compared.whole is not None and not compared.whole.draws
        if has_example and Checksum(batch).read() == compared.example and not before.has_other_numbers():
            return _Way.EXAMPLE
        return _Way.COPY if compared.copy is not None and compared.copy.is_quick(batch) else _Way.NOTHING

    def _compute(self, state: Callable[[], Mapping[str, Any]]) -> None:
        copy = self._compared and self._compared.copy
        try:
            found = state()
            if copy is not None:
                copy.load(found)
                whole = copy.step(batch_on(self._batch, self._device), self._number)
                self._whole = None if whole is None or whole.draws else whole
        except RankError:
            raise
        except Exception:  # Nothing is compared; what is wrong with the batch or the module, the step will report.
            self._whole = None

    def check(self, tally: Tally, gradients: Callable[[], Mapping[str, Tensor]]) -> None:
        """Refuse a step that is not that of one process. `gradients` returns those of the sum of its loss."""
        way, whole = self._way, self._whole
        self._way, self._whole = _Way.NOTHING, None
        # Only the first rank knows: loss and forward may have written to its example.
        if way is _Way.NOTHING or not self._wires.gather(whole is not None and tally.count != 0)[0]:
            return
        found, problem = gradients() if self._has_gradients else None, None
        if whole is not None:
            problem = self._compare(whole, tally, found)
        problem = self._wires.gather(problem)[0]
        if problem == _NOT_TOLD:
            return
        if problem is not None:
            which = "the first step" if self._num_begun == 1 else f"step {self._num_begun}"
            raise ShardwiseError(
                f"{which} under {self._plan} is not that of one process: {problem}"
                + (". The step has changed no weight" if self._has_gradients else ""),
                remedy="rows that are computed each by themselves, and a loss that is a mean or a sum over rows or"
                " labels (docs/habits.md); verify=False to train like this",
            )
        self.compared.append(self._num_begun)

    def _compare(self, whole: WholeStep, tally: Tally, gradients: Mapping[str, Tensor] | None) -> str | None:
        kind, given, compared = self._device.type, self._batch, self._compared
        self._batch = {}
        problem = difference(whole, tally.mean, gradients, kind, scale=1 / tally.count, least=self._least(whole))
        if problem is None or compared is None or compared.copy is None:
            return problem
        self._compared, batch = compared._replace(copy=None), batch_on(given, self._device)
        if self._drops is not None and not self._drops.are_by_rows(compared.copy, batch, self._number):
            return _NOT_TOLD
        return None if compared.copy.is_rounded(whole, batch, self._number, kind) else problem

    def _least(self, whole: WholeStep) -> float:
        """Return the largest norm of gradients so far: near a minimum they are sums of terms as large."""
        self._size = max(self._size, whole.size)
        return self._size


class _Now:
    """Everything that a forward and a loss read: Python's state, sampled parameters and buffers, hooks, layers."""

    def __init__(self, module: nn.Module, loss: Loss, *, with_numbers: bool) -> None:
        self._module, self._state = module, PythonState(module, loss)
        self._numbers = self._read(*self._every()) if with_numbers else None
        self._apart, self._marks = self._read(*self._not_in_states()), self._find_marks()

    def _every(self) -> list[Tensor]:
        return [*self._state.parameters, *self._module.buffers()]

    def _not_in_states(self) -> list[Tensor]:
        return [
            each
            for owner in self._module.modules()
            for key, each in owner.named_buffers(recurse=False)
            if not is_persistent(owner, key)
        ]

    @staticmethod
    def _read(*tensors: Tensor) -> int:
        here = [each for each in tensors if each.untyped_storage().nbytes()]  # Others come when a layer is called.
        return Checksum({str(place): each.detach() for place, each in enumerate(here)}).read()

    def _find_marks(self) -> list[Any]:
        parameters = list(self._module.parameters())
        hooks = [len(hooks) for each in parameters for hooks in (gradient_hooks(each), accumulated_hooks(each))]
        modules = [(each, type(each), each.training) for each in self._module.modules()]
        return [*hooks, *modules, *(each.requires_grad for each in parameters)]

    def has_changed(self, settings: TriedAgain | None) -> bool:
        """Whether a script has changed any of it that is in no state of the module; or a trial has, as functions under
        `lru_cache` forget their entries."""
        was_set = bool(self._state.remembering) or (settings is not None and settings.bits != 0)
        is_other = self._marks != self._find_marks() or self._apart != self._read(*self._not_in_states())
        return was_set or is_other or self.is_other_state()

    def is_other_state(self) -> bool:
        """Whether Python's state is another."""
        return bool(self._state.changed())

    def has_other_numbers(self) -> bool:
        """Whether parameters or buffers have other values."""
        return self._numbers != self._read(*self._every())
