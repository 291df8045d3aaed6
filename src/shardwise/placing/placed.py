"""The module that `place` gives back: the user's own, over several places."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import ShardwiseError
from shardwise.fusion.fuse import Fused
from shardwise.placing.activation_offload import PlacedActivationOffload
from shardwise.placing.arrange import Arrangement, arrange
from shardwise.placing.moving import InputMover, settle
from shardwise.placing.places import Place, PlaceOptions
from shardwise.stages.split.outline import leaves_of
from shardwise.stages.stage import Batch
from shardwise.torch_private import share_slots


class Placed(nn.Module):
    """A module over several places, used like the one that it was made from.

    It has the same children, parameters and buffers under the same names. What it has not itself, like `generate` or
    `config`, is asked of that module.
    """

    def __init__(
        self, module: nn.Module, places: Sequence[Place], options: PlaceOptions, fused: Fused | None = None
    ) -> None:
        super().__init__()
        self._fused = fused or Fused()
        # Not a child: names of parameters stay as they are.
        self.__dict__["_placed"] = module
        share_slots(self, module)
        self.training = module.training
        self.places, self._options = tuple(places), options
        self._signature = inspect.signature(module.forward)
        self._arranged = Arrangement()
        self._mover: InputMover | None = None

    @property
    def where(self) -> dict[str, Place]:
        """Where parameters and buffers are, by name, once that is decided."""
        return self._arranged.where

    @property
    def reason(self) -> str:
        """Why the host is used as it is, where it had to be."""
        return self._arranged.reason

    @property
    def kernels(self) -> list[str]:
        """What kernels compute in place of the module, and what was left and why, in lines."""
        return self._fused.lines()

    @property
    def activations(self) -> PlacedActivationOffload | None:
        """The part of the activations that is on the host, if any is."""
        return self._arranged.activations

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's output. With several microbatches it is computed on all places at once."""
        if self._options.microbatches == 1 or self._arranged.is_by_layers or _has_cache(kwargs):
            if not self.where:
                self.lay_out(None)
            return self._run_by_layers(args, kwargs)
        batch = self._batch(args, kwargs)
        if self._arranged.pipeline is None:
            self.lay_out(batch)
        pipeline = self._arranged.pipeline
        return self._run_by_layers(args, kwargs) if pipeline is None else pipeline.run(batch)

    def lay_out(self, example: Batch | None) -> None:
        """Decide where everything goes, from a batch if there is one, and bring it there."""
        module = self.__dict__["_placed"]
        self._arranged = arrange(module, self.places, self._options, example)
        if self._mover is not None:
            self._mover.remove()
        has_several = len({place.device for place in self.places}) > 1
        self._mover = InputMover(module, self._arranged.units) if has_several else None

    def train(self, mode: bool = True) -> "Placed":
        self.__dict__["_placed"].train(mode)
        self.training = mode
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["_placed"].state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        if self._arranged.host is not None and (kwargs.get("assign") or args[1:] == (True,)):
            self._arranged.host.refuse("load_state_dict(..., assign=True)", "load_state_dict(...), which copies")
        return self.__dict__["_placed"].load_state_dict(state_dict, *args, **kwargs)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "Placed":
        """Types may be changed (`half()`); where things are is decided here, so they go back there."""
        if self._arranged.host is not None:
            self._arranged.host.refuse("to(...)", "to(...) before sw.place(...)")
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.where and self._arranged.host is None:
            settle(self.__dict__["_placed"], {name: place.device for name, place in self.where.items()})
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_placed" not in self.__dict__:
                raise
            return getattr(self.__dict__["_placed"], name)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Placed":
        raise ShardwiseError(
            "a placed module cannot be copied: its stages belong to the one that it was made from",
            remedy="copy.deepcopy(module) before sw.place(...), or state_dict()",
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ShardwiseError(
            "a placed module cannot be pickled: its stages are threads and devices of this process",
            remedy="torch.save(placed.state_dict(), path), and sw.place(...) after load_state_dict",
        )

    def _batch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by name."""
        given: dict[str, Any] = {}
        for name, value in self._signature.bind(*args, **kwargs).arguments.items():
            kind = self._signature.parameters[name].kind
            if kind is inspect.Parameter.VAR_KEYWORD and len(self._signature.parameters) == 1:
                given.update(value)
            elif kind in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL):
                raise ShardwiseError(
                    f"{type(self.__dict__['_placed']).__name__}.forward has no name for"
                    f" {', '.join(value) if isinstance(value, dict) else f'the last {len(value)} arguments'}, so they"
                    " cannot be cut into microbatches",
                    remedy="name them in forward's signature, or microbatches=1",
                )
            else:
                given[name] = value
        return given

    def _run_by_layers(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module: nn.Module = self.__dict__["_placed"]
        if self.activations is None or not torch.is_grad_enabled():
            return module(*args, **kwargs)
        given = [each for each in leaves_of((args, kwargs)) if isinstance(each, Tensor)]
        host = self._arranged.host
        swapped = [] if host is None else host.swapped
        with self.activations.saving([*module.parameters(), *module.buffers(), *swapped, *given]):
            return module(*args, **kwargs)


def _has_cache(kwargs: Mapping[str, Any]) -> bool:
    """Whether a call fills or reads a cache of keys and values: those go layer by layer."""
    return bool(kwargs.get("use_cache")) or kwargs.get("past_key_values") is not None
