"""Select the entries of a batch that a module's forward takes, by its signature."""

import inspect
from collections.abc import Iterator
from typing import Any

from torch import nn

from shardwise.errors import ShardwiseError
from shardwise.stages.stage import Batch
from shardwise.torch_private import has_hooks_of_places

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class Signature:
    """The parameters of a forward, read once."""

    def __init__(self, module: nn.Module) -> None:
        parameters = inspect.signature(module.forward).parameters.values()
        self._module = type(module).__name__
        self._root = module
        self._positional = [each for each in parameters if each.kind is inspect.Parameter.POSITIONAL_ONLY]
        self._named = [each for each in parameters if each.kind in _NAMED]
        #: `forward(*args, **kwargs)`, as in a module that wraps another: it gets the whole batch.
        self._takes_all = not self._named and any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)

    @property
    def names(self) -> dict[str, inspect.Parameter]:
        """The named parameters."""
        return {each.name: each for each in (*self._positional, *self._named)}

    def arguments(self, batch: Batch) -> Arguments:
        """Return the arguments of one call.

        Pipeline stages cannot fill a KV cache together, and training needs none. So a forward that names `use_cache`
        gets False unless the batch has an entry for it.
        """
        if self._takes_all:
            return (), dict(batch)
        given = {each.name: batch[each.name] for each in self._named if each.name in batch}
        if any(each.name == "use_cache" for each in self._named):
            given.setdefault("use_cache", False)
        places = tuple(batch[each.name] for each in self._positional if each.name in batch)
        return (*places, *self._in_order(given)), given

    def _in_order(self, given: dict[str, Any]) -> Iterator[Any]:
        """Move arguments from keywords to positions, as in `model(x)`, if the module has hooks that see only positional
        arguments (`def hook(module, args)`)."""
        if not has_hooks_of_places(self._root):
            return
        for each in self._named:
            if each.kind is inspect.Parameter.KEYWORD_ONLY or each.name not in given:
                return
            yield given.pop(each.name)

    def check(self, batch: Batch) -> None:
        """Raise if the batch lacks an argument that forward requires."""
        needed = [each.name for each in [*self._positional, *self._named] if each.default is inspect.Parameter.empty]
        missing = [name for name in needed if name not in batch]
        if missing:
            raise ShardwiseError(
                f"{self._module}.forward needs {', '.join(missing)}, which the batch lacks; it has {', '.join(batch)}",
                remedy=f"name the batch's entries as forward does: {{{missing[0]!r}: ...}}",
            )
