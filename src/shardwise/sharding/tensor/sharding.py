"""What became of a module's parameters: by their original names, where each lies."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor, nn

from shardwise.errors import unknown
from shardwise.ranks.collectives import Group, start_all_gather, start_all_reduce
from shardwise.sharding.tensor.shards import Shards
from shardwise.stages.split.materialise import materialise, replace


@dataclass(kw_only=True)
class Sharding:
    """How a module lies on the ranks of a tensor parallel group.

    `shards` has every parameter by its original names. `whole` says of layers that every rank has whole why that is so,
    and `notes` what was changed in modules beside their layers.
    """

    group: Group
    shards: Mapping[str, Shards]
    whole: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    cut: Mapping[str, str] = field(default_factory=dict)
    #: The module as it was, without numbers.
    twin: nn.Module = field(default_factory=nn.Module, repr=False)

    def of(self, name: str) -> Shards:
        if name not in self.shards:
            raise unknown("parameter", name, self.shards)
        return self.shards[name]

    @property
    def partial(self) -> frozenset[str]:
        """Parameters whose gradient on each rank is a part of the sum."""
        return frozenset(name for name, each in self.shards.items() if each.is_partial)

    def local(self, name: str, whole: Tensor) -> Tensor:
        """This rank's piece of a whole parameter."""
        return self.of(name).local(whole, self.group.rank)

    def gather(self, name: str, local: Tensor, *, summed: bool = False) -> Tensor:
        """The whole of a parameter, or of its optimizer state, from every rank's piece. All ranks call this alike.

        `summed`: of gradients before `finish_gradients`, of which each rank has a part.
        """
        shards, group = self.of(name), self.group
        if group.size == 1 or (shards.dim is None and not (summed and shards.is_partial)):
            return local
        if shards.dim is None:
            return start_all_reduce(local.clone(), group).finish()
        longest = max(shards.padded or shards.length(rank) for rank in range(group.size))
        filled = local.new_zeros((longest, *local.movedim(shards.dim, 0).shape[1:]))
        filled[: local.shape[shards.dim]] = local.movedim(shards.dim, 0)
        pieces = start_all_gather(filled, group).finish().view(group.size, longest, *filled.shape[1:])
        return shards.whole([piece.movedim(0, shards.dim) for piece in pieces], summed=summed)

    @torch.no_grad()
    def finish_gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Sum the gradients of which each rank has a part: norms between shards, key heads on several ranks.

        All ranks call this alike, when the gradients of a step are there.
        """
        names = [name for name in parameters if name in self.shards and self.shards[name].is_partial]
        if self.group.size == 1 or not names:
            return
        wholes = [self._spread_out(name, parameters[name]) for name in names]
        flat = start_all_reduce(torch.cat([each.reshape(-1) for each in wholes]), self.group).finish()
        ends = list(accumulate(each.numel() for each in wholes))
        for name, start, end in zip(names, [0, *ends], ends, strict=False):
            shards, summed = self.shards[name], flat[start:end]
            parameters[name].grad = shards.local(summed.view(shards.shape), self.group.rank).clone()

    def _spread_out(self, name: str, parameter: nn.Parameter) -> Tensor:
        shards = self.shards[name]
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if shards.dim is None:
            return gradient
        whole = gradient.new_zeros(shards.shape)
        shards.put(whole, gradient, self.group.rank)
        return whole

    def counted(self, name: str, local: Tensor) -> Tensor:
        """The part of a piece that this rank counts, where all ranks together count each number once: for norms."""
        return self.of(name).counted(local, self.group.rank)

    def square_norm(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """This rank's part of the sum of all squares: over the group they add up to the whole's."""
        squares = [self.counted(name, each).double().square().sum() for name, each in gradients.items()]
        return torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64)

    def materialise(
        self, module: nn.Module, names: Collection[str] | None = None, *, seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:  # fmt: skip
        """Give parameters that are on the meta device their pieces of what the whole module would have drawn.

        One whole parameter is there at a time.
        """
        for name, parameter in list(module.named_parameters()):
            if parameter.is_meta and (names is None or name in names):
                whole = self._drawn(name, seed, device)
                replace(module, parameter, self.local(name, whole).clone())

    def _drawn(self, name: str, seed: int, device: torch.device | str) -> Tensor:
        materialise(self.twin, [name], seed=seed, device=device)
        made = self.twin.get_parameter(name)
        replace(self.twin, made, made.detach().to("meta"))
        return made.detach()

    def describe(self) -> str:
        """What is cut, what stays whole and how to name it, in lines for people."""
        lines = [f"{name}: {how}" for name, how in _by_layer(self.cut)]
        for name, why in _by_layer(self.whole):
            lines.append(f'{name}: whole on every rank, since {why}; {{"{name}": "column"}} or "row" names it')
        return "\n".join([*lines, *self.notes])


def _by_layer(layers: Mapping[str, str]) -> Iterable[tuple[str, str]]:
    """Layers that differ in their number only, once: layers.*.mlp.up."""
    shown: dict[tuple[str, str], None] = {}
    for name, text in layers.items():
        star = ".".join("*" if part.isdecimal() else part for part in name.split("."))
        shown.setdefault((star, ".".join("*" if part.isdecimal() else part for part in text.split("."))), None)
    return list(shown)
