"""Losses that choose rows: the hardest, those above a threshold, those of a task; and `module.zero_grad()`."""
# Programs as users write them.
# mypy: disable-error-code="no-any-return,no-untyped-call"

from collections.abc import Mapping
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.habits.harness import Parallelize, Result, batch, program, sgd, small_net, start, trained

PARTS = dict.fromkeys(("dp", "microbatches"), "do not tell its loss")
NORM = dict.fromkeys(("dp", "pp", "tp", "cp"), "is a SyncBatchNorm")


def by_row(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
    return functional.cross_entropy(output.transpose(1, 2), given["labels"], reduction="none").mean(1)


@program(PARTS, but="cp")
def the_two_hardest_rows(parallelize: Parallelize) -> Result:
    """Of one row there are no two: it is tried on four."""
    return trained(
        parallelize(small_net(), loss=lambda o, b: by_row(o, b).topk(2).values.mean(), optimizer=sgd, example=batch(0))
    )


@program(PARTS, but="cp")
def rows_above_a_threshold(parallelize: Parallelize) -> Result:
    """All are above it on an untrained module, and not when its outputs are moved apart."""

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        each = by_row(output, given)
        return each[each > 2.55].mean()

    return trained(parallelize(small_net(), loss=loss, optimizer=sgd, example=batch(0)))


@program(PARTS, but="cp")
def the_first_half_against_the_second(parallelize: Parallelize) -> Result:
    """Chosen and rejected answers in one batch, as in DPO."""

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        chosen, rejected = by_row(output, given).chunk(2)
        return -functional.logsigmoid(rejected - chosen).mean()

    return trained(parallelize(small_net(), loss=loss, optimizer=sgd, example=batch(0)))


@program()
def zeroed_by_the_module(parallelize: Parallelize) -> Result:
    """`model.zero_grad()` between steps, out of habit; also where a script has a default device."""
    model = small_net()

    def between(step: int) -> None:
        with torch.device("cpu") if step else nullcontext():
            model.zero_grad(set_to_none=step == 1)

    return trained(start(parallelize, model), between=between)


@program(NORM)
def norms_that_talk_themselves(parallelize: Parallelize) -> Result:
    """`SyncBatchNorm` adds up over all ranks, whatever they have."""
    model = small_net()
    model.layers.append(nn.SyncBatchNorm(3).double())
    torch.manual_seed(0)
    return trained(start(parallelize, model))
