"""Checkpoints of activations in the root's own loop over blocks, of both kinds and by hand, as scripts have them."""
# Programs as users write them.
# mypy: disable-error-code="no-untyped-call,no-any-return"

from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.func import functional_call
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.habits.harness import Block, Net, Parallelize, Result, batch, program, sgd, small_net, start, trained

OUTSIDE = {"pp": "units are called inside of an autograd.Function"}
WORDS = dict.fromkeys(("dp", "microbatches", "cp"), "scale_grad_by_freq=True")


class Looped(Net):
    """Each block in a checkpoint of the older kind, or of the newer one."""

    older = True

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=self.older)
        return self.head(self.norm(hidden))


class Newer(Looped):
    older = False


@program()
def blocks_in_older_checkpoints(parallelize: Parallelize) -> Result:
    """`use_reentrant=True`: the second forward is run by a backward inside of another."""
    return trained(start(parallelize, Looped().double()))


@program(only="zero=3")
def older_checkpoints_of_weights_that_come_and_go(parallelize: Parallelize) -> Result:
    """The second forward finds its weights again."""
    return trained(start(parallelize, Looped().double()))


@program(only="recompute=full")
def checkpoints_inside_of_checkpoints(parallelize: Parallelize) -> Result:
    """The plan recomputes what the module recomputes itself."""
    return trained(start(parallelize, Newer().double()))


@program()
def blocks_in_newer_checkpoints(parallelize: Parallelize) -> Result:
    """`use_reentrant=False`."""
    return trained(start(parallelize, Newer().double()))


@program()
def older_checkpoints_of_what_has_no_gradient(parallelize: Parallelize) -> Result:
    """A frozen embedding: what comes out of the older kind has no gradient, and torch warns. Only the head learns."""
    model = Looped().double()
    model.embed.requires_grad_(False)
    return trained(start(parallelize, model))


@program()
def a_norm_inside_of_blocks_and_of_the_root(parallelize: Parallelize) -> Result:
    """A unit of the root that is a part of checkpointed blocks, too."""
    model = Newer().double()
    for each in model.layers:
        each.norm = model.norm
    return trained(start(parallelize, model))


class ByHand(Function):
    """As in guided diffusion: gradients of arguments, of which weights are some, by a second forward."""

    @staticmethod
    def forward(ctx: Any, run: Any, *given: Tensor) -> Tensor:
        ctx.run, ctx.given = run, given
        with torch.no_grad():
            return run(given[0])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        first = ctx.given[0].detach().requires_grad_()
        with torch.enable_grad():
            made = ctx.run(first.view_as(first))
        return None, *torch.autograd.grad(made, [first, *ctx.given[1:]], gradients, allow_unused=True)


class BlockByHand(Block):
    def forward(self, x: Tensor) -> Tensor:
        return ByHand.apply(super().forward, x, *self.parameters())


@program()
def checkpoints_by_hand_in_blocks(parallelize: Parallelize) -> Result:
    """A function of the script's own inside of each block."""
    return trained(start(parallelize, small_net(block=BlockByHand)))


class LoopedByHand(Net):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = ByHand.apply(layer, hidden, *layer.parameters())
        return self.head(self.norm(hidden))


@program(OUTSIDE)
def checkpoints_by_hand_around_blocks(parallelize: Parallelize) -> Result:
    """The same in the root's loop: stages would lose gradients."""
    return trained(start(parallelize, LoopedByHand().double()))


@program(WORDS)
def gradients_by_how_often_a_word_is_there(parallelize: Parallelize) -> Result:
    """Of the words of a whole batch, which parts of it do not know."""
    model = small_net()
    model.embed = nn.Embedding(12, 8, scale_grad_by_freq=True).double()
    return trained(start(parallelize, model))


class Dropping(Block):
    """Drops by a module, and between its two layers; there in a checkpoint, if it is told so."""

    recomputes = False

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Dropout(0.5), nn.Dropout(0.3)

    def activated(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(x))

    def forward(self, x: Tensor) -> Tensor:
        wide = self.up(self.norm(self.first(x)))
        wide = checkpoint(self.activated, wide, use_reentrant=False) if self.recomputes else self.activated(wide)
        return x + self.down(wide)


class DroppingInPart(Dropping):
    recomputes = True


def apart(parallelize: Parallelize, *models: Net) -> Result:
    """How far models are from each other after training, that are the same but for what they recompute."""
    ends = []
    for model in models:
        model.load_state_dict(models[0].state_dict())
    for model in models:
        torch.manual_seed(3)
        engine = start(parallelize, model.double())
        torch.manual_seed(3)
        engine.train_step(batch(0))
        ends.append({name: each.clone() for name, each in engine.state_dict().items()})
        engine.close()
    return {name: ends[0][name] - each for end in ends[1:] for name, each in end.items()}


@program(but="cp")
def dropout_in_checkpoints_around_blocks(parallelize: Parallelize) -> Result:
    """The second forward drops what the first one has dropped, whatever other microbatches did meanwhile."""
    return apart(parallelize, Net(block=Dropping), Newer(block=Dropping))


@program(but="cp")
def dropout_in_a_checkpoint_between_two_layers(parallelize: Parallelize) -> Result:
    """An activation that is recomputed by itself, inside of what tp cuts."""
    return apart(parallelize, Net(block=Dropping), Net(block=DroppingInPart))


@program()
def a_checkpoint_in_the_loss(parallelize: Parallelize) -> Result:
    """`checkpoint(cross_entropy, ...)`: the mean is computed again as it was."""

    def loss(output: Tensor, given: Any) -> Tensor:
        return checkpoint(
            functional.cross_entropy, output.flatten(0, 1), given["labels"].flatten(), use_reentrant=False
        )

    return trained(parallelize(small_net(), loss=loss, optimizer=sgd, example=batch(0)))


class FastWeights(Net):
    """MAML and its like: a block is called with other tensors in the places of its parameters."""

    def forward(self, x: Tensor) -> Tensor:
        fast = {name: each * 0.9 for name, each in self.layers[0].named_parameters()}
        hidden = functional_call(self.layers[0], fast, (self.embed(x),))
        return self.head(self.norm(self.layers[1](hidden)))


class AtRest(Net):
    """The critic of a GAN that is in one module with its maker: for one call it is not trained."""

    def forward(self, x: Tensor) -> Tensor:
        hidden, critic = self.embed(x), self.layers[1]
        critic.requires_grad_(False)
        judged = critic(hidden)
        critic.requires_grad_(True)
        return self.head(self.norm(judged + critic(self.layers[0](hidden))))


@program(only="recompute")
def fast_weights_computed_again(parallelize: Parallelize) -> Result:
    """`functional_call`: the second forward has the weights of the first."""
    return trained(start(parallelize, FastWeights().double()))


@program(only="recompute")
def a_block_at_rest_computed_again(parallelize: Parallelize) -> Result:
    """`requires_grad_(False)` for one call: the second forward finds it so."""
    return trained(start(parallelize, AtRest().double()))


GAIN: ContextVar[float] = ContextVar("GAIN", default=1.0)
FLAGS = {"shift": 0.0}


class Gained(Block):
    """Reads what is set around its call, and has an adapter that can be off."""

    def __init__(self) -> None:
        super().__init__()
        self.adapter, self.is_on = nn.Linear(8, 8), True

    def forward(self, x: Tensor) -> Tensor:
        x = x * GAIN.get() + FLAGS["shift"]
        return super().forward(self.adapter(x) if self.is_on else x)


class Around(Net):
    """Sets a context, a flag of the file and an attribute of each block around calls, and puts them back."""

    def forward(self, x: Tensor) -> Tensor:
        hidden, token = self.embed(x), GAIN.set(2.0)
        layers: list[Any] = list(self.layers)
        for number, layer in enumerate(layers):
            FLAGS["shift"], layer.is_on = 0.5 + number, number == 1
            hidden = layer(hidden)
        GAIN.reset(token)
        FLAGS["shift"], layers[0].is_on = 0.0, True
        return self.head(self.norm(hidden))


@program(only="recompute")
def what_is_set_around_blocks_computed_again(parallelize: Parallelize) -> Result:
    """`with flags(...):`, `disable_adapter()`: the second forward, behind all of it, finds them as the first did."""
    return trained(start(parallelize, Around(block=Gained).double()))


class Attending(Block):
    """Attention over the tokens of a row, and what blocks do after it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (2, 4)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return super().forward(x + self.out(seen.transpose(1, 2).flatten(2)))


@program({"cp": "a checkpoint.* of the module computes other tensors"}, always=True)
def attention_in_checkpoints(parallelize: Parallelize) -> Result:
    """The second forward of a checkpoint sees the tokens of its rank alone."""
    return trained(start(parallelize, Looped(block=Attending).double()))
