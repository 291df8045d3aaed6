"""Engines of several axes, for tests of what they do beside training."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim import AdamW

from shardwise.engine.parallelize import parallelize
from shardwise.errors import ShardwiseError
from shardwise.stages.stage import Batch
from tests.same import Trained, train
from tests.stages.families import make_family
from tests.stages.pieces import Net

IGNORED = -100
ROWS, LENGTH = 8, 8


def make_batch(seed: int) -> dict[str, Tensor]:
    """Tokens of which more and more labels are ignored from row to row, so that replicas have different numbers."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 64, (ROWS, LENGTH + 1), generator=generator)
    labels = ids[:, 1:].clone()
    for row in range(ROWS):
        labels[row, : row // 2] = IGNORED
    return {"input_ids": ids[:, :-1].contiguous(), "labels": labels}


def token_loss(output: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    labels = batch["labels"].flatten()
    total = cross_entropy(output.logits.flatten(0, 1), labels, ignore_index=IGNORED, reduction="sum")
    return total, (labels != IGNORED).sum()


def make_optimizer(parameters: Any) -> AdamW:
    return AdamW(parameters, lr=1e-3, eps=1e-4, weight_decay=0.1)


def disagree(plans: tuple[str, str]) -> str:
    """What a rank says that has another plan than the other."""
    try:
        parallelize(
            make_family("llama"),
            plans[dist.get_rank()],
            loss=token_loss,
            optimizer=make_optimizer,
            example=make_batch(0),
        )
    except ShardwiseError as error:
        return error.problem
    return "nothing"


def compiled(plan: str) -> str:
    """What is said of a plan that cannot be compiled."""
    try:
        parallelize(
            make_family("llama"),
            plan,
            loss=token_loss,
            optimizer=make_optimizer,
            example=make_batch(0),
            compile="aot_eager",
        )
    except ShardwiseError as error:
        return error.problem
    return "nothing"


def train_under_cp(kind: str) -> list[float]:
    """Losses of two steps: of a sum and its number, of the mean, or of the sum alone. The module takes no `targets`."""

    def given(seed: int) -> dict[str, Tensor]:
        batch = make_batch(seed)
        return {"input_ids": batch["input_ids"], "targets": batch["labels"]}

    def loss(output: Any, batch: Batch) -> Any:
        total, number = token_loss(output, {"labels": batch["targets"]})
        if kind == "mean":
            return cross_entropy(output.logits.flatten(0, 1), batch["targets"].flatten())
        return total / 64 if kind == "sum" else (total, number)

    with parallelize(
        make_family("llama"), "cp=2", loss=loss, optimizer=make_optimizer, example=given(0), entries={"targets": 1},
        verify=True,
    ) as engine:  # fmt: skip
        return [engine.train_step(given(step)) for step in range(2)]


def mean_under_cp() -> str:
    """What is said of a loss that is a mean over something else than labels."""
    try:
        parallelize(
            make_family("llama"),
            "cp=2",
            loss=lambda output, _: output.logits.square().mean(),
            optimizer=make_optimizer,
            example=make_batch(0),
        )
    except ShardwiseError as error:
        return error.problem
    return "nothing"


def train_net(plan: str, compile: str | bool = False) -> Trained:
    """A few steps under a plan, by blocks as they are or compiled. The net is small, so that compiling it is quick."""
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    ids = torch.randint(0, 11, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    batch = {"ids": ids[:, :-1], "labels": ids[:, 1:]}
    engine = parallelize(
        Net(num_blocks=4), plan, loss=_net_loss, optimizer=make_optimizer, example=batch, compile=compile
    )
    with engine:
        return train(engine, [batch] * 3)


def _net_loss(output: Tensor, batch: Batch) -> tuple[Tensor, int]:
    return cross_entropy(output.flatten(0, 1), batch["labels"].flatten(), reduction="sum"), batch["labels"].numel()


class Looked(NamedTuple):
    """A batch's loss, the same after training was undone by loading, how many events a trace has, and a refusal."""

    loss: float
    again: float
    num_events: int
    refusal: str


def look_and_load(plan: str, model: str) -> Looked:
    """Evaluate, save, train with a trace, load, evaluate again; and load what cannot be."""
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    engine = parallelize(
        make_family(model), plan, loss=token_loss, optimizer=make_optimizer, example=make_batch(0), verify=False
    )
    with engine:
        loss, state = engine.evaluate(make_batch(0)), engine.state_dict()
        engine.train_step(make_batch(0), trace=True)
        num_events = 0 if engine.trace is None else len(engine.trace.events)
        engine.load_state_dict(state)
        again = engine.evaluate(make_batch(0))
        try:
            engine.load_state_dict({name: each[:1] for name, each in state.items()})
        except ShardwiseError as error:
            return Looked(loss, again, num_events, error.problem)
        return Looked(loss, again, num_events, "nothing")
