"""The weight stash of PipeDream-2BW: two versions of the weights, for a pipeline that is not flushed between steps.

Batch t is computed with W(t-1) from its first forward to its last backward, while batch t+1 has already begun with
W(t). So there are two sets of tensors, and batch t uses set t % 2:

    batch       0      1      2      3
    uses        W(0)   W(0)   W(1)   W(2)
    set         0      1      0      1

After the last backward of batch t, its set is free and becomes W(t+1): W(t) is copied into it from the other set, and
the optimizer steps on it with the batch's gradients, so that W(t+1) = W(t) - lr * g(W(t-1)). The optimizer holds the
module's own parameters. They share the memory of the newest version and are never part of a graph.
"""

from collections.abc import Callable, Hashable, Mapping

import torch
from torch import nn

from shardwise.execution.executor import Executor, Record
from shardwise.execution.step_losses import Tally
from shardwise.stages.stage import Batch
from shardwise.torch_private import parameter_slots


class WeightStash:
    """Both versions of one rank's trained parameters, by their names in the module."""

    def __init__(self, module: nn.Module, held: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters = {name: each for name, each in held.items() if each.requires_grad}
        #: The original memory of the parameters: after a flush (`settle`) it holds the newest version.
        self._homes = {name: each.data for name, each in parameters.items()}
        # Through `data`: the optimizer's writes to a parameter must not bump the version of tensors sharing its memory.
        self._sets = [
            {name: nn.Parameter(each.data.clone()) for name, each in parameters.items()},
            {name: nn.Parameter(each.data) for name, each in parameters.items()},
        ]
        names = {id(each): name for name, each in parameters.items()}
        #: Where modules keep parameters: owner, attribute, and the parameter's name.
        self._spots = [
            (owner, attribute, names[id(each)])
            for owner in module.modules()
            for attribute, each in parameter_slots(owner).items()
            if each is not None and id(each) in names
        ]

    def of(self, name: str, batch: int) -> nn.Parameter:
        """Return the tensor that a batch uses as this parameter, and accumulates its gradients in."""
        return self._sets[batch % 2][name]

    def select(self, batch: int) -> None:
        """Install the weights of a batch in the module."""
        self._show(self._sets[batch % 2])

    def rest(self) -> None:
        """Install the module's own parameters again: the newest version."""
        self._show(self._parameters)

    def _show(self, chosen: Mapping[str, nn.Parameter]) -> None:
        for owner, attribute, name in self._spots:
            parameter_slots(owner)[attribute] = chosen[name]

    @torch.no_grad()
    def settle(self) -> None:
        """Move the newest weights into the parameters' original memory, after a flush. The two sets swap memory."""
        for name, parameter in self._parameters.items():
            home = self._homes[name]
            if parameter.data_ptr() == home.data_ptr():
                continue
            newest, older = sorted(
                (each[name] for each in self._sets), key=lambda each: each.data_ptr() == home.data_ptr()
            )
            away, numbers = newest.data, newest.data.clone()
            away.copy_(home)
            home.copy_(numbers)
            newest.data, older.data, parameter.data = home, away, home

    @torch.no_grad()
    def prepare(self, batch: int) -> None:
        """Prepare the optimizer step of a batch: on a copy of the newest weights, with the batch's gradients."""
        done, newest = self._sets[batch % 2], self._sets[(batch + 1) % 2]
        for name, parameter in self._parameters.items():
            done[name].copy_(newest[name])
            parameter.data = done[name].data
            parameter.grad, done[name].grad = done[name].grad, None


class Stream:
    """Feeds batches to an executor of several steps, and runs the optimizer one batch later.

    A batch's gradients are complete on every rank when the next batch has been fed, or after a flush. Then
    `finish(step)` waits for reductions still in flight, and `update(tally)` steps. A flush changes no result; it only
    costs time. Steps are counted from the last flush, as in the schedule; batches are counted on. `agree` combines the
    losses of all ranks.
    """

    def __init__(
        self,
        executor: Executor,
        module: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        *,
        agree: Callable[[Tally], Tally],
        finish: Callable[[int], None],
        update: Callable[[Tally], None],
    ) -> None:
        self._executor, self._module, self._parameters = executor, module, parameters
        self._agree, self._finish, self._update = agree, finish, update
        for interpreter in executor.interpreters:
            interpreter.select_weights = self._select_weights
        self.begin_anew()

    def begin_anew(self) -> None:
        """Restart after the weights were changed from outside: the pipeline is empty, both versions are the weights."""
        self._versions = WeightStash(self._module, self._parameters)
        self._num_batches = self._first = 0
        self._under_way: Tally | None = None
        self._signature: Hashable = None

    def _select_weights(self, step: int) -> None:
        """Install the weights of a step in the module."""
        self._versions.select(self._first + step)

    def parameter_of(self, name: str, step: int) -> nn.Parameter:
        """Return the tensor that a step uses as this parameter."""
        return self._versions.of(name, self._first + step)

    def train_step(self, microbatches: list[Batch], signature: Hashable, record: Record | None = None) -> Tally:
        """Feed a batch, and take the optimizer step of the batch before it."""
        if signature != self._signature or self._executor.is_full:
            self.flush(record)
            self._signature = signature
        tally = self._agree(self._executor.feed(microbatches, signature=signature, record=record))
        self._versions.rest()
        self._step()
        self._under_way, self._num_batches = tally, self._num_batches + 1
        return tally

    def flush(self, record: Record | None = None) -> None:
        """Flush the pipeline and step with its last batch, so that the weights include every batch fed."""
        if self._under_way is not None:
            self._executor.flush(record=record)
            self._versions.rest()
            self._step()
            self._versions.settle()
            self._first = self._num_batches

    def _step(self) -> None:
        """Take the optimizer step of the batch that was fed but not stepped, if there is one."""
        if self._under_way is None:
            return
        batch = self._num_batches - 1
        self._finish(batch - self._first)
        self._versions.prepare(batch)
        self._update(self._under_way)
        self._under_way = None
