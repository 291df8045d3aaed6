"""Units that have no room on a GPU and are not trained: their weights live on the host and come in ahead of their use.

This is where placing ends and `runtime/streaming/` begins.
"""

import weakref
from typing import Any

from torch import nn

from shardwise.dataflow.machine import Machine
from shardwise.errors import ShardwiseError
from shardwise.runtime.placing.loads import trains
from shardwise.runtime.placing.places import Place
from shardwise.runtime.split.units import find_units
from shardwise.runtime.streaming.weights import StreamedWeights, stream


def find_streams(module: nn.Module, places: tuple[Place, ...]) -> tuple[Place, Place] | None:
    """The GPU and the host, if these are the places, and nothing is trained."""
    gpus = [place for place in places if place.device.type != "cpu"]
    hosts = [place for place in places if place.device.type == "cpu"]
    return (gpus[0], hosts[0]) if len(gpus) == len(hosts) == 1 and not trains(module) else None


class HostWeights:
    """A module on one device, with what has no room there on the host."""

    def __init__(self, module: nn.Module, device: Place, host: Place) -> None:
        machine = Machine([device.name])
        weakref.finalize(self, machine.close)
        self._module = module
        blocks = list(find_units(module).values())
        self._streamed: StreamedWeights | None = stream(
            module, machine, device.name, blocks=blocks, room_bytes=device.room_bytes
        )
        there = {} if self._streamed is None else self._streamed.weights()
        self._there = {id(parameter): each for parameter, each in there.items()}
        parameters = {name: host if id(each) in self._there else device for name, each in module.named_parameters()}
        #: Where each parameter and buffer lives.
        self.where = {**parameters, **dict.fromkeys((name for name, _ in module.named_buffers()), device)}

    def state(self, state: dict[str, Any]) -> dict[str, Any]:
        """A state dictionary of the module, with the weights of the host in it."""
        for name, parameter in self._module.named_parameters(remove_duplicate=False):
            if id(parameter) in self._there and name in state:
                state[name] = self._there[id(parameter)]
        return state

    def refuse(self, what: str) -> None:
        """Weights that come and go cannot be changed from outside."""
        if self._there:
            raise ShardwiseError(
                f"{what} after `place`: {len(self._there)} weights are on the host and only pass through the device",
                remedy=f"{what} before sw.place(...)",
            )
