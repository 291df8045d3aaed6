"""How modules are called: forwards by name, sliced containers, calls of one's own, trunks run twice; odd memory."""
# Programs as users write them.
# mypy: disable-error-code="no-any-return,no-untyped-call,override,no-untyped-def,arg-type,attr-defined"
# mypy: disable-error-code="assignment,return-value,call-overload,operator"

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint_sequential

from tests.habits.harness import (
    Batch,
    Block,
    Net,
    Parallelize,
    Result,
    batch,
    cross_entropy,
    program,
    sgd,
    small_net,
    start,
    trained,
)


class ForwardByName(Net):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed.forward(x)
        for layer in self.layers:
            hidden = layer.forward(hidden)
        return self.head.forward(self.norm.forward(hidden))


@program()
def forwards_called_by_name(parallelize: Parallelize) -> Result:
    """`layer.forward(x)`, which goes past hooks and calls."""
    return trained(start(parallelize, ForwardByName().double()))


class SomeByName(Net):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        hidden = self.layers[1].forward(self.layers[0](hidden))
        return self.head(self.norm(hidden))


@program()
def one_forward_called_by_name(parallelize: Parallelize) -> Result:
    """The second block alone."""
    return trained(start(parallelize, SomeByName().double()))


class CallOfItsOwn(Block):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return 0.5 * super().__call__(*args, **kwargs)


@program()
def calls_of_ones_own(parallelize: Parallelize) -> Result:
    """`__call__` written again around that of torch."""
    return trained(start(parallelize, small_net(block=CallOfItsOwn)))


class CallInstead(Block):
    def __call__(self, x: Tensor) -> Tensor:
        return self.forward(x)


@program()
def calls_that_go_straight_to_forward(parallelize: Parallelize) -> Result:
    """`__call__` that leaves out torch's own."""
    return trained(start(parallelize, small_net(block=CallInstead)))


class Sliced(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Block(), Block(), Block())

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layers[:2](self.embed(x))
        hidden = hidden + self.layers[2:](hidden)
        return self.head(self.norm(hidden))


@program()
def a_sequential_that_is_sliced(parallelize: Parallelize) -> Result:
    """`self.layers[:2](x)` makes another container in each forward."""
    return trained(start(parallelize, Sliced().double()))


class InSegments(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Block(), Block(), Block())

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint_sequential(self.layers, 2, self.embed(x), use_reentrant=False)
        return self.head(self.norm(hidden))


@program()
def checkpoints_of_segments(parallelize: Parallelize) -> Result:
    """`checkpoint_sequential`, as timm and torchvision have it."""
    return trained(start(parallelize, InSegments().double()))


class Twice(Net):
    """The whole trunk twice in a forward, on two views."""

    def trunk(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.norm(hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.trunk(x) - 0.5 * self.trunk(x.flip(1)))


@program({"cp": "tokens|part of a sequence|other numbers"})
def siamese(parallelize: Parallelize) -> Result:
    """Two views of the same rows through one trunk."""
    return trained(start(parallelize, Twice().double()))


class Dropping(Block):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(super().forward(x))


class Views(Net):
    """The same rows twice: what differs is what was dropped."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), super().forward(x)


@program(but="cp")
def two_views_by_dropout(parallelize: Parallelize) -> Result:
    """R-Drop and SimCSE: the model is called twice, and dropout makes the difference."""

    def loss(output: tuple[Tensor, Tensor], given: Mapping[str, Tensor]) -> Tensor:
        return cross_entropy(output[0], given) + cross_entropy(output[1], given)

    model = Views(block=Dropping).double()
    engine = parallelize(model, loss=loss, optimizer=sgd, example=batch(0))
    engine.train_step(batch(0), metrics=lambda output, _: {"apart": (output[0] - output[1]).abs().mean() > 1e-3})
    return {"are apart": engine.metrics["apart"]}


class Keywords(Net):
    def forward(self, **given: Any) -> Tensor:
        return super().forward(given["x"])


@program()
def a_forward_of_keywords(parallelize: Parallelize) -> Result:
    """`forward(self, **batch)`."""
    return trained(start(parallelize, Keywords().double()))


class WholeBatch(Net):
    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        return super().forward(batch["x"])


@program({"all": "takes no|batch|x"})
def a_forward_of_the_whole_batch(parallelize: Parallelize) -> Result:
    """`forward(self, batch)`, as Lightning's steps have it."""
    return trained(start(parallelize, WholeBatch().double()))


class Defaults(Net):
    def forward(self, x: Tensor, scale: float = 2.0, *, features: bool = False) -> Tensor:
        scores = super().forward(x) * scale
        return scores if not features else (scores, x)


@program()
def defaults_that_nobody_gives(parallelize: Parallelize) -> Result:
    """Arguments with defaults."""
    return trained(start(parallelize, Defaults().double()))


@program(but="cp")
def weights_in_channels_last(parallelize: Parallelize) -> Result:
    """`to(memory_format=torch.channels_last)`: weights whose memory is in another order."""

    class Image(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 6, 3, padding=1)
            self.norm, self.head = nn.GroupNorm(2, 6), nn.Linear(6, 5)

        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.tanh(self.second(torch.tanh(self.first(x))))
            return self.head(self.norm(hidden).mean((2, 3)))

    return pictures(parallelize, Image().double().to(memory_format=torch.channels_last))


def picture(step: int, classes: int = 5) -> Batch:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(4, 3, 6, 6, generator=generator, dtype=torch.float64)
    return {"x": x, "labels": torch.randint(classes, (4,), generator=generator)}


def by_row(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
    return functional.cross_entropy(output, given["labels"])


def pictures(parallelize: Parallelize, model: nn.Module, optimizer: Any = sgd, **options: Any) -> Result:
    engine = parallelize(model, loss=by_row, optimizer=optimizer, example=picture(0), **options)
    found = {f"loss {step}": engine.train_step(picture(step)) for step in range(3)}
    return {**found, **{name: each for name, each in engine.state_dict().items() if isinstance(each, Tensor)}}


class Turned(Block):
    """A matrix whose memory is that of its transposed, a parameter without numbers, and one of whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.linspace(-1, 1, 64).view(8, 8).t() / 8)
        self.nothing = nn.Parameter(torch.empty(0))
        self.order = nn.Parameter(torch.arange(7, -1, -1), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + (x @ self.turn)[..., self.order]) + self.nothing.sum()


@program()
def weights_with_odd_memory(parallelize: Parallelize) -> Result:
    """A parameter that is not contiguous, one of no numbers, and one of integers."""
    return trained(start(parallelize, small_net(block=Turned)))


class Table(Block):
    """A table of angles that all blocks share, and one that is not saved."""

    shared = torch.linspace(0.5, 1.5, 8, dtype=torch.float64)

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", self.shared)
        self.register_buffer("hidden", torch.linspace(1.5, 0.5, 8), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.angles * self.hidden)


@program()
def a_table_that_blocks_share(parallelize: Parallelize) -> Result:
    """One tensor as a buffer of several modules; and one that `state_dict()` leaves out."""
    return trained(start(parallelize, small_net(block=Table)))


class Extra(Block):
    """What is saved beside tensors."""

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 3}

    def set_extra_state(self, state: Any) -> None:
        assert state["version"] == 3


@program()
def an_extra_state(parallelize: Parallelize) -> Result:
    """`get_extra_state` and `set_extra_state`, saved and loaded by the engine."""
    engine = start(parallelize, small_net(block=Extra))
    state = engine.state_dict()
    engine.load_state_dict(state)
    return {**trained(engine), "version": state["layers.0._extra_state"]["version"]}


class Unregistered(Net):
    def __init__(self) -> None:
        super().__init__()
        self.others = [Block().double() for _ in range(2)]

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for layer, other in zip(self.layers, self.others, strict=True):
            hidden = other(layer(hidden))
        return self.head(self.norm(hidden))


@program()
def layers_in_a_plain_list(parallelize: Parallelize) -> Result:
    """Modules in a list are no submodules: nobody trains them, and they compute."""
    return trained(start(parallelize, Unregistered().double()))


class Tied(Net):
    """A decoder with the weight of the encoder, turned round."""

    def __init__(self) -> None:
        super().__init__()
        self.code = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = layer(hidden)
        hidden = hidden + functional.linear(torch.tanh(self.code(hidden)), self.code.weight.t())
        return self.head(self.norm(hidden))


@program()
def a_decoder_with_the_encoders_weight(parallelize: Parallelize) -> Result:
    """A tied autoencoder inside of the model."""
    return trained(start(parallelize, Tied().double()))


class Hyper(Block):
    """A weight that another layer makes, of a learned code."""

    def __init__(self) -> None:
        super().__init__()
        self.code, self.maker = nn.Parameter(torch.linspace(-1, 1, 4)), nn.Linear(4, 64)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(functional.linear(x, self.maker(self.code).view(8, 8)))


@program()
def weights_made_by_a_layer(parallelize: Parallelize) -> Result:
    """A hypernetwork in each block."""
    return trained(start(parallelize, small_net(block=Hyper)))


class Unsorted(Net):
    """Rows sorted by what they are, and put back."""

    def forward(self, x: Tensor) -> Tensor:
        order = x.sum(1).argsort(descending=True, stable=True)
        return super().forward(x[order])[order.argsort()]


@program()
def rows_sorted_and_put_back(parallelize: Parallelize) -> Result:
    """As before packing: by length, and back again."""
    return trained(start(parallelize, Unsorted().double()))


class Cells(Net):
    """A cell for each token, in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        state, made = None, []
        for token in self.embed(x).unbind(1):
            state = self.cell(token, state)
            made.append(state[0])
        hidden = torch.stack(made, 1)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden))


@program({"cp": "tokens|part of a sequence|other numbers|recurrent"})
def a_cell_in_a_loop(parallelize: Parallelize) -> Result:
    """`nn.LSTMCell` by hand."""
    return trained(start(parallelize, Cells().double()))


class Packed(Net):
    """Sequences of different lengths, packed for an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(self.embed(x), lengths, batch_first=True, enforce_sorted=False)
        hidden, _ = nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=x.shape[1])
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden))


IN_TP = r"meta device, at calling.py:\d+ \(packed = [\s\S]*padded sequences and a mask"


@program({"pp": "cannot be foreseen", "tp": IN_TP}, but="cp")
def sequences_packed_in_the_forward(parallelize: Parallelize) -> Result:
    """`pack_padded_sequence`, and back to the length of the batch."""

    def given(step: int) -> Batch:
        lengths = torch.tensor([3, 1, 2, 3])
        made = batch(step)
        labels = made["labels"].masked_fill(torch.arange(3)[None] >= lengths[:, None], -100)
        return {**made, "labels": labels, "lengths": lengths}

    engine = parallelize(Packed().double(), loss=cross_entropy, optimizer=sgd, example=given(0))
    found = {f"loss {step}": engine.train_step(given(step)) for step in range(3)}
    return {**found, **engine.state_dict()}


class Whole(nn.Module):
    """torch's own encoder and decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.model = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 12)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=hidden.dtype)
        return self.head(self.model(hidden, hidden.flip(1), tgt_mask=mask, tgt_is_causal=True))


@program({"cp": "tokens|part of a sequence|other numbers|attention"})
def torch_encoder_and_decoder(parallelize: Parallelize) -> Result:
    """`nn.Transformer`."""
    return trained(start(parallelize, Whole().double()))


class InPlace(nn.Module):
    """A block that writes into what it is given, which is a view: what a linear layer returns."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x.mul_(1.5))))


@program(only="zero=3", always=True)
def blocks_that_begin_in_place(parallelize: Parallelize) -> Result:
    """Autograd goes another way back then, and does not come by hooks of what a block returned."""
    return trained(start(parallelize, small_net(block=InPlace)))


@program(only="recompute", always=True)
def blocks_that_begin_in_place_computed_again(parallelize: Parallelize) -> Result:
    """The second forward is given what the first one was given, not what that has written there."""
    return trained(start(parallelize, small_net(block=InPlace)))


class Pairs(nn.Module):
    """Attention and a feed-forward net in pairs, and the root computes with both."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(12, 8), nn.Linear(8, 12)
        self.layers = nn.ModuleList([self._pair() for _ in range(2)])

    @staticmethod
    def _pair() -> nn.ModuleList:
        feed = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        return nn.ModuleList([nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8), feed])

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for each in self.layers:
            norm, qkv, out, feed = list(each.children())
            parts = qkv(norm(hidden)).chunk(3, -1)
            q, k, v = (part.unflatten(-1, (4, 2)).transpose(1, 2) for part in parts)
            seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            hidden = hidden + out(seen.transpose(1, 2).flatten(2))
            hidden = hidden + feed(hidden)
        return self.head(hidden)


@program(but="cp")
def layers_in_pairs(parallelize: Parallelize) -> Result:
    """`for attention, feed in self.layers:`, a list of lists: of what is around the layers the root alone is called."""
    return trained(start(parallelize, Pairs().double()))
