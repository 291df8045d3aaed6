"""The result of sharding a module: how each parameter, by its original names, is placed on the ranks."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from shardwise.errors import unknown
from shardwise.ranks.collectives import Group, filled, start_all_gather, start_all_reduce
from shardwise.sharding.rng_tracker import RngTracker
from shardwise.stages.split.materialise import materialise, replace
from shardwise.stages.stage import Batch
from shardwise.units import format_bytes, format_flops

#: Half-open runs of indices along a dim.
Runs = tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class Shards:
    """A parameter in pieces along one dim, or whole on every rank (`dim` is None).

    `runs` are the indices that each rank holds, in order. An index may be on several ranks (a key head that the queries
    of two ranks share); then the gradient on each is a partial sum. `padded` is the common length of pieces that are
    padded with zeros.
    """

    shape: tuple[int, ...]
    dim: int | None = None
    runs: tuple[Runs, ...] = ()
    padded: int | None = None
    #: Whether each rank's gradient is a partial sum, though several ranks hold the same elements.
    is_partial: bool = False

    def local(self, whole: Tensor, rank: int) -> Tensor:
        """Return a rank's piece."""
        if self.dim is None:
            return whole
        pieces = [whole.narrow(self.dim, start, stop - start) for start, stop in self.runs[rank] or ((0, 0),)]
        local = torch.cat(pieces, self.dim) if len(pieces) != 1 else pieces[0]
        return local if self.padded is None else filled(local, self.dim, self.padded)

    def whole(self, pieces: Sequence[Tensor]) -> Tensor:
        """Assemble the parameter from all pieces."""
        whole = pieces[0].new_zeros(self.shape)
        for rank, piece in enumerate(pieces):
            self.put(whole, piece, rank)
        return whole

    def put(self, whole: Tensor, piece: Tensor, rank: int) -> None:
        """Write a rank's piece to where it belongs."""
        assert self.dim is not None, "a parameter that is whole has no pieces"
        at = 0
        for start, stop in self.runs[rank]:
            whole.narrow(self.dim, start, stop - start).copy_(piece.narrow(self.dim, at, stop - start))
            at += stop - start

    def length(self, rank: int) -> int:
        """Return how many indices a rank holds, without padding."""
        return sum(stop - start for start, stop in self.runs[rank])

    def counted(self, piece: Tensor, rank: int) -> Tensor:
        """Return the part of a piece that this rank counts, so that all ranks together count every element once."""
        if self.dim is None:
            return piece if rank == 0 else piece[:0] if piece.dim() else piece.new_zeros(0)
        taken = np.zeros(self.shape[self.dim], dtype=bool)
        for other in range(rank):
            taken[places(self.runs[other])] = True
        kept = np.flatnonzero(~taken[places(self.runs[rank])])
        if len(kept) == piece.shape[self.dim]:
            return piece
        return piece.index_select(self.dim, torch.from_numpy(kept).to(piece.device))


@dataclass(kw_only=True)
class Sharding:
    """How a module is sharded over the ranks of a tensor parallel group.

    `shards` has every parameter by its original names. `whole` maps layers that are whole on every rank to the reason.
    `notes` lists changes to modules other than to their layers.
    """

    group: Group
    shards: Mapping[str, Shards]
    whole: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    cut: Mapping[str, str] = field(default_factory=dict)
    #: Why the cut module could not be compared with the whole one, if that was requested.
    unverified: str = ""
    #: Whether the operations between cut layers are sharded along the sequence.
    is_along_sequence: bool = False
    #: Whether its forward drew random numbers (dropout aside) in the trial.
    draws: bool = False
    #: The original module on the meta device.
    twin: nn.Module = field(default_factory=nn.Module, repr=False)
    #: Tries the cut in evaluation mode on a copy of the module, with another batch or other values: what is wrong.
    find_fault: Callable[[nn.Module, Batch], str] | None = field(default=None, repr=False)

    def of(self, name: str) -> Shards:
        if name not in self.shards:
            raise unknown("parameter", name, self.shards)
        return self.shards[name]

    @property
    def partial(self) -> frozenset[str]:
        """Parameters whose gradient on each rank is a partial sum."""
        return frozenset(name for name, each in self.shards.items() if each.is_partial)

    def local(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's piece of a whole parameter."""
        return self.of(name).local(whole, self.group.rank)

    def gather(self, name: str, local: Tensor) -> Tensor:
        """Gather a whole parameter, or its optimizer state, from all ranks, which must call this together."""
        shards, group = self.of(name), self.group
        if group.size == 1 or shards.dim is None:
            return local
        longest = max(shards.padded or shards.length(rank) for rank in range(group.size))
        piece = filled(local.movedim(shards.dim, 0), 0, longest)
        pieces = start_all_gather(piece, group).finish().view(group.size, *piece.shape)
        return shards.whole([piece.movedim(0, shards.dim) for piece in pieces])

    @torch.no_grad()
    def finish_gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Sum the gradients that are partial on each rank: norms between shards, key heads on several ranks.

        All ranks must call this together, when the gradients of a step are complete.
        """
        names = [name for name in parameters if name in self.shards and self.shards[name].is_partial]
        if self.group.size == 1 or not names:
            return
        wholes = [self._spread_out(name, parameters[name]) for name in names]
        flat = start_all_reduce(torch.cat([each.reshape(-1) for each in wholes]), self.group).finish()
        ends = list(accumulate(each.numel() for each in wholes))
        for name, start, end in zip(names, [0, *ends], ends, strict=False):
            shards, summed = self.shards[name], flat[start:end]
            mine = shards.local(summed.view(shards.shape), self.group.rank)
            # Parameters of several dtypes are summed in the widest of them.
            parameters[name].grad = mine.to(parameters[name].dtype, copy=True)

    def _spread_out(self, name: str, parameter: nn.Parameter) -> Tensor:
        shards = self.shards[name]
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if shards.dim is None:
            return gradient
        whole = gradient.new_zeros(shards.shape)
        shards.put(whole, gradient, self.group.rank)
        return whole

    def counted(self, name: str, local: Tensor) -> Tensor:
        """Return the part of a piece that this rank counts, so that all ranks count each element once: for norms."""
        return self.of(name).counted(local, self.group.rank)

    def materialise(self, module: nn.Module, *, seed: int = 0, device: torch.device | str = "cpu") -> None:
        """Initialise parameters on the meta device with their pieces of the whole module's initial values.

        Only one parameter is held whole at a time.
        """
        for name, parameter in list(module.named_parameters()):
            if parameter.is_meta:
                whole = self._drawn(name, seed, device)
                replace(module, parameter, self.local(name, whole).clone())

    def _drawn(self, name: str, seed: int, device: torch.device | str) -> Tensor:
        materialise(self.twin, [name], seed=seed, device=device)
        made = self.twin.get_parameter(name)
        replace(self.twin, made, made.detach().to("meta"))
        return made.detach()

    def describe(self) -> str:
        """Describe what is cut, what stays whole and how to name it, in readable lines."""
        lines = [f"{name}: {how}" for name, how in _by_layer(self.cut)]
        for name, why in _by_layer(self.whole):
            names = [each for each in self.whole if starred(each) == name]
            lines.append(
                f'{name}: whole on every rank, since {why}; {{"{name}": "column"}} or "row" names it'
                f" ({cost_of(self.twin, names, self.group.size)})"
            )
        if self.unverified:
            lines.append(f"not compared with the whole module: {self.unverified}")
        return "\n".join([*lines, *self.notes])


def cost_of(twin: nn.Module, names: Sequence[str], num_ranks: int) -> str:
    """Describe what it costs a rank to hold layers whole."""
    parameters = [each for name in names for each in twin.get_submodule(name).parameters()]
    more = 1 - 1 / num_ranks
    num_bytes = sum(each.numel() * each.element_size() for each in parameters)
    products = [each for name in names for each in _matrices(twin.get_submodule(name))]
    flops = 2 * sum(each.numel() for each in products)
    return (
        f"{format_bytes(more * num_bytes)} of weights and {format_flops(more * flops)} a token of forward more on each"
        " rank"
    )


def _matrices(layer: nn.Module) -> list[Tensor]:
    return [] if isinstance(layer, nn.Embedding) else [each for each in layer.parameters() if each.dim() > 1]


def starred(name: str) -> str:
    """Return a name with stars for numbers: layers.*.mlp.up."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def _by_layer(layers: Mapping[str, str]) -> Iterable[tuple[str, str]]:
    """Return layers that differ only in their number once: layers.*.mlp.up."""
    shown: dict[tuple[str, str], None] = {}
    for name, text in layers.items():
        shown.setdefault((starred(name), starred(text)), None)
    return list(shown)


def places(runs: Runs) -> NDArray[np.int64]:
    """Return every index in some runs."""
    return np.concatenate([np.arange(start, stop) for start, stop in runs] or [np.zeros(0, dtype=np.int64)])


def runs_of(positions: NDArray[np.int64]) -> Runs:
    """Return ascending indices as runs."""
    if not len(positions):
        return ()
    breaks = np.flatnonzero(np.diff(positions) != 1) + 1
    return tuple((int(run[0]), int(run[-1]) + 1) for run in np.split(positions, breaks))


def even_runs(length: int, count: int) -> tuple[Runs, ...]:
    """Split a length into one run for each rank: all of one length, except that the last may be shorter or empty."""
    size = -(-length // count)
    return tuple(
        ((min(rank * size, length), min((rank + 1) * size, length)),) if rank * size < length else ()
        for rank in range(count)
    )


def find_trackers(module: nn.Module) -> list[RngTracker]:
    """Return the RNG trackers of a module, which know this rank's channels inside layers that are cut."""
    found = (getattr(each, "rng", None) for each in module.modules())
    return [each for each in found if isinstance(each, RngTracker)]
