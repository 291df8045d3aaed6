"""What crosses stages of a pipeline and is no returned tensor: numbers, attributes, lists, views, hooks, counters."""
# Programs as users write them, attributes and all.
# mypy: disable-error-code="assignment,operator,no-any-return,index,union-attr,type-var,arg-type,misc"
# mypy: disable-error-code="call-overload,attr-defined,override,var-annotated"

import random
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.habits.harness import Block, Parallelize, Result, cross_entropy, program, sgd

#: What the sentence says where a unit leaves something for another stage otherwise than by returning it.
_LEFT = "share what they do not return|that the unit does not return|compute something else|forward leaves"
LEFT = {"pp": _LEFT, "place": _LEFT}
#: The same where units that share a tensor can be kept on one stage: then it is right.
TOGETHER = {"chunks": _LEFT, "schedule=zb-v": _LEFT}
#: What has a gradient may be read by whoever called the module: it is of one microbatch.
GRADIENT = {"place": "leaves tensors with a gradient"}
#: Stages in one process count, or draw, each on its own.
IN_TURN = {"chunks": _LEFT, "schedule=zb-v": _LEFT, "place": _LEFT}
#: What only replicas with rows of their own make different, or a second forward.
DRIFTS = {"dp": "each replica would have its own"}


def tokens(seed: int, rows: int = 8) -> dict[str, Tensor]:
    ids = torch.randint(12, (rows, 4), generator=torch.Generator().manual_seed(seed))
    return {"x": ids[:, :-1], "labels": ids[:, 1:]}


def learn(parallelize: Parallelize, model: nn.Module, loss: Any = cross_entropy, **options: Any) -> Result:
    """Three steps: their losses, and the weights after them."""
    # Most of these look across the rows of a microbatch, and mean to: `, 1` says so.
    engine = parallelize(
        model.double(), loss=lambda output, given: (loss(output, given), 1), optimizer=sgd, example=tokens(0), **options
    )
    losses = {f"loss {step}": engine.train_step(tokens(step)) for step in range(3)}
    return losses | {name: each for name, each in engine.state_dict().items() if isinstance(each, Tensor)}


def one_after_the_other(net: Any, x: Tensor) -> Tensor:
    hidden = net.embed(x)
    for layer in net.layers:
        hidden = layer(hidden)
    return net.head(net.norm(hidden))


class Four(nn.Module):
    """An embedding, four blocks and a head; `first` and `last` are the outer blocks, `run` is the forward."""

    def __init__(
        self,
        run: Callable[[Any, Tensor], Any] = one_after_the_other,
        *,
        first: type[nn.Module] = Block,
        last: type[nn.Module] = Block,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.layers = nn.ModuleList([first(), Block(), Block(), last()])
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 12, bias=False)
        self.run = run

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


def middle(net: Any, hidden: Tensor) -> Tensor:
    return net.layers[2](net.layers[1](hidden))


def end(net: Any, hidden: Tensor) -> Tensor:
    return net.head(net.norm(hidden))


# Numbers that units return.


class ReturnsNumber(Block):
    """Returns a number that it computes from its input beside its output."""

    number: Callable[[Tensor], Any]

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), type(self).number(x)


def with_number(number: Callable[[Tensor], Any], use: Callable[[Tensor, Any], Tensor]) -> Four:
    """A net whose first block returns a number that is used behind the third."""

    def run(net: Any, x: Tensor) -> Tensor:
        hidden, found = net.layers[0](net.embed(x))
        return end(net, net.layers[3](use(middle(net, hidden), found)))

    return Four(run, first=type("Returns", (ReturnsNumber,), {"number": staticmethod(number)}))


def positive(x: Tensor) -> Tensor:
    return (x > 0).sum()


@program()
def an_int_from_data(parallelize: Parallelize) -> Result:
    """How many inputs are positive."""
    return learn(parallelize, with_number(lambda x: int(positive(x)), lambda hidden, n: hidden * (n / 30)))


@program()
def a_float_from_data(parallelize: Parallelize) -> Result:
    """By `.item()`."""
    return learn(parallelize, with_number(lambda x: x.std().item(), lambda hidden, scale: hidden * scale))


@program()
def a_bool_from_data(parallelize: Parallelize) -> Result:
    """One thing is done or the other, outside of any unit."""
    model = with_number(lambda x: bool(positive(x) % 2), lambda hidden, odd: hidden * 2 if odd else hidden - 1)
    return learn(parallelize, model)


@program()
def a_list_of_ints_from_data(parallelize: Parallelize) -> Result:
    """By `.tolist()`: one for each channel."""
    model = with_number(lambda x: (x > 0).sum((0, 1)).tolist(), lambda hidden, each: hidden + hidden.new_tensor(each))
    return learn(parallelize, model)


@program()
def a_number_of_selected_rows(parallelize: Parallelize) -> Result:
    """By the shape of what a mask selects."""
    model = with_number(lambda x: x[x > 0.5].shape[0], lambda hidden, n: hidden * (1 + n / 20))
    return learn(parallelize, model)


@program()
def a_number_by_numpy(parallelize: Parallelize) -> Result:
    """By `.numpy()`, which is no operation of torch."""
    model = with_number(lambda x: float(x.detach().numpy().std()), lambda hidden, scale: hidden * scale)
    return learn(parallelize, model)


@program()
def a_number_of_the_shape(parallelize: Parallelize) -> Result:
    """The number of rows and of positions: the same for all microbatches."""
    return learn(parallelize, with_number(lambda x: x.shape[:2], lambda hidden, n: hidden * (n[0] / n[1])))


@program({"pp": "returns 'few'|returns 'many'", "place": "returns 'few'|returns 'many'"})
def a_word_from_data(parallelize: Parallelize) -> Result:
    """What to do next by name."""
    words = {"few": 0.5, "many": 2.0}
    model = with_number(lambda x: "many" if positive(x) % 2 else "few", lambda hidden, word: hidden * words[word])
    return learn(parallelize, model)


@program()
def a_number_that_decides_how_a_unit_is_called(parallelize: Parallelize) -> Result:
    """Given to a unit of another stage."""

    class Powers(Block):
        def forward(self, x: Tensor, times: int = 1) -> Tensor:
            for _ in range(times):
                x = super().forward(x)
            return x

    def run(net: Any, x: Tensor) -> Tensor:
        hidden, n = net.layers[0](net.embed(x))
        return end(net, net.layers[3](middle(net, hidden), times=1 + n % 3))

    first = type("Returns", (ReturnsNumber,), {"number": staticmethod(lambda x: int(positive(x)))})
    return learn(parallelize, Four(run, first=first, last=Powers))


@program()
def a_number_of_a_tensor_that_crosses(parallelize: Parallelize) -> Result:
    """The unit returns a tensor, and the root's forward asks it for its number."""
    model = with_number(lambda x: x.std(), lambda hidden, scale: hidden * scale.item())
    return learn(parallelize, model)


# Attributes.


class Leaves(Block):
    """Leaves something of its input in an attribute."""

    def forward(self, x: Tensor) -> Any:
        self.left = type(self).of(x)
        return super().forward(x)


def leaving(of: Callable[[Tensor], Any]) -> type[nn.Module]:
    return type("Leaving", (Leaves,), {"of": staticmethod(of), "left": None})


def uses_left(use: Callable[[Tensor, Any], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    """A forward that uses behind the third block what the first has left."""

    def run(net: Any, x: Tensor) -> Tensor:
        hidden = middle(net, net.layers[0](net.embed(x)))
        return end(net, net.layers[3](use(hidden, net.layers[0].left)))

    return run


def scaled(hidden: Tensor, by: Any) -> Tensor:
    return hidden * by


@program(LEFT)
def a_float_left_in_an_attribute(parallelize: Parallelize) -> Result:
    """Of a block, and read by the root's forward."""
    return learn(parallelize, Four(uses_left(scaled), first=leaving(lambda x: x.std().item())))


@program(LEFT)
def a_flag_left_in_an_attribute(parallelize: Parallelize) -> Result:
    """Decides what is done on another stage."""

    def use(hidden: Tensor, odd: bool) -> Tensor:
        return hidden * 2 if odd else hidden - 1

    return learn(parallelize, Four(uses_left(use), first=leaving(lambda x: bool(positive(x) % 2))))


@program(GRADIENT)
def a_tensor_left_in_an_attribute(parallelize: Parallelize) -> Result:
    """A gate, with its gradient."""
    return learn(parallelize, Four(uses_left(scaled), first=leaving(lambda x: torch.sigmoid(x.mean()))))


@program()
def a_tensor_without_gradient_left_in_an_attribute(parallelize: Parallelize) -> Result:
    """The same detached."""
    return learn(parallelize, Four(uses_left(scaled), first=leaving(lambda x: x.detach().std())))


@program(LEFT)
def an_output_left_in_an_attribute_too(parallelize: Parallelize) -> Result:
    """What the unit returns is read from its attribute."""

    class Keeps(Block):
        def forward(self, x: Tensor) -> Tensor:
            self.out = super().forward(x)
            return self.out

    def run(net: Any, x: Tensor) -> Tensor:
        hidden = middle(net, net.layers[0](net.embed(x)))
        return end(net, net.layers[3](hidden + net.layers[0].out))

    return learn(parallelize, Four(run, first=Keeps))


@program(LEFT)
def a_number_left_at_the_root(parallelize: Parallelize) -> Result:
    """A unit writes to the module above it."""

    class Tells(Block):
        def forward(self, x: Tensor) -> Tensor:
            self.root[0].level = x.std().item()
            return super().forward(x)

    def run(net: Any, x: Tensor) -> Tensor:
        hidden = middle(net, net.layers[0](net.embed(x)))
        return end(net, net.layers[3](hidden * net.level))

    model = Four(run, first=Tells)
    model.layers[0].root = [model]
    return learn(parallelize, model)


@program({**LEFT, **DRIFTS})
def a_number_for_the_next_microbatch(parallelize: Parallelize) -> Result:
    """The last block leaves what the first one reads in the next forward."""

    class Follows(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * self.other[0].level)

    class Leads(Block):
        level = 1.0

        def forward(self, x: Tensor) -> Tensor:
            self.level = 0.5 + x.detach().std().item()
            return super().forward(x)

    model = Four(first=Follows, last=Leads)
    model.layers[0].other = [model.layers[3]]
    return learn(parallelize, model)


@program()
def a_number_used_by_the_unit_itself(parallelize: Parallelize) -> Result:
    """What a block remembers from the forward before is on its own stage; it depends on no row."""

    class Warms(Block):
        seen = 0

        def forward(self, x: Tensor) -> Tensor:
            self.seen += 1
            return super().forward(x) * (1 - 0.5**self.seen)

    return learn(parallelize, Four(first=Warms, last=Warms))


@program({**DRIFTS, "place": "of the last one alone"})
def a_running_mean_in_an_attribute(parallelize: Parallelize) -> Result:
    """A float that each replica would have of its own rows, and that the next forward reads."""

    class Averages(Block):
        mean = 1.0

        def forward(self, x: Tensor) -> Tensor:
            made = super().forward(x) * self.mean
            self.mean = 0.9 * self.mean + 0.1 * x.std().item()
            return made

    return learn(parallelize, Four(first=Averages))


@program(IN_TURN)
def forwards_counted_by_the_root(parallelize: Parallelize) -> Result:
    """Every stage runs the root's forward, and counts once."""

    def run(net: Any, x: Tensor) -> Tensor:
        net.steps = getattr(net, "steps", 0) + 1
        return one_after_the_other(net, x) * (1 - 0.5**net.steps)

    return learn(parallelize, Four(run))


@program(LEFT)
def forwards_counted_behind_the_last_unit(parallelize: Parallelize) -> Result:
    """Which the first stage never comes to, though it reads the count."""

    def run(net: Any, x: Tensor) -> Tensor:
        hidden = net.embed(x) * (1 - 0.5 ** (1 + getattr(net, "steps", 0)))
        for layer in net.layers:
            hidden = layer(hidden)
        scores = end(net, hidden)
        net.steps = getattr(net, "steps", 0) + 1
        return scores

    return learn(parallelize, Four(run))


@program()
def a_setting_that_is_computed_once(parallelize: Parallelize) -> Result:
    """A table that every block makes for itself when it is first called."""

    class Makes(Block):
        table: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.table is None:
                self.table = torch.linspace(0.5, 1.5, x.shape[-1], dtype=x.dtype)
            return super().forward(x) * self.table

    return learn(parallelize, Four(first=Makes, last=Makes))


# What the loss reads.


def plus(extra: Callable[[], Any]) -> Callable[[Any, Mapping[str, Tensor]], Tensor]:
    return lambda output, given: cross_entropy(output, given) + extra()


@program(LEFT)
def an_auxiliary_loss_read_in_the_loss(parallelize: Parallelize) -> Result:
    """As mixtures of experts leave it in every block."""
    balanced = leaving(lambda x: x.square().mean())
    model = Four(first=balanced, last=balanced)
    return learn(parallelize, model, plus(lambda: 0.1 * (model.layers[0].left + model.layers[3].left)))


@program({"place": _LEFT})
def an_auxiliary_loss_of_the_last_block(parallelize: Parallelize) -> Result:
    """It is where the loss is."""
    model = Four(last=leaving(lambda x: x.square().mean()))
    return learn(parallelize, model, plus(lambda: 0.1 * model.layers[3].left))


@program(LEFT)
def a_number_read_in_the_loss(parallelize: Parallelize) -> Result:
    """Weighs the loss by what the first block has seen."""
    model = Four(first=leaving(lambda x: x.std().item()))
    return learn(parallelize, model, lambda output, given: cross_entropy(output, given) * model.layers[0].left)


@program()
def an_auxiliary_loss_that_is_returned(parallelize: Parallelize) -> Result:
    """What the sentence says to do instead."""

    class Adds(Block):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), x.square().mean()

    def run(net: Any, x: Tensor) -> Any:
        hidden, one = net.layers[0](net.embed(x))
        hidden, other = net.layers[3](middle(net, hidden))
        return end(net, hidden), one + other

    def loss(output: Any, given: Mapping[str, Tensor]) -> Tensor:
        return cross_entropy(output[0], given) + 0.1 * output[1]

    return learn(parallelize, Four(run, first=Adds, last=Adds), loss)


@program(LEFT)
def activations_caught_by_a_hook_for_the_loss(parallelize: Parallelize) -> Result:
    """A penalty of what the first block puts out."""
    model, caught = Four(), {}
    model.layers[0].register_forward_hook(lambda _, __, output: caught.update(out=output))
    return learn(parallelize, model, plus(lambda: 0.1 * caught["out"].square().mean()))


@program(LEFT)
def a_distillation_of_two_blocks(parallelize: Parallelize) -> Result:
    """The loss holds an early block's output against a late one's."""
    model, caught = Four(), []
    model.layers[0].register_forward_hook(lambda _, __, output: caught.append(output))
    model.layers[3].register_forward_hook(lambda _, __, output: caught.append(output))

    def extra() -> Tensor:
        early, late = caught[-2:]
        caught.clear()
        return (early - late).square().mean()

    return learn(parallelize, model, plus(extra))


# Lists and dictionaries that units append to.


def collecting(make: Callable[[Tensor], Any], join: Callable[[list[Any]], Any]) -> Four:
    """Blocks append to a list of the root, which is emptied at the start and used at the end."""

    class Appends(Block):
        def forward(self, x: Tensor) -> Tensor:
            self.found.append(make(x))
            return super().forward(x)

    def run(net: Any, x: Tensor) -> Tensor:
        net.found.clear()
        hidden = net.layers[3](middle(net, net.layers[0](net.embed(x))))
        return end(net, hidden * join(net.found))

    model = Four(run, first=Appends, last=Appends)
    model.found = model.layers[0].found = model.layers[3].found = []
    return model


@program({**TOGETHER, "place": "leaves tensors with a gradient"})
def a_list_of_tensors_that_units_append_to(parallelize: Parallelize) -> Result:
    """Summed at the end."""
    return learn(parallelize, collecting(lambda x: torch.sigmoid(x.mean()), sum))


@program(LEFT)
def a_list_of_floats_that_units_append_to(parallelize: Parallelize) -> Result:
    """The same by `.item()`."""
    return learn(parallelize, collecting(lambda x: x.std().item(), sum))


@program(LEFT)
def a_list_that_is_counted(parallelize: Parallelize) -> Result:
    """How many blocks have been called is its length."""
    return learn(parallelize, collecting(lambda _: None, len))


@program()
def a_list_that_is_given_to_units(parallelize: Parallelize) -> Result:
    """As an argument, which they append to."""

    class Adds(Block):
        def forward(self, x: Tensor, found: list[Any]) -> Tensor:
            found.append(x.std().item())
            return super().forward(x)

    def run(net: Any, x: Tensor) -> Tensor:
        found: list[float] = []
        hidden = net.layers[3](middle(net, net.layers[0](net.embed(x), found)), found)
        return end(net, hidden * sum(found))

    return learn(parallelize, Four(run, first=Adds, last=Adds))


@program(LEFT)
def a_dictionary_of_states(parallelize: Parallelize) -> Result:
    """A context object that units fill by their names."""

    class Context:
        def __init__(self) -> None:
            self.scales: dict[str, float] = {}

    class Fills(Block):
        def forward(self, x: Tensor, context: Context) -> Tensor:
            context.scales["first"] = x.std().item()
            return super().forward(x)

    def run(net: Any, x: Tensor) -> Tensor:
        context = Context()
        hidden = middle(net, net.layers[0](net.embed(x), context))
        return end(net, net.layers[3](hidden * context.scales.get("first", 1.0)))

    return learn(parallelize, Four(run, first=Fills))


@program()
def hidden_states_collected_by_the_root(parallelize: Parallelize) -> Result:
    """By the root's own forward, from what units return."""

    def run(net: Any, x: Tensor) -> Tensor:
        found = [net.embed(x)]
        for layer in net.layers:
            found.append(layer(found[-1]))
        return end(net, torch.stack(found).mean(0))

    return learn(parallelize, Four(run))


# Views and writes in place.


@program()
def a_view_that_a_later_unit_writes_into(parallelize: Parallelize) -> Result:
    """Of an earlier output, which is then used again."""

    class Writes(Block):
        def forward(self, x: Tensor, view: Tensor | None = None) -> Tensor:
            made = super().forward(x)
            if view is not None:
                view.add_(made[:, :1].detach())
            return made

    def run(net: Any, x: Tensor) -> Tensor:
        early = net.layers[0](net.embed(x))
        board = early.detach().clone()
        hidden = net.layers[3](net.layers[2](net.layers[1](early), board[:, :1]))
        return end(net, hidden + board)

    model = Four(run, first=Block)
    model.layers[2] = Writes()
    return learn(parallelize, model)


@program()
def an_output_written_by_the_root(parallelize: Parallelize) -> Result:
    """In place, between stages."""

    def run(net: Any, x: Tensor) -> Tensor:
        hidden = net.layers[0](net.embed(x))
        hidden = middle(net, hidden)
        hidden[:, 0] += 1
        hidden.mul_(0.5)
        return end(net, net.layers[3](hidden))

    return learn(parallelize, Four(run))


@program()
def a_unit_that_writes_its_input(parallelize: Parallelize) -> Result:
    """And nobody else reads that."""

    class InPlace(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward((x * 1.0).mul_(1.5))

    return learn(parallelize, Four(first=InPlace, last=InPlace))


@program(TOGETHER)
def a_board_that_units_write_to(parallelize: Parallelize) -> Result:
    """A tensor of the root's, made in its forward, with a row for each block."""

    class Writes(Block):
        def forward(self, x: Tensor, board: Tensor, row: int) -> Tensor:
            board[row] = x.detach().std()
            return super().forward(x)

    def run(net: Any, x: Tensor) -> Tensor:
        board = torch.ones(2, dtype=torch.float64)
        hidden = middle(net, net.layers[0](net.embed(x), board, 0))
        return end(net, net.layers[3](hidden, board, 1) * board.prod())

    return learn(parallelize, Four(run, first=Writes, last=Writes))


# Buffers, and numbers that are drawn.


class CountsUp(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return super().forward(x) * (1 - 0.5 ** self.seen.double())


@program()
def a_buffer_that_a_block_counts_up(parallelize: Parallelize) -> Result:
    """And reads: on one stage, which `state_dict()` takes it from."""
    return learn(parallelize, Four(first=CountsUp, last=CountsUp))


@program({"pp": f"stages would have another|{_LEFT}", "place": _LEFT})
def a_buffer_that_the_root_counts_up(parallelize: Parallelize) -> Result:
    """No unit has it."""

    def run(net: Any, x: Tensor) -> Tensor:
        net.seen += 1
        return one_after_the_other(net, x) * (1 - 0.5 ** net.seen.double())

    model = Four(run)
    model.register_buffer("seen", torch.zeros((), dtype=torch.int64))
    return learn(parallelize, model)


@program({"pp": _LEFT})
def a_buffer_of_another_unit(parallelize: Parallelize) -> Result:
    """The first block counts, the last one reads."""

    class Reads(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (1 - 0.5 ** self.other[0].seen.double())

    model = Four(first=CountsUp, last=Reads)
    model.layers[3].other = [model.layers[0]]
    return learn(parallelize, model)


@program()
def an_attribute_tensor_that_a_block_counts_up(parallelize: Parallelize) -> Result:
    """In place, and no buffer."""

    class Counts(Block):
        def __init__(self) -> None:
            super().__init__()
            self.seen = torch.zeros(())

        def forward(self, x: Tensor) -> Tensor:
            self.seen += 1
            return super().forward(x) * (1 - 0.5 ** self.seen.item())

    return learn(parallelize, Four(first=Counts, last=Counts))


@program()
def a_layer_skipped_by_the_forward_count(parallelize: Parallelize) -> Result:
    """A unit decides inside what to compute."""

    class Skips(Block):
        seen = 0

        def forward(self, x: Tensor) -> Tensor:
            self.seen += 1
            return x if self.seen % 3 == 0 else super().forward(x)

    return learn(parallelize, Four(first=Skips, last=Skips))


@program(IN_TURN)
def a_factor_drawn_by_python(parallelize: Parallelize) -> Result:
    """In the root's forward, from Python's own generator, seeded alike on all ranks."""
    random.seed(7)

    def run(net: Any, x: Tensor) -> Tensor:
        factor = 0.5 + random.random()
        hidden = middle(net, net.layers[0](net.embed(x) * factor))
        return end(net, net.layers[3](hidden * factor))

    return learn(parallelize, Four(run))


@program()
def checkpointing_of_the_older_kind(parallelize: Parallelize) -> Result:
    """Inside of blocks: `use_reentrant=True`."""

    class Recomputes(Block):
        def forward(self, x: Tensor) -> Any:
            return checkpoint(super().forward, x, use_reentrant=True)

    return learn(parallelize, Four(first=Recomputes, last=Recomputes))


@program()
def weights_under_a_norm(parallelize: Parallelize) -> Result:
    """`weight_norm` of the older kind leaves its result in an attribute, anew in every forward."""
    model = Four()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        for each in model.layers:
            nn.utils.weight_norm(each.up)
    return learn(parallelize, model)


@program()
def weights_that_are_parametrized(parallelize: Parallelize) -> Result:
    """The newer kind of it, and orthogonal ones."""
    model = Four()
    nn.utils.parametrizations.weight_norm(model.layers[0].up)
    nn.utils.parametrizations.orthogonal(model.layers[3].up)
    return learn(parallelize, model)


@program()
def complex_weights_that_are_clipped(parallelize: Parallelize) -> Result:
    """Both of their parts count in the norm."""

    class Turns(Block):
        def __init__(self) -> None:
            super().__init__()
            self.turn = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64) * 0.3)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward((x.to(self.turn.dtype) @ self.turn).real.to(x.dtype))

    return learn(parallelize, Four(first=Turns), clip=0.1)


@program({"pp": "the loss reads .* parameters"}, but="place")
def a_penalty_of_all_weights_in_the_loss(parallelize: Parallelize) -> Result:
    """The rank that computes the loss has not all of them."""
    model = Four()
    return learn(parallelize, model, plus(lambda: 0.01 * sum(each.square().sum() for each in model.parameters())))


@program()
def a_penalty_of_the_last_weights_in_the_loss(parallelize: Parallelize) -> Result:
    """Those it has."""
    model = Four()
    return learn(parallelize, model, plus(lambda: 0.01 * model.head.weight.square().sum()))
