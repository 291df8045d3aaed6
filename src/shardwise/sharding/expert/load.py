"""How often experts are chosen, by layer, in the batches of all ranks.

A rank counts what it sees: some of the rows (dp), of the tokens (cp), of the layers (pp), and where a schedule holds
the model twice, some of the microbatches of a layer. All ranks add up what they have, of all layers at once, so that
every rank knows the same of every layer, and copies of a layer are treated alike. Tensor parallel ranks see the same
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
    """What the layers of experts of a module have counted in training.

    Our routers count choices (`router.load`). Of other layers whose rows travel, those who compute them count rows. Of
    others nothing is known. `add_up` sums numbers over all processes, in place, of which `num_alike` count the same.
    """

    def __init__(
        self,
        module: nn.Module,
        experts: ExpertSharding | None,
        add_up: Callable[[Tensor, str], None],
        *,
        num_alike: int,
    ) -> None:
        self._routers = _find_routers(module)
        dispatches = {} if experts is None else experts.layers
        self._others = {name: each for name, each in dispatches.items() if name not in self._routers}
        self._add_up, self._num_alike = add_up, num_alike
        self._sizes = {name: each.load.numel() for name, each in self._routers.items()}
        self._sizes |= {name: len(each.placement.order) for name, each in self._others.items()}
        self._since_told = torch.zeros(sum(self._sizes.values()), dtype=torch.int64)
        self._since_placed = self._since_told.clone()

    @property
    def are_there(self) -> bool:
        """Whether anybody counts."""
        return bool(self._sizes)

    def told(self) -> dict[str, list[int]]:
        """What was chosen since this was last asked. All ranks call it alike."""
        self._count()
        found = self._by_layer(self._since_told)
        self._since_told.zero_()
        return found

    def since_placed(self) -> dict[str, list[int]]:
        """What was chosen since experts were last placed. All ranks call it alike."""
        self._count()
        return self._by_layer(self._since_placed)

    def begin_anew(self, load: Load | None = None) -> None:
        """Experts have been placed; or were a while ago, and have had a load since. Layers that it lacks had none."""
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
        """This process's counts, by layer, on the CPU. They begin at 0 again."""
        found = {name: torch.zeros(size, dtype=torch.int64) for name, size in self._sizes.items()}
        here = {name: each.load for name, each in self._routers.items() if not each.load.is_meta}
        if here:
            # The device is waited for once.
            together = torch.cat(list(here.values())).cpu()
            found |= zip(here, torch.split(together, [self._sizes[name] for name in here]), strict=True)
            for each in here.values():
                each.zero_()
        return found | {name: each.take_load() for name, each in self._others.items()}

    def _by_layer(self, counts: Tensor) -> dict[str, list[int]]:
        parts = torch.split(counts, list(self._sizes.values()))
        return {name: part.tolist() for name, part in zip(self._sizes, parts, strict=True)}


def _find_routers(module: nn.Module) -> dict[str, Any]:
    """The routers of our layers, by the names of their experts: the seam of one is its `exchange`."""
    found = {}
    for name, block in module.named_modules():
        router = getattr(block, "router", None)
        if callable(block.__dict__.get("exchange")) and isinstance(getattr(router, "load", None), Tensor):
            found[f"{name}.experts" if name else "experts"] = router
    return found
