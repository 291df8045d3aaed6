"""Create the weights of a module built on the meta device: only those requested, and the same under every plan.

A module's own initialisation is run (`reset_parameters`, or `_init_weights` of Hugging Face). Each random number is
drawn from a generator seeded by the seed and the name of the parameter it is for, so it does not matter which other
parameters this process has, or in which order they are made.
"""

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import ShardwiseError
from shardwise.stages.split.flow import written_by
from shardwise.stages.split.seed import seed_torch
from shardwise.stages.split.sources import storage_of
from shardwise.torch_private import EagerDispatchMode, buffer_slots, parameter_slots


def materialise(
    module: nn.Module, names: Collection[str], *, seed: int = 0, device: torch.device | str = "cpu"
) -> None:
    """Give these parameters and buffers, by name, memory on a device and initial values. Others stay as they are."""
    there = {name: each for name, each in _tensors(module) if name in names and each.is_meta}
    if not there:
        return
    wanted = {name: torch.empty_like(each.detach(), device=device) for name, each in there.items()}
    replace_all(module, ((there[name], wanted[name]) for name in there))
    draws = _Draws(module, wanted, seed)
    devices = [torch.device(device)] if torch.device(device).type == "cuda" else []
    with torch.random.fork_rng(devices), torch.no_grad(), draws:
        for name, part, initialise in _initialisers(module, None, ""):
            if any(storage_of(tensor) in draws.places for tensor in [*part.parameters(), *part.buffers()]):
                draws.current = name
                initialise()
    missing = [name for name in wanted if name not in draws.written] + _loose_tensors(module, draws)
    if missing:
        owner = module.get_submodule(missing[0].rpartition(".")[0])
        raise ShardwiseError(
            f"{missing[0]} has no initial value: {type(owner).__name__} sets it where it is built, and it was built on"
            f" the meta device ({len(missing)} {'tensor is' if len(missing) == 1 else 'tensors are'} like this)",
            remedy=f"give {type(owner).__name__} a reset_parameters() that sets it, or build the module on the CPU",
        )


def _loose_tensors(module: nn.Module, draws: "_Draws") -> list[str]:
    """Return meta tensors that are plain attributes of modules with wanted tensors: nothing initialises them."""
    return [
        f"{name}.{key}" if name else key
        for name, each in module.named_modules()
        if any(storage_of(tensor) in draws.places for tensor in chain(each.parameters(False), each.buffers(False)))
        for key, tensor in vars(each).items()
        if isinstance(tensor, Tensor) and tensor.is_meta
    ]


def free(module: nn.Module, kept: Collection[str], in_glue: Collection[str], device: torch.device | str) -> None:
    """Free the memory of all other tensors. Those that glue uses become zeros on the device that take no memory."""
    pairs: list[tuple[Tensor, Tensor]] = []
    for name, each in _tensors(module):
        if name in kept:
            continue
        if name in in_glue:
            pairs.append((each, torch.zeros((), dtype=each.dtype, device=device).expand(each.shape)))
        elif not each.is_meta:
            pairs.append((each, each.detach().to("meta")))
    replace_all(module, pairs)


def replace(module: nn.Module, old: Tensor, new: Tensor) -> None:
    """Put a tensor in the place of another, wherever the module holds it."""
    replace_all(module, [(old, new)])


def replace_all(module: nn.Module, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Put new tensors in the places of old ones, wherever the module holds them, in one walk."""
    made: dict[int, tuple[Tensor, Tensor]] = {}
    for old, new in pairs:
        given = nn.Parameter(new, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else new
        made[id(old)] = (old, given)  # Keep the old one alive, so that its id is not reused.
    for each in module.modules():
        for held in (parameter_slots(each), buffer_slots(each)):
            for key, tensor in held.items():
                if id(tensor) in made:
                    held[key] = made[id(tensor)][1]


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _initialisers(
    module: nn.Module, rules: Callable[[nn.Module], None] | None, name: str
) -> Iterator[tuple[str, nn.Module, Callable[[], None]]]:
    """Yield for each module, children first, a function that initialises it: its own reset, then the model's rules."""
    rules = getattr(module, "_init_weights", rules)
    for child_name, child in module.named_children():
        yield from _initialisers(child, rules, f"{name}.{child_name}" if name else child_name)
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)

    def initialise() -> None:
        if callable(reset) and (parameter_slots(module) or buffer_slots(module)):
            reset()
        if rules is not None:
            rules(module)

    yield name, module, initialise


class _Draws(EagerDispatchMode):  # type: ignore[no-untyped-call]
    """Seeds each draw by the name of its parameter, and blocks writes to tensors that are not being initialised."""

    def __init__(self, module: nn.Module, wanted: dict[str, Tensor], seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.places = {storage_of(each): name for name, each in wanted.items()}
        self.written: set[str] = set()
        self.current = ""
        self._settled = {storage_of(each) for _, each in _tensors(module)} - set(self.places)
        self._seed = seed
        self._num_drawn: dict[str, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        written = written_by(func, args, kwargs or {})
        if any(storage_of(each) in self._settled for each in written):
            return written[0]
        targets = [self.places[place] for each in written if (place := storage_of(each)) in self.places]
        self.written.update(targets)
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._reseed(targets[0] if targets else f"in {self.current}")
        return func(*args, **(kwargs or {}))

    def _reseed(self, name: str) -> None:
        count = self._num_drawn[name] = self._num_drawn.get(name, -1) + 1
        digest = hashlib.blake2b(f"{self._seed}/{name}/{count}".encode(), digest_size=8).digest()
        seed_torch(int.from_bytes(digest, "big") >> 1)
