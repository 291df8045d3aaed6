"""Buffers that a forward writes: counters, running means, codebooks; embeddings that it shortens."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.habits.harness import Net, Parallelize, Result, batch, program, small_net, start, trained

DIFFERENT = dict.fromkeys(("dp", "cp"), "the forward writes to the buffer .*, and 2 replicas have 2 different ones")
#: Sequences of these programs have three tokens. A fourth would be counted.
ADDED = {"cp": "a sequence of 3 tokens does not divide into 4 pieces"}


class Block(nn.Module):
    """A layer with a buffer that `write` makes anew from what comes in; in training it is read if it `reads`."""

    seen: Tensor
    count: Tensor

    def __init__(self, write: Callable[[Any, Tensor], None], *, reads: bool = True) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(8, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.write, self.reads = write, reads

    def forward(self, x: Tensor) -> Tensor:
        factor = 1 + 0.1 * self.seen if self.reads or not self.training else 1
        made = x + torch.tanh(self.up(x)) * factor
        if self.training:
            self.write(self, x.detach())
        return made


def net(write: Callable[[Any, Tensor], None], *, reads: bool = True) -> Net:
    return Net(block=partial(Block, write, reads=reads)).double()


def count_up(block: Any, _: Tensor) -> None:
    block.count += 1


def average(block: Any, x: Tensor) -> None:
    block.seen.mul_(0.9).add_(0.1 * x.mean((0, 1)))


def average_anew(block: Any, x: Tensor) -> None:
    block.seen = 0.9 * block.seen + 0.1 * x.mean((0, 1))


def largest(block: Any, x: Tensor) -> None:
    torch.maximum(block.seen, x.abs().amax((0, 1)), out=block.seen)


def decay(block: Any, _: Tensor) -> None:
    block.seen = 0.5 * block.seen + 1.0


@program()
def a_counter(parallelize: Parallelize) -> Result:
    """Counts microbatches: the same on all replicas, and from the stage that has it."""
    return trained(start(parallelize, net(count_up)))


@program()
def a_schedule_in_a_buffer(parallelize: Parallelize) -> Result:
    """Anew in each forward, and the same whatever the batch."""
    return trained(start(parallelize, net(decay)))


@program(DIFFERENT)
def a_running_mean(parallelize: Parallelize) -> Result:
    """Each replica has seen its own rows."""
    return trained(start(parallelize, net(average)))


@program(ADDED)
def a_running_mean_over_replicas(parallelize: Parallelize) -> Result:
    """And what the sentence says to do about it is what one device has, for evaluation."""
    engine = start(parallelize, net(average, reads=False), buffers="mean")
    return {**trained(engine), "held out": engine.evaluate(batch(8))}


@program(ADDED)
def a_running_mean_put_in_its_place(parallelize: Parallelize) -> Result:
    """`self.seen = ...` instead of writing into it."""
    engine = start(parallelize, net(average_anew, reads=False), buffers="mean")
    return {**trained(engine), "held out": engine.evaluate(batch(8))}


@program(DIFFERENT)
def a_largest_value(parallelize: Parallelize) -> Result:
    """As quantisation observers keep it."""
    return trained(start(parallelize, net(largest)))


def enqueue(block: Any, x: Tensor) -> None:
    block.seen = torch.cat([x[:, 0, :2].flatten(), block.seen])[:8]


@program(DIFFERENT, but="cp")
def a_queue_of_rows_and_a_mean_over_replicas(parallelize: Parallelize) -> Result:
    """MoCo's queue with `buffers="mean"`: the mean of two queues has the keys of no row."""
    return trained(start(parallelize, net(enqueue), buffers="mean"))


@program({"all": "buffers='sum' is no way"})
def no_way_to_agree(parallelize: Parallelize) -> Result:
    """A word that means nothing."""
    return trained(start(parallelize, net(average), buffers="sum"))


class Quantised(nn.Module):
    """A codebook that moves to what is near it, without gradients."""

    codes: Tensor
    uses: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.register_buffer("codes", torch.linspace(-1, 1, 32, dtype=torch.float64).view(4, 8))
        self.register_buffer("uses", torch.zeros(4, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        nearest = torch.cdist(hidden.detach(), self.codes.expand(len(x), 4, 8)).argmin(-1)
        if self.training:
            self.uses += (nearest[..., None] == torch.arange(4, device=x.device)).sum((0, 1))
            self.codes = self.codes.lerp(hidden.detach().mean((0, 1)).expand(4, 8), 0.1)
        made: Tensor = x + hidden + (self.codes[nearest] - hidden).detach()
        return made


@program(
    {
        "dp": f"{DIFFERENT['dp']}|counts the rows", "microbatches": "neither their mean by rows nor their sum",
        "cp": "a part of a sequence gives other numbers than the whole",
    }
)  # fmt: skip
def a_codebook(parallelize: Parallelize) -> Result:
    """VQ-VAE, whose codes move towards a batch before its rows read them."""
    return trained(start(parallelize, small_net(block=Quantised)))


@program({"cp": "is a BatchNorm1d, which mixes the tokens"})
def batch_norm(parallelize: Parallelize) -> Result:
    """In evaluation with statistics that were loaded: nothing is written."""
    from tests.habits.looking import Normed

    model = small_net(block=Normed)
    model.train()
    for each in model.modules():
        if isinstance(each, nn.BatchNorm1d):
            each.momentum = 0.0
            each.eval()
    engine = start(parallelize, model)
    return {**trained(engine), "held out": engine.evaluate(batch(8))}


class Counting(Net):
    """The count is the root's own: no unit has it."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
        return super().forward(x)


@program({"pp": "writes to the buffer steps, and no unit has it"})
def a_counter_of_the_root(parallelize: Parallelize) -> Result:
    """Each stage would count for itself."""
    return trained(start(parallelize, Counting().double()))


@program(dict.fromkeys(("dp", "tp", "cp"), "has max_norm=0.5, so that forwards write"))
def an_embedding_with_a_largest_norm(parallelize: Parallelize) -> Result:
    """A forward shortens the rows that it looks up."""
    model = small_net()
    model.embed.max_norm = 0.5
    return trained(start(parallelize, model))


@program({"all": "embed is an Embedding with sparse=True"})
def a_sparse_embedding(parallelize: Parallelize) -> Result:
    """Its gradients are summed as dense ones."""
    model = small_net()
    model.embed.sparse = True
    return trained(start(parallelize, model))


@program()
def a_buffer_written_between_steps(parallelize: Parallelize) -> Result:
    """By the user, on all ranks alike: a temperature that falls."""
    engine = start(parallelize, net(lambda *_: None))

    def between(step: int) -> None:
        for name, each in engine.module.named_buffers():
            if not _is_ours(engine) or name in engine.buffers:
                each.fill_(step)

    return trained(engine, between=between)


def _is_ours(engine: Any) -> bool:
    return hasattr(engine, "buffers")


@program({"pp": "it is on another stage of the pipeline"})
def a_buffer_looked_at(parallelize: Parallelize) -> Result:
    """Of a layer that another stage has, it would be an old one."""
    engine = start(parallelize, net(count_up))

    def between(step: int) -> dict[str, Any]:
        return {f"{name} {step}": each.double().sum() for name, each in engine.module.named_buffers()}

    return trained(engine, between=between)


@program(DIFFERENT)
def a_mean_that_only_evaluation_writes(parallelize: Parallelize) -> Result:
    """What replicas write while they evaluate is compared too."""

    class Watching(nn.Module):
        seen: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(8, 8)
            self.register_buffer("seen", torch.zeros(8, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            self.seen = 0.5 * self.seen + x.detach().mean((0, 1))
            hidden: Tensor = self.up(x)
            return x + hidden

    engine = start(parallelize, small_net(block=Watching))
    found = {"held out": engine.evaluate(batch(5))}
    return {**found, **trained(engine)}


def late(block: Any, x: Tensor) -> None:
    if block.count > 2:
        average(block, x)
    block.count += 1


@program(dict.fromkeys(("dp", "cp"), "writes to the buffer layers.[01].seen, and did not when the example was run"))
def a_mean_that_begins_later(parallelize: Parallelize) -> Result:
    """After a few steps of warm-up: the example has not shown it."""
    return trained(start(parallelize, net(late, reads=False)), steps=5)


@program(ADDED)
def a_mean_that_begins_later_and_what_was_said(parallelize: Parallelize) -> Result:
    """And replicas agree from the step on that writes it."""
    return trained(start(parallelize, net(late, reads=False), buffers="mean"), steps=5)


@program()
def a_buffer_put_in_place_of_another(parallelize: Parallelize) -> Result:
    """Between steps, by the user, on all ranks alike."""
    engine = start(parallelize, net(count_up))

    def between(step: int) -> None:
        for name, module in engine.module.named_modules():
            if isinstance(module, Block) and (not _is_ours(engine) or f"{name}.seen" in engine.buffers):
                module.seen = torch.full((8,), float(step), dtype=torch.float64)

    return trained(engine, between=between)


class Registering(Block):
    """Its buffer comes with the first forward."""

    def __init__(self, seen: Callable[[Tensor], Tensor]) -> None:
        super().__init__(lambda *_: None)
        del self.seen
        self.look = seen

    def forward(self, x: Tensor) -> Tensor:
        if "seen" not in dict(self.named_buffers()):
            self.register_buffer("seen", torch.zeros((), dtype=torch.float64), persistent=False)
        made = super().forward(x * (1 + 0.1 * self.seen.clone()))
        if self.training:
            self.seen += self.look(x.detach())
        return made


@program(always=True)
def a_counter_that_the_first_forward_registers(parallelize: Parallelize) -> Result:
    """`if not hasattr(self, "seen"): self.register_buffer(...)`: a second forward must not count it again."""
    ones = torch.ones((), dtype=torch.float64)
    return trained(start(parallelize, small_net(block=partial(Registering, lambda _: ones))))


@program(DIFFERENT)
def a_mean_that_the_first_forward_registers(parallelize: Parallelize) -> Result:
    """The same of the rows that it sees."""
    return trained(start(parallelize, small_net(block=partial(Registering, lambda x: x.mean()))))


class Pooled(Net):
    """Its batch norm has one value of a channel for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.pooled_norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        pooled: Tensor = self.head(self.norm(self.pooled_norm(self.embed(x).mean(1))))
        return pooled[:, None].expand(-1, x.shape[1], -1)


LONE = r"pooled_norm \(BatchNorm1d\) has one value for each channel: with "


@program({"dp": f"{LONE}dp=2 ", "microbatches": f"{LONE}(dp=2 and )?microbatches=2 "}, but="cp")
def a_last_batch_with_a_row_for_each_part(parallelize: Parallelize) -> Result:
    """A batch norm has nothing to compare one row with: the keys of the plan that leave it one are named."""
    engine = start(parallelize, Pooled().double())
    return {"first": engine.train_step(batch(0))} | {"last": engine.train_step(batch(1, rows=2))}
