"""Engines that were not closed: dropped, left by an error, or refused, they leave neither weights nor groups behind."""

import gc
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _world
from torch.nn.functional import mse_loss
from torch.optim import AdamW, Optimizer

import shardwise as sw
from shardwise.engine.engine import Engine
from tests.crowd import Crowd

_BATCH = {"x": torch.linspace(-1, 1, 64).view(8, 8), "y": torch.linspace(1, 0, 64).view(8, 8)}


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)  # type: ignore[no-any-return]


def _loss(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return mse_loss(output, batch["y"])


def _made(plan: str, leave_out: int = 0) -> Engine:
    def adamw(parameters: Iterable[nn.Parameter]) -> Optimizer:
        return AdamW(list(parameters)[leave_out:], lr=0.1)

    return sw.parallelize(_Net(), plan, loss=_loss, optimizer=adamw, example=_BATCH)


def _are_kept(plan: str) -> list[str]:
    """Drop an engine after a step, and return the parameters that are still in memory."""
    engine = _made(plan)
    engine.train_step(_BATCH)
    known = {name: weakref.ref(each) for name, each in engine.module.named_parameters()}
    del engine
    gc.collect()
    return [name for name, each in known.items() if each() is not None]


@pytest.mark.parametrize("plan", ["microbatches=2", "microbatches=2,offload.optimizer=1"])
def test_a_dropped_engine_takes_its_weights_with_it(plan: str) -> None:
    assert _are_kept(plan) == []


@pytest.mark.parametrize("plan", ["dp=2,zero=1", "dp=2,zero=3", "tp=2", "pp=2,microbatches=2"])
def test_so_it_does_on_ranks(two: Crowd, plan: str) -> None:
    assert two.run(_are_kept, plan) == [[], []]


def _raise_in(plan: str) -> None:
    with pytest.raises(ZeroDivisionError), _made(plan):
        raise ZeroDivisionError


def _drop(plan: str) -> None:
    _made(plan).train_step(_BATCH)


def _be_refused(plan: str) -> None:
    with pytest.raises(sw.ShardwiseError, match="in no group"):
        _made(plan, leave_out=1)


def _groups_after(leave: Callable[[str], None], plan: str) -> tuple[int, int, int]:
    """Return how many process groups there are with one engine, with another that came after it, and at the end."""
    with _made(plan):
        usual = len(_world.pg_map)
    leave(plan)
    with _made(plan):
        then = len(_world.pg_map)
    return usual, then, len(_world.pg_map)


@pytest.mark.parametrize("leave", [_raise_in, _drop, _be_refused])
def test_groups_of_an_engine_that_was_not_closed_end_before_the_next(two: Crowd, leave: Any) -> None:
    for usual, then, after in two.run(_groups_after, leave, "dp=2"):
        assert then == usual > after


def _two_at_once(plan: str) -> list[float]:
    """Two engines of a script are both in use: neither is closed for the other."""
    first, second = _made(plan), _made(plan)
    losses = [each.train_step(_BATCH) for _ in range(2) for each in (first, second)]
    second.close()
    first.close()
    return losses


def test_an_engine_in_use_is_not_closed_for_another(two: Crowd) -> None:
    for losses in two.run(_two_at_once, "dp=2"):
        assert losses[0] == losses[1] > losses[2] == losses[3]
