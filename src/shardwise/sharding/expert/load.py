"""Count how often experts are chosen, by layer, over the batches of all ranks.

A rank counts its own share: some of the rows (dp), tokens (cp) and layers (pp), and where a schedule holds the model
twice, some of the microbatches of a layer. The counts of all layers are summed over all ranks at once. So every rank
has the same counts for every layer, and copies of a layer are treated alike. Tensor parallel ranks see the same
tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.sharding.expert.sharding import ExpertSharding

#: By layer, how often each of its experts was chosen.
Load = Mapping[str, Sequence[int]]


class Loads:
    """The counts of a module's expert layers in training.

    Our routers count choices (`router.load`). For other dispatched layers, the ranks that compute the rows count them.
    Other layers are not counted. `add_up` sums a tensor in place over all processes, `num_alike` of which count alike.
    """

    def __init__(
        self,
        module: nn.Module,
        experts: ExpertSharding | None,
        add_up: Callable[[Tensor, str], None],
        *,
        num_alike: int,
    ) -> None:
        self._routers = find_routers(module)
        dispatches = {} if experts is None else experts.layers
        self._others = {name: each for name, each in dispatches.items() if name not in self._routers}
        self._add_up, self._num_alike = add_up, num_alike
        self._sizes = {name: each.load.numel() for name, each in self._routers.items()}
        self._sizes |= {name: len(each.placement.order) for name, each in self._others.items()}
        self._since_told = torch.zeros(sum(self._sizes.values()), dtype=torch.int64)
        self._since_placed = self._since_told.clone()

    @property
    def are_there(self) -> bool:
        """Whether any layer is counted."""
        return bool(self._sizes)

    def told(self) -> dict[str, list[int]]:
        """Return the load since the last call of this. All ranks must call it together."""
        self._count()
        found = self._by_layer(self._since_told)
        self._since_told.zero_()
        return found

    def since_placed(self) -> dict[str, list[int]]:
        """Return the load since experts were last placed. All ranks must call it together."""
        self._count()
        return self._by_layer(self._since_placed)

    def begin_anew(self, load: Load | None = None) -> None:
        """Restart the count after a placement, from `load` if experts have had one since; absent layers are at 0."""
        parts = [torch.tensor((load or {}).get(name, [0] * size)) for name, size in self._sizes.items()]
        self._since_placed = torch.cat(parts) if parts else self._since_placed

    def _count(self) -> None:
        if self._sizes:
            counts = torch.cat(list(self._taken().values()))
            self._add_up(counts, "the load of experts")
            counts //= self._num_alike
            self._since_told += counts
            self._since_placed += counts

    @torch.no_grad()
    def _taken(self) -> dict[str, Tensor]:
        """Return this process's counts by layer, on the CPU, and reset them."""
        found = {name: torch.zeros(size, dtype=torch.int64) for name, size in self._sizes.items()}
        here = {name: each.load for name, each in self._routers.items() if not each.load.is_meta}
        if here:
            # A single device synchronisation.
            together = torch.cat(list(here.values())).cpu()
            found |= zip(here, torch.split(together, [self._sizes[name] for name in here]), strict=True)
            for each in here.values():
                each.zero_()
        return found | {name: each.take_load() for name, each in self._others.items()}

    def _by_layer(self, counts: Tensor) -> dict[str, list[int]]:
        parts = torch.split(counts, list(self._sizes.values()))
        return {name: part.tolist() for name, part in zip(self._sizes, parts, strict=True)}


def find_routers(module: nn.Module) -> dict[str, Any]:
    """Return the routers of our layers, known by their `exchange`, by the names of their experts."""
    found = {}
    for name, block in module.named_modules():
        router = getattr(block, "router", None)
        if callable(block.__dict__.get("exchange")) and isinstance(getattr(router, "load", None), Tensor):
            found[f"{name}.experts" if name else "experts"] = router
    return found
