"""Run a copy of a module on whole sequences, or on a part of them, and keep what a trial compares (`trial.py`)."""

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwise.sharding.stand_in import tensors_in
from shardwise.stages.gradient_products import Products, products_of
from shardwise.stages.rows import changed
from shardwise.stages.split.arguments import Signature
from shardwise.stages.split.loss_copy import loss_of_copy
from shardwise.stages.split.python_state import left_as_it_was
from shardwise.stages.stage import Batch, Loss
from shardwise.stages.steady_draws import SteadyDraws, SteadyDropout, sets_seed


class Losses(NamedTuple):
    """A loss that is tried on copies of a module, which it may read by itself."""

    loss: Loss
    original: nn.Module


@dataclass(kw_only=True)
class SequenceCourse:
    """The results of a forward: the output of each module in order of completion, the output, and the loss."""

    module: nn.Module

    made: list[tuple[str, Tensor]] = field(default_factory=list)
    output: list[Tensor] = field(default_factory=list)
    #: The loss as a sum and its count; or the exception that the loss raised.
    loss: tuple[float, float] | None = None
    #: The sum with its graph, if it has one.
    total: Tensor | None = None
    #: The loss with some outputs scaled up, as a sum and its count.
    moved: tuple[float, float] | None = None
    raised: Exception | None = None
    #: Integer buffers, which may count tokens.
    counted: dict[str, Tensor] = field(default_factory=dict)

    @cached_property
    def gradients(self) -> Products | None:
        """Return products of the gradients of the loss; None if there are none."""
        try:
            return None if self.total is None else products_of(self.total, self.module)
        except Exception:  # Training will report what is wrong.
            return None


def run_course(
    module: nn.Module, batch: Batch, losses: Losses | None, *, larger: Tensor | None = None
) -> SequenceCourse:
    """Run a module on whole sequences or parts. With factors for its tokens, `larger`, there is a graph too."""
    course = SequenceCourse(module=module)
    loss = None if losses is None else loss_of_copy(losses.loss, losses.original, module)
    args, kwargs = Signature(module).arguments(batch)
    draws = SteadyDraws(has_seed=sets_seed(module))
    with torch.set_grad_enabled(larger is not None), _noting(module, course.made), SteadyDropout(), draws:
        output = module(*args, **kwargs)
        course.counted = {name: each.clone() for name, each in module.named_buffers() if _may_count(name, each)}
        course.output = [_whole(each).detach().clone() for each in tensors_in(output)]
        if loss is not None:
            try:
                with left_as_it_was(loss):
                    total, count = loss(output, copy(batch))
                course.loss = _number(total), _number(count)
                course.total = total if isinstance(total, Tensor) and total.requires_grad else None
            except Exception as error:  # Perhaps on this rank only: the others wait for it, so go on.
                course.raised = error
            if larger is not None and course.raised is None:
                course.moved = _moved_loss(output, batch, loss, larger)
    return course


@torch.no_grad()
def _moved_loss(output: Any, batch: Batch, loss: Loss, larger: Tensor) -> tuple[float, float] | None:
    """Return the loss of an output with scaled tokens; None if it has no tokens, or is not finite."""
    has_tokens = False

    def asked(_: Any, each: Any) -> Any:
        nonlocal has_tokens
        if type(each) is not Tensor or not each.is_floating_point() or each.dim() < 2 or each.shape[1] > len(larger):
            return None
        has_tokens = True
        return each * larger[: each.shape[1]].to(each).view(-1, *[1] * (each.dim() - 2))

    moved = changed({"": output}, asked)[""]
    try:
        with left_as_it_was(loss):
            total, count = loss(moved, copy(batch)) if has_tokens else (math.nan, 1)
    except Exception:
        return None
    return (_number(total), _number(count)) if math.isfinite(_number(total)) else None


def _number(value: Any) -> float:
    return float(value.detach() if isinstance(value, Tensor) else value)


def _may_count(name: str, buffer: Tensor) -> bool:
    """Whether a buffer may count tokens. The `load` of our routers does not matter: it is summed over ranks."""
    return not buffer.is_floating_point() and not buffer.is_complex() and name.rpartition(".")[2] != "load"


def _whole(each: Tensor) -> Tensor:
    """Gather logits that are sharded over tp."""
    gather = getattr(each, "whole", None)
    return each if gather is None else gather()


@contextmanager
def _noting(module: nn.Module, made: list[tuple[str, Tensor]]) -> Iterator[None]:
    def note(name: str, returned: Any) -> None:
        if type(returned) is Tensor:
            made.append((name, returned.detach().clone()))

    with ExitStack() as hooks:
        for name, each in module.named_modules():
            handle = each.register_forward_hook(lambda _, __, returned, name=name: note(name, returned))
            hooks.callback(handle.remove)
        yield
