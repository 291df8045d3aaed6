"""Whether the outputs of microbatches tell that of a batch, and how its numbers are joined: tried on a few rows.

They are held against what the module gives by itself, layer by layer. Each output of a small module is also tried as a
loss (`stages/loss_trial.py`), with hidden rows, other weights and its backward: an example may hide how rows meet.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import nn

from shardwise.errors import ShardwiseError
from shardwise.placing.batch_rows import few_rows, rows_of
from shardwise.placing.rng_state import RngState
from shardwise.placing.tried_outputs import check_hooks, tried_ways
from shardwise.stages.checkpoints import nothing_recomputed
from shardwise.stages.moved_weights import moved_weights
from shardwise.stages.rows_apart import NUM_ROWS, Compute, Counting, DrawnError, Returned, Way, find_ways, rounding_of
from shardwise.stages.split.arguments import Signature
from shardwise.stages.split.python_state import left_as_it_was
from shardwise.stages.split.script_values import find_holders
from shardwise.stages.split.seed import seeded_alike
from shardwise.stages.split.set_values import ValueKinds
from shardwise.stages.stage import Batch
from shardwise.stages.whole_step import generators
from shardwise.torch_private import RunningNormModule, accumulated_hooks, gradient_hooks

REMEDY = "microbatches=1; or compute from the output what rows are compared for, in the script"
#: Modules that are known to compute something else for each microbatch in training mode.
_BY_PARTS = (
    RunningNormModule, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout,
)  # fmt: skip

#: Computes microbatches, counts their labels, and notes whether anything was drawn.
_Outputs = Callable[[Sequence[Batch], Counting, RngState], list[Returned]]


class ToldOutputs:
    """What was found of a module's outputs, by its modes, the arguments of a call, and the values that a script has
    set."""

    def __init__(self, module: nn.Module, outputs: _Outputs) -> None:
        self._module, self._outputs, self._signature = module, outputs, Signature(module)
        self._ways: dict[tuple[Any, ...], Mapping[int, Way]] = {}
        self._kinds, self._words = ValueKinds(), dict[str, Any]()
        self._holders = find_holders(module, None)
        self._kept = [each.values.read() for each in self._holders]
        self._rounding = rounding_of(module)

    def ways_of(self, batch: Batch, modes: tuple[Any, ...]) -> Mapping[int, Way]:
        """Return how numbers of the output are joined; refuse an output that microbatches do not tell.

        They are computed without dropout, and with the statistics that batch norms have. Nothing is left of it."""
        self._note_values(batch)
        parameters = [*self._module.parameters()]
        hooks = [key for kind in (gradient_hooks, accumulated_hooks) for key in chain(*map(kind, parameters))]
        key = tuple(training for training, _ in modes), tuple(batch), tuple(hooks), self._kinds.now
        if key not in self._ways:
            check_hooks(self._module)
            self._ways[key] = {**self._find(batch), **tried_ways(self._module, batch, REMEDY)}
        return self._ways[key]

    def end(self) -> None:
        """End a call: values that changed during it were changed by it."""
        self._kept = [each.values.read() for each in self._holders]

    def _note_values(self, batch: Batch) -> None:
        words = {name: each for name, each in batch.items() if isinstance(each, (bool, int, float, str, type(None)))}
        for name, now in words.items():
            self._kinds.note(name, self._words.setdefault(name, now), now)
        for holder, was in zip(self._holders, self._kept, strict=True):
            found = holder.values.read()
            for key, value in found.items() if found != was else ():
                if key in was and value != was[key]:
                    self._kinds.note(f"{holder.name}.{key}", was[key], value)

    def _find(self, batch: Batch) -> Mapping[int, Way]:
        together, halves = few_rows(batch, NUM_ROWS)

        def compute(is_whole: bool, counting: Counting) -> list[Returned]:
            before, rng = generators(), RngState(trains=False)
            made = [self._by_itself(together, counting)] if is_whole else self._outputs(halves, counting, rng)
            rng.forget()
            if rng.have_drawn or not all(map(torch.equal, before, generators())):
                raise DrawnError
            return made

        training = [each for each in self._module.modules() if each.training]
        # Functions may drop too: then evaluation mode tells what it can.
        for still in ([each for each in training if isinstance(each, _BY_PARTS)], training):
            with left_as_it_was(self._module), seeded_alike(), torch.no_grad(), _evaluated(still):
                try:
                    ways = find_ways(compute, REMEDY, rounding=self._rounding)
                except DrawnError:  # Each microbatch draws its own.
                    continue
                except ShardwiseError as error:
                    self._check_stages(together, halves)
                    raise error from None
                return {**ways, **self._find_moved(compute)}
        return {}

    def _find_moved(self, compute: Compute) -> Mapping[int, Way]:
        """Return the same with other weights, if there are any to move: those that training begins with may hide how
        rows meet (a gate, an adapter that is 0), or whether a number is a mean or a sum."""
        with moved_weights(self._module) as is_moved:
            if not is_moved:
                return {}
            try:
                return find_ways(compute, REMEDY, rounding=self._rounding)
            except ShardwiseError as error:
                raise ShardwiseError(
                    f"with other weights than those that training begins with, {error.problem}", remedy=error.remedy
                ) from None

    def _check_stages(self, together: Batch, halves: Sequence[Batch]) -> None:
        """Refuse a call for which the module was not cut: by itself it gives of parts what it gives of the whole."""

        def compute(is_whole: bool, counting: Counting) -> list[Returned]:
            return [
                self._by_itself(each, counting, part) for part, each in enumerate([together] if is_whole else halves)
            ]

        try:
            find_ways(compute, REMEDY, rounding=self._rounding)
        except ShardwiseError:
            return
        words = ", ".join(f"{name}={each!r}" for name, each in self._words.items())
        raise ShardwiseError(
            "stages do not give what the module gives by itself: they were cut for the first call, and this one has"
            f" other arguments or attributes{f' (the first had {words})' if words else ''}",
            remedy="sw.place(...) again with an example= of such a call, where they change; or microbatches=1",
        )

    def _by_itself(self, batch: Batch, counting: Counting, part: int = 0) -> Returned:
        """Return what the module gives without a pipeline."""
        args, kwargs = self._signature.arguments(batch)
        with nothing_recomputed(), counting(part):
            output = self._module(*args, **kwargs)
        return Returned(output, rows_of(batch), counting.of(part))


@contextmanager
def _evaluated(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Let modules be in evaluation mode within the context."""
    for each in modules:
        each.training = False
    try:
        yield
    finally:
        for each in modules:
            each.training = True
