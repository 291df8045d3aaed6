"""Check that ranks have the same module, and change its weights and its optimizers' settings alike.

DDP broadcasts the weights of rank 0 when it is made, and scripts that use another seed on every rank, or load a file on
one rank only, rely on that. Here every rank makes the same module; a difference is refused before anything is cut.
Sampled elements are compared, as for batches (`same_batch.py`).
"""

from collections.abc import Collection, Iterable
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.engine.parts import Parts
from shardwise.engine.same_batch import Checksum, SameBatch, set_apart
from shardwise.engine.shown import is_guarded
from shardwise.errors import ShardwiseError, some
from shardwise.planner.plan import Plan
from shardwise.ranks.wires import OneProcess, Wires
from shardwise.sharding.expert.load import find_routers
from shardwise.stages.stage import Batch
from shardwise.torch_private import is_persistent

#: The bits of the hash of settings: sums of its squares over all ranks must be exact in a double.
_BITS = 20
#: The number of elements of each parameter that are sampled between steps.
_NUM_LOOKED_AT = 8
_SETTINGS = ("lr", "weight_decay", "momentum", "betas")


def check_given(module: nn.Module, plan: Plan, example: Batch, wires: Wires, *, is_local: bool) -> None:
    """Refuse an example that ranks do not share, and a module that has other numbers on another rank."""
    SameBatch(plan, wires, is_local=is_local).take(example, "example")
    _check_weights(module, wires)


def _check_weights(module: nn.Module, wires: Wires) -> None:
    if wires.watch is None:
        return
    mine = {name: each for name, each in _named(module) if not each.is_meta}
    if len(set(wires.gather(Checksum(mine).read()))) == 1:
        return
    told: list[dict[str, int]] = wires.gather({name: Checksum({name: each}).read() for name, each in mine.items()})
    for rank, other in enumerate(told):
        names = [name for name in told[0] if other.get(name) != told[0][name]]
        if names:
            raise ShardwiseError(
                f"rank {rank} was given other numbers than rank 0 in {len(names)} of {len(told[0])} tensors of the"
                f" module ({some(names)}): every rank must make the same one",
                remedy="torch.manual_seed(0) on every rank before the module is made, and the same checkpoint loaded on"
                " all; or load it once the engine is there, engine.load_state_dict(state) on every rank",
            )


def _named(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """Return parameters and saved buffers, except those that another engine keeps."""
    yield from ((name, each) for name, each in module.named_parameters() if not is_guarded(each))
    for prefix, owner in module.named_modules():
        for key, each in owner.named_buffers(recurse=False):
            if is_persistent(owner, key) and not is_guarded(each):
                yield f"{prefix}.{key}" if prefix else key, each


def agree_on_set(wires: Wires, bits: int) -> None:
    """Refuse different values that scripts have set on ranks, told in bits. All call this alike."""
    told = wires.gather(bits)
    if len(set(told)) > 1:
        raise set_apart(len(told))


def settings_of(optimizers: Iterable[Optimizer]) -> int:
    """Return a short hash of the settings of groups. Learning rates that are tensors are left out."""
    found = [
        (number, place, [value for value in map(group.get, _SETTINGS) if isinstance(value, (bool, int, float, tuple))])
        for number, optimizer in enumerate(optimizers)
        for place, group in enumerate(optimizer.param_groups)
    ]
    return _hashed(found)


def _hashed(value: Any) -> int:
    return crc32(repr(value).encode()) & (1 << _BITS) - 1


class OutsideWrites:
    """Detects a script's writes to parameters and buffers between steps, by a few sampled elements of each.

    A change on one rank alone, or to another value, would let replicas diverge. `parameters` are those without a guard:
    all of them, and the buffers of `module` that are `held`, are sampled at the end of a step and before the next.
    Others are guarded (`shown.py`), and noted on access.
    """

    def __init__(self, parameters: Iterable[Tensor], module: nn.Module | None, held: Collection[str]) -> None:
        self._parameters = [each for each in parameters if not each.is_meta and each.numel()]
        # Scripts assign buffers too, so each is looked up by its name.
        self._buffers = [
            (owner, key)
            for prefix, owner in ([] if module is None else module.named_modules())
            for key in owner._buffers
            if (f"{prefix}.{key}" if prefix else key) in held
        ]
        self._views: list[list[Tensor]] = []
        #: The address of each parameter when the guards were made: a script or the engine may give it other memory.
        self._places_seen: list[int] = []
        self._before: list[Tensor] = []
        self._changed: list[tuple[Tensor, Tensor]] = []
        self._noted: dict[int, tuple[Tensor, Tensor]] = {}
        self._places: dict[int, int] = {}
        self._written: dict[int, list[Any]] = {}

    def expect(self, tensor: Tensor) -> None:
        """Register a parameter to be sampled on access. Its index identifies it on all ranks."""
        self._places[id(tensor)] = len(self._places)

    def note(self, tensor: Tensor) -> None:
        """Note a guarded parameter that a script is about to read or write."""
        few = _few_of(tensor)
        self._noted.setdefault(self._places[id(tensor)], (few, few.clone()))

    def settle(self) -> None:
        """Start the engine's work: changes from here on are its own."""
        found = {place: now for place, (now, then) in self._noted.items() if not torch.equal(now, then)}
        self._written |= {place: now.tolist() for place, now in found.items()}
        self._noted.clear()

    def begin(self) -> None:
        """Sample before a step."""
        self._look()
        found = zip(map(torch.cat, self._views), self._before, strict=False)
        self._changed = [(now, now != then if now.shape == then.shape else now == now) for now, then in found]

    def end(self) -> None:
        """Sample after a step."""
        self._look()
        self._before = [torch.cat(each) for each in self._views]
        self._written.clear()

    def _look(self) -> None:
        given = (owner._buffers.get(key) for owner, key in self._buffers)
        buffers = [each for each in given if each is not None and each.layout is torch.strided and each.numel()]
        tensors = [*self._parameters, *(each for each in buffers if not each.is_meta)]
        places = [each.data_ptr() for each in tensors]
        if places != self._places_seen:
            self._places_seen, self._views = places, _by_kind(map(_few_of, tensors))

    @property
    def bits(self) -> int:
        """A hash that is equal on ranks with the same writes; 0 for none. Waits for an accelerator."""
        found: list[Any] = [sorted(self._written.items())]
        for now, where in self._changed:
            places = where.nonzero().flatten()
            if len(places):  # Seldom, and an accelerator is waited for once more.
                found.append((places.tolist(), now[places].tolist()))
        return _hashed(found) if self._written or len(found) > 1 else 0


def outside_writes(parts: Parts) -> OutsideWrites | None:
    """Return a detector of writes if several ranks have copies of parameters and buffers. Late values arrive before it
    reads them."""
    plan = parts.plan
    if plan.dp * plan.cp == 1 or isinstance(parts.wires, OneProcess) or parts.schedule.staleness:
        return None
    come_late = plan.zero or plan.offload.parameters or plan.offload.optimizer
    held = _held(parts)
    are_whole = plan.tp == 1 and plan.ep == 1 and not come_late
    parameters = [each for name, each in parts.module.named_parameters() if name in held] if are_whole else []
    # Ranks with other experts have other buffers.
    return OutsideWrites(parameters, parts.module if plan.ep == 1 else None, held - _counted(parts.module))


def _held(parts: Parts) -> set[str]:
    """Return the names of the parameters and buffers of this rank's stages."""
    stages = [each for each in parts.split.stages if each is not None]
    return {name for each in stages for name in (*each.parameters, *each.buffers)}


def _counted(module: nn.Module) -> set[str]:
    """Return the names of the buffers in which routers count what this rank's tokens chose; reading resets them."""
    counts = {id(router.load) for router in find_routers(module).values()}
    return {name for name, each in module.named_buffers() if id(each) in counts}


def _few_of(tensor: Tensor) -> Tensor:
    """Return a few elements of a tensor; a view if they are contiguous."""
    flat = tensor.detach().reshape(-1)
    if flat.dtype.is_floating_point and flat.itemsize == 1:
        flat = flat.view(torch.uint8)  # Torch does not compare these numbers.
    return flat[:: max(1, flat.numel() // _NUM_LOOKED_AT)][:_NUM_LOOKED_AT]


def _by_kind(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    kinds: dict[tuple[Any, ...], list[Tensor]] = {}
    for each in tensors:
        kinds.setdefault((each.dtype, each.device), []).append(each)
    return list(kinds.values())
