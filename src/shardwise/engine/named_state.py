"""What an engine knows by the names of the original module: weights, gradients, and what its optimizers remember."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.engine.module_state import held_state, load_held_state
from shardwise.states.optimizers.state import check_states, groups_of, joined_states, load_whole, states_of
from shardwise.states.parameter_group import MakeOptimizer
from shardwise.states.tiers.host import Host


class NamedState(ABC):
    """The state of an engine. `parameters` and `buffers` are those that this process holds."""

    module: nn.Module
    parameters: dict[str, nn.Parameter]
    buffers: dict[str, Tensor]
    _trained: dict[str, nn.Parameter]
    #: The optimizers of this process, and what makes each.
    _makers: Mapping[Optimizer, MakeOptimizer]
    #: What this process keeps on the host, where its plan says so.
    _host: Host | None

    def state_dict(self, *, sharded: bool = False) -> dict[str, Any]:
        """Parameters and buffers under the names of the original module: all of them, or what this process holds.

        A tied parameter is there under each of its names. The tensors are the engine's own where it holds them.
        """
        self.flush()
        part = held_state(self.module, self._held, {} if self._host is None else self._host.homes)
        return part if sharded else self._gather_state(part)

    @property
    def numbers(self) -> dict[str, Tensor]:
        """Those of the parameters that this process holds, by name, each where it lives. First `flush`."""
        homes = {} if self._host is None else self._host.homes
        return {name: homes.get(each, each).detach() for name, each in self.parameters.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take weights and buffers from a state, of the whole module or of at least what this process holds."""
        self.flush()
        with self._told_to_all():
            load_held_state(self.module, self._held, state, {} if self._host is None else self._host.homes)
        self._begin_stream()

    def gradients(self) -> dict[str, Tensor]:
        """The gradients of the last step as the optimizer was given them, whole, by original names, on every rank."""
        self.flush()
        return self.assembled(self._gradients())

    def assembled(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors by original names, from what each process has of those that it holds. All call it alike."""
        return dict(parts)

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """Those of this process."""
        return list(self._makers)

    def optimizer_state_dict(self, *, sharded: bool = False) -> dict[str, Any]:
        """What the optimizer remembers, by original names: of all parameters, or of those that this process holds.

        `states/optimizers/state.py` says in which form. It can be loaded under any other plan.
        """
        self.flush()
        names = self._names()
        part = {"state": states_of(self.optimizers, names), "param_groups": groups_of(self.optimizers, names)}
        return self._gather_optimizer_state(part) if not sharded else part

    def load_optimizer_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what an optimizer remembered, of all parameters or of at least those that this process holds."""
        self.flush()
        with self._told_to_all():
            check_states(state, [name for name, _ in self.module.named_parameters()])
            load_whole(self.optimizers, state, self._trained, self.home_of)

    @property
    def host_bytes(self) -> int:
        """What this process keeps on the host now, beside its device."""
        return 0 if self._host is None else self._host.num_bytes

    def home_of(self, weight: nn.Parameter) -> torch.device:
        """Where the state of a weight lives that an optimizer of this process has."""
        states = None if self._host is None else self._host.states
        return torch.device("cpu") if states is not None and weight in states.weights else weight.device

    @property
    def _held(self) -> list[Tensor]:
        return [*self.parameters.values(), *self.buffers.values()]

    def _gradients(self) -> dict[str, Tensor]:
        """Those of the parameters of this process that have one, wherever they are."""
        if self._host is not None:
            return self._host.gradients_of(self._trained)
        return {name: each.grad for name, each in self._trained.items() if each.grad is not None}

    def _names(self) -> dict[Tensor, str]:
        return {each: name for name, each in self._trained.items()}

    def _gather_state(self, part: dict[str, Any]) -> dict[str, Any]:
        """The whole state, from the part of each process."""
        return part

    def _gather_optimizer_state(self, part: dict[str, Any]) -> dict[str, Any]:
        """The whole state of all optimizers, from the part of each process."""
        return joined_states([part], [name for name, _ in self.module.named_parameters()])

    @abstractmethod
    def flush(self) -> None:
        """Finish what is under way."""

    @abstractmethod
    def _begin_stream(self) -> None:
        """Weights have been changed from outside."""

    @abstractmethod
    def _told_to_all(self) -> AbstractContextManager[None]:
        """Tell the other ranks of an error before it goes on to the caller."""
