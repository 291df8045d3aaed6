"""Contexts for trials of a module: random draws become deterministic, and nothing is recomputed."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from shardwise.stages.checkpoints import nothing_recomputed
from shardwise.stages.rows import Seen, nodes
from shardwise.stages.split.flow import draws
from shardwise.stages.split.script_values import names_in_classes
from shardwise.stages.stage import Batch
from shardwise.stages.trial_rows import FIRST, NUM_ROWS
from shardwise.torch_private import BatchNormModule, EagerDispatchMode


class SteadyDraws(EagerDispatchMode):  # type: ignore[no-untyped-call]
    """Replaces random numbers by a constant, so that every rank and the whole module draw the same.

    A shuffle keeps the order; with `turns` it reverses it, so that mixing of rows shows. Draws from a generator of the
    module's own, or all draws if the forward sets the seed (`has_seed`), are deterministic: one device would repeat
    them. There each number differs from the one before, so that a draw for only a part of the channels or tokens shows
    as a difference.
    """

    def __init__(self, *, turns: bool = False, has_seed: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._turns, self._has_seed = turns, has_seed
        #: Whether anything but dropout was drawn; and whether something was that is left random (`poisson`, `rrelu`).
        self.has_drawn = self.is_random = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        if not draws(func, args, kwargs):
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if name == "native_dropout":
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        self.has_drawn = True
        made = func(*args, **kwargs)
        if name.startswith("randperm"):
            order = torch.arange(len(made), device=made.device)
            return made.copy_(order.flip(0) if self._turns else order)
        if name.startswith(("bernoulli", "rand", "normal", "uniform", "exponential", "multinomial")):
            if made.is_floating_point() and (self._has_seed or kwargs.get("generator") is not None):
                return made.copy_(torch.arange(made.numel(), device=made.device).mul(0.7).sin().view(made.shape))
            return made.fill_(1 if name.startswith("bernoulli") else 0.5 if made.is_floating_point() else 0)
        self.is_random = True
        return made


class RowDraws(EagerDispatchMode):  # type: ignore[no-untyped-call]
    """Lets a row draw the same numbers in a run of three rows, and in runs of two and one of them.

    What the run of three draws is kept. If a draw of a part has fewer elements along one dim, and exactly as many fewer
    as it has rows, it gets those of its rows. If it has the same shape (noise of a weight, shared negatives), it gets
    all. A shuffle reverses the order. Draws from a generator of the module's own are left alone: one device would
    repeat them.
    """

    def __init__(self, seen: Seen) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen = seen
        self._kept: list[Tensor] = []
        self._first, self._number, self._place = 0, NUM_ROWS, 0
        #: Whether a part has drawn what cannot be assigned to its rows: its runs tell nothing.
        self.is_lost = False

    def begin(self, batch: Batch) -> None:
        """Begin the run of a batch: of all rows, of the first two, or of the last."""
        self._number = next((len(each) for path, each in nodes(batch) if path in self._seen.paths), 0)
        self._first, self._place = FIRST if self._number == NUM_ROWS - FIRST else 0, 0
        if self._number == NUM_ROWS:
            self._kept = []
        elif self._number not in (FIRST, NUM_ROWS - FIRST):
            self.is_lost = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        if not draws(func, args, kwargs) or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if name == "native_dropout":
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        made = func(*args, **kwargs)
        if not isinstance(made, Tensor):
            self.is_lost = True
        elif name.startswith("randperm"):
            made.copy_(torch.arange(len(made), device=made.device).flip(0))
        elif self._number == NUM_ROWS:
            self._kept.append(made.detach().clone())
        else:
            mine = self._find(made.shape)
            if mine is None:
                self.is_lost = True
            else:
                made.copy_(mine)
        return made

    def _find(self, shape: torch.Size) -> Tensor | None:
        """Return what a part of this shape is to draw now."""
        self._place += 1
        if self._place > len(self._kept):
            return None
        every = self._kept[self._place - 1]
        if every.shape == shape:
            return every
        others = [dim for dim, size in enumerate(shape) if len(shape) == every.dim() and size != every.shape[dim]]
        if len(others) != 1 or every.shape[others[0]] * self._number != shape[others[0]] * NUM_ROWS:
            return None
        of_one = every.shape[others[0]] // NUM_ROWS
        return every.narrow(others[0], self._first * of_one, shape[others[0]])


class SteadyDropout(TorchFunctionMode):
    """Disables dropout: on a GPU attention drops inside one kernel, and on a CPU kept values are scaled up.

    So a module that is otherwise the same in training mode computes the same as in evaluation mode.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        if func is functional.scaled_dot_product_attention:
            args, kwargs = _with_argument(args, kwargs or {}, 4, "dropout_p", 0.0)
        elif func is functional.multi_head_attention_forward:
            args, kwargs = _with_argument(args, kwargs or {}, 10, "dropout_p", 0.0)
        elif func is functional.dropout or func is torch.dropout:
            probability = args[1] if len(args) > 1 else (kwargs or {}).get("p", 0.5)
            if probability < 1:  # With probability 1 the result is zeros, as it is.
                args, kwargs = _with_argument(args, kwargs or {}, 1, "p", 0.0)
        return func(*args, **(kwargs or {}))


class KnownStatistics(TorchFunctionMode):
    """Lets batch norms with a forward of their own (`split`, an activation) be in training mode, and normalise by their
    running statistics: that they normalise over the rows of a part is known, what else they do is not."""

    def __init__(self, norms: Sequence[nn.Module]) -> None:
        super().__init__()
        self._known = {id(each) for norm in norms for each in norm.buffers()}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        if func is functional.batch_norm and len(args) > 1 and id(args[1]) in self._known:
            args, kwargs = _with_argument(args, kwargs or {}, 5, "training", False)
        return func(*args, **(kwargs or {}))


def has_own_forward(norm: nn.Module) -> bool:
    """Whether the forward of a batch norm is not torch's. Norms without running statistics are left alone."""
    is_one = isinstance(norm, BatchNormModule) and norm.running_mean is not None
    return is_one and not type(norm).forward.__module__.startswith("torch.")


def _with_argument(
    args: tuple[Any, ...], kwargs: dict[str, Any], position: int, name: str, value: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call with one of them replaced, whether positional or by name."""
    if len(args) > position:
        return (*args[:position], value, *args[position + 1 :]), kwargs
    return args, {**kwargs, name: value}


@contextmanager
def steady() -> Iterator[SteadyDraws]:
    """Combine all: draws are deterministic, nothing is dropped or recomputed, and shuffles reverse the order."""
    with nothing_recomputed(), SteadyDropout(), SteadyDraws(turns=True) as draws:
        yield draws


def sets_seed(module: nn.Module) -> bool:
    """Whether a forward sets a seed itself: torch's, or that of a generator that it makes."""
    return names_in_classes(module, "manual_seed")


def steady_for(module: nn.Module) -> AbstractContextManager[SteadyDraws | None]:
    """Return `steady()`, unless a module sets the seed itself: then its draws are the same in every call anyway."""
    return nothing_recomputed() if sets_seed(module) else steady()
