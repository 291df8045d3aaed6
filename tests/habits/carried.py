"""What one forward carries to the next, one block to another beside its output, and a checkpoint around several."""
# Programs as users write them, attributes and all.
# mypy: disable-error-code="assignment,no-any-return,union-attr,arg-type,no-untyped-call,override,misc"

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.habits.crossing import LEFT, Four, end, tokens
from tests.habits.harness import Block, Parallelize, Result, cross_entropy, program, sgd

#: A recurrent layer, and a layer that counts places, is refused under cp.
MIXES = {"cp": "mixes the tokens of a sequence|a part of a sequence gives other numbers"}


def learn(parallelize: Parallelize, model: nn.Module, loss: Any = cross_entropy, **options: Any) -> Result:
    """Three steps: their losses, and the weights after them."""
    engine = parallelize(model.double(), loss=loss, optimizer=sgd, example=tokens(0), **options)
    losses = {f"loss {step}": engine.train_step(tokens(step)) for step in range(3)}
    return losses | {name: each for name, each in engine.state_dict().items() if isinstance(each, Tensor)}


def in_order(net: Any, hidden: Tensor) -> Tensor:
    for layer in net.layers:
        hidden = layer(hidden)
    return hidden


# From one forward to the next.


class Recurrent(nn.Module):
    """A GRU that goes on from where the last batch has ended; in the root's own forward, or in a layer of it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.recurrent = nn.GRU(8, 8, batch_first=True)
        self.block, self.head = Block(), nn.Linear(8, 12)
        self.state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        hidden, state = self.recurrent(self.embed(x), self.state)
        self.state = state.detach()
        return self.head(self.block(hidden))


class GoesOn(nn.Module):
    """The same in a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.GRU(8, 8, batch_first=True)
        self.state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        made, state = self.inner(x, self.state)
        self.state = state.detach()
        return made


class InABuffer(Recurrent):
    """The same in a buffer that is None before the first forward."""

    def __init__(self) -> None:
        super().__init__()
        del self.state
        self.register_buffer("state", None)


_OF_NO_UNIT = "each of 2 stages would have another|other stages do not have that"
#: Rows of a microbatch would go on from those of another.
BY_ROW = {
    "microbatches": "as many entries as it has rows|other stages do not have that",
    "dp": "each replica would have its own|as many entries as it has rows",
    **MIXES,
}


@program(BY_ROW)
def a_recurrent_state_of_the_root(parallelize: Parallelize) -> Result:
    """Truncated backpropagation through time, with `h.detach()` in an attribute."""
    return learn(parallelize, Recurrent())


@program({**BY_ROW, "sp": "each replica would have its own"})
def a_recurrent_state_of_a_layer(parallelize: Parallelize) -> Result:
    """The layer has its state itself."""
    return learn(parallelize, Four(first=GoesOn))


@program({"dp": "replicas have 2 different ones", **dict.fromkeys(("pp", "place"), _OF_NO_UNIT), **MIXES})
def a_recurrent_state_in_a_buffer(parallelize: Parallelize) -> Result:
    """The run of the example leaves no state there."""
    return learn(parallelize, InABuffer())


@program({**dict.fromkeys(("dp", "cp", "sp"), "each replica would have its own"), **LEFT})
def memories_of_each_layer(parallelize: Parallelize) -> Result:
    """Transformer-XL: a list of what came into each layer, for the next batch."""

    def run(net: Any, x: Tensor) -> Tensor:
        hidden, found = net.embed(x), []
        for number, layer in enumerate(net.layers):
            found.append(hidden.detach())
            before = net.memories[number].mean(1, keepdim=True) if net.memories else 0
            hidden = layer(hidden + 0.2 * before)
        net.memories = found
        return end(net, hidden)

    model = Four(run)
    model.memories = None
    return learn(parallelize, model)


# Recurrent layers, recomputed in part.


@program(MIXES)
def recurrent_layers_one_after_the_other(parallelize: Parallelize) -> Result:
    """Torch writes gates over the products that they are made of."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.LSTM(8, 8, batch_first=True)
            self.cell = nn.GRUCell(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            made, _ = self.inner(x)
            return x + self.cell(made.flatten(0, 1), x.flatten(0, 1)).view_as(x)

    model = Four(first=Layer, last=Layer)
    return learn(parallelize, model)


# Beside the output.


@program()
def hooks_on_hidden_states(parallelize: Parallelize) -> Result:
    """The gradient of each is halved, once, on its way between stages too."""

    def run(net: Any, x: Tensor) -> Tensor:
        hidden = net.embed(x)
        for layer in net.layers:
            hidden = layer(hidden)
            if hidden.requires_grad:
                hidden.register_hook(lambda gradient: gradient * 0.5)
        return end(net, hidden)

    return learn(parallelize, Four(run))


@program()
def hooks_on_what_forward_hooks_are_given(parallelize: Parallelize) -> Result:
    """Stages that have not run the block call its forward hooks too."""

    def halves(_: nn.Module, __: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient * 0.5)

    model = Four()
    for layer in model.layers:
        layer.register_forward_hook(halves)
    return learn(parallelize, model)


@program()
def hooks_on_what_comes_in(parallelize: Parallelize) -> Result:
    """A layer that is recomputed registers them again."""

    class Halves(Block):
        def forward(self, x: Tensor) -> Tensor:
            if x.requires_grad:
                x.register_hook(lambda gradient: gradient * 0.5)
            return super().forward(x)

    return learn(parallelize, Four(first=Halves, last=Halves))


class Reads(Block):
    """Reads what the root has put into an attribute of its own."""

    owner: tuple[Any, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.002)  # Long enough for a thread of another stage to begin the next microbatch.
        return super().forward(x) * self.owner[0].scale


@program(MIXES)
def a_scale_of_each_row_in_an_attribute(parallelize: Parallelize) -> Result:
    """Of the rows that are computed now, whatever another thread computes."""

    def run(net: Any, x: Tensor) -> Tensor:
        net.scale = 1 + 0.1 * x[:, :1, None].double()
        return end(net, in_order(net, net.embed(x)))

    model = Four(run, first=Reads, last=Reads)
    model.layers[0].owner = model.layers[3].owner = (model,)
    return learn(parallelize, model)


@program(MIXES)
def an_attribute_that_is_put_back(parallelize: Parallelize) -> Result:
    """Nothing is left of it after the forward."""

    def run(net: Any, x: Tensor) -> Tensor:
        net.scale = 1 + 0.1 * x[:, :1, None].double()
        try:
            return end(net, in_order(net, net.embed(x)))
        finally:
            net.scale = None

    model = Four(run, first=Reads, last=Reads)
    model.scale = None
    model.layers[0].owner = model.layers[3].owner = (model,)
    return learn(parallelize, model)


@dataclass
class State:
    hidden: Tensor
    penalty: Tensor
    depth: int = 0


@program()
def a_dataclass_between_blocks(parallelize: Parallelize) -> Result:
    """Of the user's own, that nobody has told torch about."""

    class Deepens(Block):
        def forward(self, state: Any) -> Any:
            made = super().forward(state.hidden)
            return State(made, state.penalty + 0.01 * made.square(), state.depth + 1)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(12, 8), nn.Linear(8, 12)
            self.layers = nn.ModuleList([Deepens() for _ in range(4)])

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.embed(x)
            state = State(hidden, torch.zeros_like(hidden))
            for layer in self.layers:
                state = layer(state)
            return self.head(state.hidden - state.penalty * state.depth)

    return learn(parallelize, Net())


# Checkpoints around several blocks.


@program()
def a_checkpoint_around_the_trunk(parallelize: Parallelize) -> Result:
    """Its backward runs all blocks again, so all are on one stage."""

    def run(net: Any, x: Tensor) -> Tensor:
        return end(net, checkpoint(in_order, net, net.embed(x), use_reentrant=False))

    return learn(parallelize, Four(run))


@program()
def a_checkpoint_around_two_blocks_each(parallelize: Parallelize) -> Result:
    """Stages end where checkpoints do."""

    def both(net: Any, hidden: Tensor, first: int) -> Tensor:
        return net.layers[first + 1](net.layers[first](hidden))

    def run(net: Any, x: Tensor) -> Tensor:
        hidden = net.embed(x)
        for first in (0, 2):
            hidden = checkpoint(both, net, hidden, first, use_reentrant=False)
        return end(net, hidden)

    return learn(parallelize, Four(run))


@program(dict.fromkeys(("pp", "place"), "one checkpoint .* is around units of several stages"))
def a_checkpoint_around_the_trunk_in_training_alone(parallelize: Parallelize) -> Result:
    """With gradients alone, and the run of the example has none."""

    def run(net: Any, x: Tensor) -> Tensor:
        hidden = net.embed(x)
        if torch.is_grad_enabled():
            hidden = checkpoint(in_order, net, hidden, use_reentrant=False)
        else:
            hidden = in_order(net, hidden)
        return end(net, hidden)

    return learn(parallelize, Four(run))


# Lengths that the data decide.


@program({"tp": "does not run on the meta device", "cp": "mask is .*which are cut"}, but="place", whole=True)
def a_batch_cut_to_its_longest_row(parallelize: Parallelize) -> Result:
    """`int(mask.sum(1).max())` tokens are computed, and the others padded again."""

    class Cuts(Four):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            longest = int(mask.sum(1).max())
            made = super().forward(x[:, :longest])
            return functional.pad(made, (0, 0, 0, x.shape[1] - longest))

    def masked(seed: int) -> Mapping[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(12, (8, 9), generator=generator)
        mask = torch.arange(8)[None] < torch.randint(1, 6, (8, 1), generator=generator)
        return {"x": ids[:, :-1], "mask": mask.long(), "labels": ids[:, 1:].masked_fill(~mask, -100)}

    engine = parallelize(Cuts().double(), loss=cross_entropy, optimizer=sgd, example=masked(0))
    return {f"loss {seed}": engine.train_step(masked(seed)) for seed in range(4)}


# Under cp: what the loss reads of blocks that a trial leaves out, and padding.


class Balances(Block):
    """Experts of its own, whose even use is an auxiliary loss in an attribute."""

    auxiliary: Any = None
    of: Callable[[Tensor], Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        share = self.router(x).softmax(-1)
        self.auxiliary = type(self).of(share)
        return super().forward(x) * share.amax(-1, keepdim=True)


def balanced(parallelize: Parallelize, of: Callable[[Tensor], Tensor], num_tokens: int) -> Result:
    kind = type("Balanced", (Balances,), {"of": staticmethod(of)})
    model = Four(first=kind, last=kind)
    model.layers = nn.ModuleList([kind() for _ in range(4)])

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        number = (given["labels"] >= 0).sum()
        return (cross_entropy(output, given) + sum(each.auxiliary for each in model.layers)) * number, number

    ids = torch.randint(12, (4, num_tokens + 1), generator=torch.Generator().manual_seed(0))
    given = {"x": ids[:, :-1], "labels": ids[:, 1:]}
    engine = parallelize(model.double(), loss=loss, optimizer=sgd, example=given)
    return {"loss": engine.train_step(given)}


@program({"cp": "a part of a sequence gives other numbers"}, only="cp")
def experts_balanced_over_all_tokens(parallelize: Parallelize) -> Result:
    """The loss reads it of each block, also of those that a trial would leave out."""
    return balanced(parallelize, lambda share: share.mean((0, 1)).square().sum(), 8)


@program({"cp": "6 tokens is padded to 8, and with padding .* other numbers"}, only="cp")
def experts_balanced_over_padding(parallelize: Parallelize) -> Result:
    """A mean over tokens, and a sequence too short to be tried without its last."""
    return balanced(parallelize, lambda share: share.square().sum(-1).mean(), 6)


@program(only="cp")
def experts_balanced_by_each_token(parallelize: Parallelize) -> Result:
    """The same without padding."""
    return balanced(parallelize, lambda share: share.square().sum(-1).mean(), 8)


class RemembersARow(Block):
    """Its last row, for the next batch."""

    last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        made = super().forward(x)
        if self.last is not None:
            made = made + 0.1 * self.last.mean()
        self.last = made.detach()[-1:]
        return made


@program(dict.fromkeys(("dp", "sp", "cp"), "depends on its rows and changes the next one"))
def a_state_of_the_last_row_alone(parallelize: Parallelize) -> Result:
    """Of two rows the second stays where it is in a batch whose rows are only doubled."""
    return learn(parallelize, Four(first=RemembersARow))


@program({**LEFT, **MIXES, "recompute=full": "changes the next one, and recompute=full runs each twice"})
def a_count_that_its_class_is_given(parallelize: Parallelize) -> Result:
    """`type(self).calls = getattr(type(self), "calls", 0) + 1`: it is not there before the first forward."""

    class Counts(Block):
        def forward(self, x: Tensor) -> Tensor:
            kind: Any = type(self)
            kind.calls = getattr(kind, "calls", 0) + 1
            return super().forward(x) * (1 + 0.01 * kind.calls)

    return learn(parallelize, Four(first=Counts, last=Counts))
