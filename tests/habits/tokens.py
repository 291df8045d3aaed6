"""What modules do with tokens, under cp: what treats each by itself is right, what mixes them is refused by name."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.habits.harness import Block, Net, Parallelize, Result, batch, cross_entropy, program, sgd, start, trained

OTHERS = {"cp": "a part of a sequence gives other numbers than the whole|with a part of a sequence it raises"}


class Shifts(Block):
    """The token before is added, as RWKV does."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + functional.pad(x[:, :-1], (0, 0, 1, 0)))


class Pools(Block):
    """The mean of all tokens is taken off each."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(dim=1, keepdim=True))


class Counts(Block):
    """Places are counted in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.places(torch.arange(x.shape[1])))


class Attends(Block):
    """Attention by hand, of one head and without a name that tells."""

    def forward(self, x: Tensor) -> Tensor:
        weights = (x @ x.transpose(1, 2)).tril().exp()
        return super().forward(weights @ x / weights.sum(-1, keepdim=True))


class Flips(Block):
    """The tokens in reverse are added: each rank has the counterpart of each of its tokens, unless some are padded."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + x.flip(1))


class Routes(Block):
    """A softmax that is as wide as a rank has tokens, and is no attention."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.router(x).softmax(-1).chunk(2, -1)
        return super().forward(x * first - x.tanh() * second)


class Pairs(Block):
    """Every other token is added twice: right while a rank's pieces are of an even length."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + x[:, ::2].repeat_interleave(2, 1)[:, : x.shape[1]])


class Threes(Block):
    """The same by threes."""

    def forward(self, x: Tensor) -> Tensor:
        padded = functional.pad(x, (0, 0, 0, -x.shape[1] % 3))
        return super().forward(x + padded[:, ::3].repeat_interleave(3, 1)[:, : x.shape[1]])


class Long(Block):
    """Long sequences are centred, and short ones are not."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(dim=1, keepdim=True) if x.shape[1] > 12 else x)


class Centres(Block):
    """The gradient of each token without the mean of all."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = x * 1.0
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient - gradient.mean(dim=1, keepdim=True))  # type: ignore[no-untyped-call]
        return super().forward(hidden)


class MayFlip(Flips):
    """The tokens in reverse are added once a script says so."""

    flips = False

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.flips else Block.forward(self, x)


def with_block(parallelize: Parallelize, block: type[Block]) -> Result:
    return trained(start(parallelize, Net(block=block).double()))


@program(OTHERS, only="cp")
def the_token_before(parallelize: Parallelize) -> Result:
    """On the first token of a part it is another rank's."""
    return with_block(parallelize, Shifts)


@program(OTHERS, only="cp")
def the_mean_of_tokens(parallelize: Parallelize) -> Result:
    """A part has another mean."""
    return with_block(parallelize, Pools)


def _of(num_tokens: int) -> dict[str, Tensor]:
    """A batch of sequences of this length."""
    return {name: torch.cat([each] * 6, dim=1)[:, :num_tokens] for name, each in batch(0).items()}


def _shorter_later(parallelize: Parallelize, block: type[Block], *lengths: int) -> Result:
    engine = parallelize(Net(block=block).double(), loss=cross_entropy, optimizer=sgd, example=_of(8))
    return {f"loss {length}": engine.train_step(_of(length)) for length in lengths}


@program(only="cp")
def tokens_in_reverse(parallelize: Parallelize) -> Result:
    """Each rank has a piece from either end."""
    return _shorter_later(parallelize, Flips, 8)


@program({"cp": "is padded to 8, and with padding .*a part of a sequence gives other numbers"}, only="cp", always=True)
def tokens_in_reverse_and_a_shorter_batch(parallelize: Parallelize) -> Result:
    """Padding is at the end of the last piece, and moves to the front of the first."""
    return _shorter_later(parallelize, Flips, 8, 7)


@program(only="cp")
def a_shorter_batch(parallelize: Parallelize) -> Result:
    """Padding changes nothing if each token is by itself."""
    return _shorter_later(parallelize, Block, 8, 7)


@program({"cp": "12 tokens has pieces of 3, which is no multiple of 2, and then .*other numbers"}, only="cp")
def every_other_token_and_a_longer_batch(parallelize: Parallelize) -> Result:
    """`x[:, ::2]`: of 8 tokens each piece has its own, of 12 it has not."""
    return _shorter_later(parallelize, Pairs, 8, 12)


@program(OTHERS, only="cp")
def tokens_by_threes(parallelize: Parallelize) -> Result:
    """Pieces of 3 tokens show nothing: longer ones are tried too."""
    engine = parallelize(Net(block=Threes).double(), loss=cross_entropy, optimizer=sgd, example=_of(16))
    return {"loss": engine.train_step(_of(16))}


@program(OTHERS, only="cp")
def long_sequences_do_something_else(parallelize: Parallelize) -> Result:
    """`if x.shape[1] > 12:`, and trials begin with 12 tokens."""
    engine = parallelize(Net(block=Long).double(), loss=cross_entropy, optimizer=sgd, example=_of(16))
    return {"loss": engine.train_step(_of(16))}


@program({"cp": "the gradient of .*a part of a sequence gives other numbers"}, only="cp")
def gradients_of_tokens_are_centred(parallelize: Parallelize) -> Result:
    """A hook mixes tokens in the backward alone."""
    return with_block(parallelize, Centres)


@program({"cp": "is padded to 8, and with padding .*a part of a sequence gives other numbers"}, only="cp")
def tokens_in_reverse_from_the_second_step_on(parallelize: Parallelize) -> Result:
    """A value that a script sets, with which only padded sequences go wrong."""
    model = Net(block=MayFlip).double()
    engine = parallelize(model, loss=cross_entropy, optimizer=sgd, example=_of(8))
    engine.train_step(_of(8))
    for each in model.layers:
        vars(each)["flips"] = True
    return {f"loss {length}": engine.train_step(_of(length)) for length in (8, 7)}


@program(OTHERS, only="cp")
def places_counted_in_the_forward(parallelize: Parallelize) -> Result:
    """Every rank would count from 0."""
    return with_block(parallelize, Counts)


@program(OTHERS, only="cp")
def attention_without_a_softmax(parallelize: Parallelize) -> Result:
    """Nothing in it looks like attention."""
    return with_block(parallelize, Attends)


@program(only="cp")
def a_router_as_wide_as_a_part(parallelize: Parallelize) -> Result:
    """Looks like attention, and each token is treated by itself."""
    return with_block(parallelize, Routes)


def hardest(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
    losses = functional.cross_entropy(output.flatten(0, 1), given["labels"].flatten(), reduction="none")
    return losses.topk(losses.numel() // 2).values.mean()


@program({"cp": "a part of a sequence gives other numbers than the whole"}, only="cp")
def the_hardest_half_of_tokens(parallelize: Parallelize) -> Result:
    """OHEM: of the hardest tokens of these sequences each rank has half, by chance."""
    ids = torch.randint(12, (4, 9), generator=torch.Generator().manual_seed(0))
    given = {"x": ids[:, :-1], "labels": ids[:, 1:]}
    engine = parallelize(Net().double(), loss=hardest, optimizer=sgd, example=given)
    return {"loss": engine.train_step(given)}


def longer(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(12, (4, 9), generator=generator)
    mask = torch.rand(4, 8, generator=generator, dtype=torch.float64)
    return {"x": ids[:, :-1], "labels": ids[:, 1:], "mask": (mask < 0.7).double()}


def each(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
    return functional.cross_entropy(output.transpose(1, 2), given["labels"], reduction="none")


def with_loss(parallelize: Parallelize, loss: Callable[..., Any], model: nn.Module | None = None) -> Result:
    """Nothing but its own loss is told of the batch."""
    how: dict[str, Any] = {"positions": None, "entries": {"x": 1, "mask": 1}}
    engine = parallelize(model or Net().double(), loss=loss, optimizer=sgd, example=longer(0), **how)
    found = {f"loss {step}": engine.train_step(longer(step)) for step in range(3)}
    return {**found, **engine.state_dict()}


@program(only="cp", as_it_is=True, whole=True)
def a_mean_over_labels(parallelize: Parallelize) -> Result:
    """`cross_entropy`, whose labels are counted."""
    return with_loss(parallelize, cross_entropy)


@program({"cp": r"losses.sum\(\), losses.numel\(\)"}, only="cp", as_it_is=True, whole=True)
def a_mean_of_each_tokens_loss(parallelize: Parallelize) -> Result:
    """`losses.mean()`: refused with the pair to write."""
    return with_loss(parallelize, lambda output, given: each(output, given).mean())


@program(only="cp", as_it_is=True, whole=True)
def a_sum_of_each_tokens_loss(parallelize: Parallelize) -> Result:
    """What the refusal says."""

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> tuple[Tensor, int]:
        losses = each(output, given)
        return losses.sum(), losses.numel()

    return with_loss(parallelize, loss)


@program({"cp": r"total, batch\['mask'\].sum\(\)"}, only="cp", as_it_is=True, whole=True)
def a_mean_by_a_mask(parallelize: Parallelize) -> Result:
    """Refused with the pair to write."""
    return with_loss(
        parallelize, lambda output, given: (each(output, given) * given["mask"]).sum() / given["mask"].sum()
    )


@program(only="cp", as_it_is=True, whole=True)
def a_sum_by_a_mask(parallelize: Parallelize) -> Result:
    """What the refusal says."""
    return with_loss(
        parallelize, lambda output, given: ((each(output, given) * given["mask"]).sum(), given["mask"].sum())
    )


@program({"cp": r"if no label is ignored, return loss \* number"}, only="cp", as_it_is=True, whole=True)
def a_mean_over_labels_and_a_penalty(parallelize: Parallelize) -> Result:
    """Refused with the pair to write."""
    return with_loss(
        parallelize, lambda output, given: cross_entropy(output, given) + 0.1 * output.logsumexp(-1).square().mean()
    )


@program(only="cp", as_it_is=True, whole=True)
def sums_over_labels_and_a_penalty(parallelize: Parallelize) -> Result:
    """What the refusal says."""

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> tuple[Tensor, int]:
        number = given["labels"].numel()
        return (cross_entropy(output, given) + 0.1 * output.logsumexp(-1).square().mean()) * number, number

    return with_loss(parallelize, loss)


@program({"cp": "the loss reads other tokens than its own"}, only="cp", as_it_is=True, whole=True)
def labels_shifted_in_the_loss(parallelize: Parallelize) -> Result:
    """`logits[:, :-1]` and `labels[:, 1:]`."""

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        return functional.cross_entropy(output[:, :-1].flatten(0, 1), given["labels"][:, 1:].flatten())

    return with_loss(parallelize, loss)
