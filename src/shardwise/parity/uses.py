"""What parameters were when a forward used them, and in which order it did."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from shardwise.torch_private import parameter_slots


class Uses:
    """Looks at a module's parameters whenever one of its modules that has some is called.

    `found` is what each was at its first use, in the order of these. A parameter that others hold, or that is not
    gathered, is not used.
    """

    def __init__(self) -> None:
        self.found: dict[str, Tensor] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> "Uses":
        return self  # A copy of the module, for its shapes alone, has the same hooks.

    @contextmanager
    def of(self, module: nn.Module) -> Iterator["Uses"]:
        """Look while something is run."""
        names = {id(each): name for name, each in module.named_parameters()}
        handles = []
        for owner in module.modules():
            own = {key: names[id(each)] for key, each in parameter_slots(owner).items() if each is not None}
            if own:
                handles.append(owner.register_forward_pre_hook(partial(self._note, own)))
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()

    def _note(self, own: dict[str, str], owner: nn.Module, args: Any) -> None:
        del args
        for key, name in own.items():
            parameter = parameter_slots(owner)[key]
            is_here = parameter is not None and not parameter.is_meta and parameter.untyped_storage().size()
            if parameter is not None and is_here and name not in self.found:
                self.found[name] = parameter.detach().clone()
