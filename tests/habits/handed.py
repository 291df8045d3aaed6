"""What blocks hand on and reach in odd ways: objects that they write into, conjugates, the root itself; seeds that a
forward sets, gradients that it asks for; and groups and optimizers that are taken apart or wrapped."""
# Programs as users write them.
# mypy: disable-error-code="no-untyped-call,no-any-return,assignment,override,arg-type,index,union-attr,operator"

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.habits.harness import (
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

PARTS = dict.fromkeys(("dp", "microbatches"), "do not tell its loss")
TAKEN = "parameters were taken out of a group of SGD"
#: Optimizers that have other things than whole parameters, all of them.
PIECES = ("zero=1", "zero=2", "zero=3", "tp", "pp", "offload.optimizer", "offload.parameters")


class Looped(Net):
    """A net that hands one thing from block to block."""

    def begin(self, hidden: Tensor) -> Any:
        return hidden

    def end(self, held: Any) -> Tensor:
        return held

    def forward(self, x: Tensor) -> Tensor:
        held = self.begin(self.embed(x))
        for layer in self.layers:
            held = layer(held)
        return self.head(self.norm(self.end(held)))


class Seeded(Block):
    """Noise for each channel from a generator that is made in the forward: the same whenever it is run."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(self.norm(x)))
        generator = torch.Generator().manual_seed(3)
        noise = torch.randn(hidden.shape[-1], generator=generator, dtype=x.dtype)
        return x + self.down(hidden + 0.1 * noise)


@program(always=True, only="tp")
def noise_of_a_seed_on_channels(parallelize: Parallelize) -> Result:
    """Ranks that have other channels would draw the same for them."""
    return trained(start(parallelize, small_net(block=Seeded)))


class OfTokens(Block):
    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(3), dtype=x.dtype)
        return super().forward(x + 0.1 * noise)


@program({**PARTS, "cp": "other numbers"}, only="cp")
def noise_of_a_seed_on_tokens(parallelize: Parallelize) -> Result:
    """The same for tokens."""
    return trained(start(parallelize, small_net(block=OfTokens)))


@dataclass
class State:
    hidden: Tensor
    kept: list[Tensor] = field(default_factory=list)


@program()
def a_state_that_blocks_write(parallelize: Parallelize) -> Result:
    """A dataclass whose fields each block writes: with recomputation the second forward finds what the first found."""

    class Writing(Block):
        def forward(self, state: State) -> State:
            state.hidden = super().forward(state.hidden)
            state.kept.append(state.hidden.mean(-1, keepdim=True))
            return state

    class Stateful(Looped):
        def begin(self, hidden: Tensor) -> State:
            return State(hidden)

        def end(self, held: State) -> Tensor:
            return held.hidden + sum(held.kept)

    return trained(start(parallelize, Stateful(block=Writing).double()))


@program()
def a_dictionary_that_blocks_fill(parallelize: Parallelize) -> Result:
    """`cache[i + 1] = ...`, and nothing is returned: a backward begins at what was left there."""

    class Filling(Block):
        def forward(self, cache: dict[int, Tensor]) -> None:
            cache[len(cache)] = super().forward(cache[len(cache) - 1])

    class Cached(Net):
        def forward(self, x: Tensor) -> Tensor:
            cache = {0: self.embed(x)}
            for layer in self.layers:
                layer(cache)
            return self.head(self.norm(torch.stack(list(cache.values())).sum(0)))

    return trained(start(parallelize, Cached(block=Filling).double()))


@program()
def a_list_that_blocks_append_to(parallelize: Parallelize) -> Result:
    """Hidden states of all blocks, for the end; blocks read it too, and sequences of another length come later."""

    class Appending(Block):
        def forward(self, x: Tensor, kept: list[Tensor], found: dict[str, Any]) -> Tensor:
            before = kept[-1] if kept else 0
            kept.append(x.mean(-1, keepdim=True))
            found["count"] = found.get("count", 0) + 1
            found.setdefault("means", []).append(kept[-1] * found["count"])
            return super().forward(x) + before

    class Collecting(Net):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.embed(x)
            kept: list[Tensor] = []
            found: dict[str, Any] = {}
            for layer in self.layers:
                hidden = layer(hidden, kept, found=found)
            return self.head(self.norm(hidden * found["count"] + kept[0] + sum(found["means"])))

    engine = start(parallelize, Collecting(block=Appending).double())
    shorter = {name: each[:, :2] for name, each in batch(9).items()}
    return trained(engine) | {"shorter": engine.train_step(shorter), "evaluated": engine.evaluate(batch(8))}


@program()
def a_list_that_grows_in_training_alone(parallelize: Parallelize) -> Result:
    """Evaluations have stages of their own: what is sent in training alone is not missed."""

    class Appending(Block):
        def forward(self, x: Tensor, kept: list[Tensor]) -> Tensor:
            if self.training:
                kept.append(x.mean(-1, keepdim=True))
            return super().forward(x)

    class Collecting(Net):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.embed(x)
            kept: list[Tensor] = []
            for layer in self.layers:
                hidden = layer(hidden, kept)
            return self.head(self.norm(hidden + sum(kept)))

    engine = start(parallelize, Collecting(block=Appending).double())
    return trained(engine) | {"evaluated": engine.evaluate(batch(8))}


@program()
def hooks_that_write_into_what_comes_out(parallelize: Parallelize) -> Result:
    """Ablations, steering: `output[..., 0] = 0`, `output.mul_(0.5)`. A stage that is sent it must not do it again."""

    def ablate(_: nn.Module, __: Any, output: Tensor) -> None:
        output[..., 0] = 0

    def damp(_: nn.Module, __: Any, output: Tensor) -> None:
        output.data.mul_(0.5)

    model = small_net()
    model.embed.register_forward_hook(lambda _, __, output: output.mul_(0.5))
    model.layers[0].register_forward_hook(ablate)
    model.layers[0].register_forward_hook(damp)
    return trained(start(parallelize, model))


@program()
def hooks_that_collect_and_write(parallelize: Parallelize) -> Result:
    """A hook that counts, keeps and writes is called once for each output, wherever the layer runs."""

    class Kept(Net):
        def __init__(self) -> None:
            super().__init__()
            self.layers.extend([Block(), Block()])

        def forward(self, x: Tensor) -> Tensor:
            kept: list[Tensor] = []

            def collect(_: nn.Module, __: Any, output: Tensor) -> None:
                kept.append(output)
                output[..., 0] = 0

            hooks = [each.register_forward_hook(collect) for each in self.layers]
            made = super().forward(x)
            for each in hooks:
                each.remove()
            return made * (1 + 0.1 * len(kept))

    return trained(start(parallelize, Kept().double()))


@program()
def conjugates_between_blocks(parallelize: Parallelize) -> Result:
    """`conj()` is the memory of another tensor and a mark, which a message has to bring too."""

    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8, dtype=torch.complex128) * 0.3)

        def forward(self, x: Tensor) -> Tensor:
            return (x + torch.tanh(x.real) * (x @ self.weight)).conj()

    class Net(Looped):
        def begin(self, hidden: Tensor) -> Tensor:
            return torch.complex(hidden, hidden * 0.5)

        def end(self, held: Tensor) -> Tensor:
            return held.real + held.imag

    model = Net().double()
    model.layers = nn.ModuleList([Complex(), Complex()])
    return trained(start(parallelize, model))


@program()
def a_root_that_blocks_know(parallelize: Parallelize) -> Result:
    """Blocks reach the root through a list, which hides it from torch, and read its embedding."""

    class Knowing(Block):
        def __init__(self) -> None:
            super().__init__()
            self.root: list[Net] = []

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 0.1 * self.root[0].embed.weight.mean(0)

    model = small_net(block=Knowing)
    for each in model.layers:
        each.root.append(model)
    return trained(start(parallelize, model))


@program(PARTS, but="cp", whole=True)
def a_seed_in_the_forward(parallelize: Parallelize) -> Result:
    """`torch.manual_seed(0)` in training, then noise: the third row has always the same."""

    class Seeded(Looped):
        def begin(self, hidden: Tensor) -> Tensor:
            if not self.training:
                return hidden
            torch.manual_seed(0)
            return hidden + 0.1 * torch.randn(hidden.shape, dtype=hidden.dtype)

    return trained(start(parallelize, Seeded().double()))


@program({"all": "asks for gradients, and the example is run without|does not run on the meta device"}, but="cp")
def gradients_asked_for_without_a_word(parallelize: Parallelize) -> Result:
    """`torch.autograd.grad` in the forward, which plain torch cannot evaluate under `no_grad` either."""

    class Inner(Looped):
        def begin(self, hidden: Tensor) -> Tensor:
            weight = self.layers[0].up.weight
            (slope,) = torch.autograd.grad(functional.linear(hidden, weight).pow(2).mean(), weight, create_graph=True)
            return hidden + functional.linear(hidden, weight - 0.5 * slope)[..., :8]

    return trained(start(parallelize, Inner().double()))


@program(dict.fromkeys(PIECES, TAKEN))
def a_parameter_taken_out_by_its_place(parallelize: Parallelize) -> Result:
    """`param_groups[0]["params"].pop(0)` between steps."""
    engine = start(parallelize, small_net())

    def between(step: int) -> None:
        if step == 0:
            engine.optimizers[0].param_groups[0]["params"].pop(0)

    return trained(engine, between=between)


@program({f"zero={number}": TAKEN for number in (1, 2, 3)})
def a_parameter_searched_for_in_its_group(parallelize: Parallelize) -> Result:
    """Taken out by identity: where there are pieces nothing is found."""
    model = small_net()
    engine = start(parallelize, model)
    weight = model.head.weight

    def between(_: int) -> None:
        for optimizer in engine.optimizers:
            for group in optimizer.param_groups:
                group["params"] = [each for each in group["params"] if each is not weight]

    return trained(engine, between=between)


class Lookahead(torch.optim.Optimizer):
    """As it is copied around: no `super().__init__`, and slow weights in a list."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base, self.count = base, 0
        self.param_groups, self.defaults, self.state = base.param_groups, base.defaults, base.state
        self.slow = [each.detach().clone() for group in self.param_groups for each in group["params"]]

    def step(self, closure: Any = None) -> None:  # noqa: ARG002 - as torch has it
        self.base.step()
        self.count += 1
        if self.count % 2 == 0:
            every = [each for group in self.param_groups for each in group["params"]]
            for slow, each in zip(self.slow, every, strict=False):
                slow.add_(each.data - slow, alpha=0.5)
                each.data.copy_(slow)


@program(dict.fromkeys(PIECES, "keeps .* tensors that were made|whether Lookahead can update a piece"))
def an_optimizer_around_another(parallelize: Parallelize) -> Result:
    """Which of the slow weights belongs to which parameter is told by places."""
    return trained(start(parallelize, small_net(), lambda parameters: Lookahead(sgd(parameters))))


@program(
    dict.fromkeys(("dp", "cp", "microbatches"), "calls backward\\(\\) itself|gradients are asked for in a forward")
)
def a_backward_inside_of_the_forward(parallelize: Parallelize) -> Result:
    """`auxiliary.backward(retain_graph=True)`: gradients are there before those of the loss."""

    class Impatient(Looped):
        def end(self, held: Tensor) -> Tensor:
            if held.requires_grad and self.training:
                (0.1 * held.pow(2).mean()).backward(retain_graph=True)
            return held

    return trained(start(parallelize, Impatient().double()))


@program({"pp": "the loss reads 1 buffers"})
def a_buffer_of_a_block_in_the_loss(parallelize: Parallelize) -> Result:
    """A buffer of the first block: the last stage has none."""
    model = small_net()
    model.layers[0].register_buffer("scale", torch.full((), 2.0, dtype=torch.float64))
    engine = parallelize(
        model,
        loss=lambda output, given: cross_entropy(output * model.layers[0].scale, given),
        optimizer=sgd,
        example=batch(0),
    )
    return trained(engine)


class Handing(Net):
    """A net that makes something, gives it to every block, and reads it at the end."""

    def __init__(self, block: type[nn.Module], make: Any, read: Any) -> None:
        super().__init__(block=block)
        self.layers.extend([block(), block()])
        self.make, self.read = make, read

    def forward(self, x: Tensor) -> Tensor:
        held, hidden = self.make(), self.embed(x)
        for number, layer in enumerate(self.layers):
            hidden = layer(hidden, held, number)
        return self.head(self.norm(hidden) + self.read(held))


class Cache:
    """A class of one's own, as caches and recorders are."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []
        self.seen = 0

    def update(self, found: Tensor) -> Tensor:
        self.kept.append(found)
        self.seen += 1
        return self.kept[0] * self.seen


@program()
def an_object_of_ones_own_that_blocks_fill(parallelize: Parallelize) -> Result:
    """Each block keeps something in it, and reads what the first has kept."""

    class Caching(Block):
        def forward(self, x: Tensor, cache: Cache, number: int) -> Tensor:
            return super().forward(x) + cache.update(x.mean(-1, keepdim=True)) * number

    return trained(start(parallelize, Handing(Caching, Cache, lambda held: held.kept[1] * held.seen).double()))


@dataclass
class Sums:
    term: Any = None
    count: int = 0


@program()
def a_dataclass_that_blocks_add_to(parallelize: Parallelize) -> Result:
    """A term is None at first, and blocks return something else."""

    class Adding(Block):
        def forward(self, x: Tensor, sums: Sums, _: int) -> Tensor:
            found = x.mean(-1, keepdim=True)
            sums.term = found if sums.term is None else sums.term + found
            sums.count += 1
            return super().forward(x)

    return trained(start(parallelize, Handing(Adding, Sums, lambda held: held.term / held.count).double()))


@program()
def a_namespace_that_blocks_add_to(parallelize: Parallelize) -> Result:
    """`SimpleNamespace()`, with attributes that come one by one."""

    class Adding(Block):
        def forward(self, x: Tensor, held: SimpleNamespace, number: int) -> Tensor:
            held.term = getattr(held, "term", 0) + (1 + number) * x.mean(-1, keepdim=True)
            return super().forward(x)

    return trained(start(parallelize, Handing(Adding, SimpleNamespace, lambda held: held.term).double()))


@program()
def a_set_that_blocks_fill(parallelize: Parallelize) -> Result:
    """The numbers of blocks that have run."""

    class Noting(Block):
        def forward(self, x: Tensor, seen: set[int], number: int) -> Tensor:
            seen.add(number % 3)
            return super().forward(x) * len(seen)

    return trained(start(parallelize, Handing(Noting, set, lambda held: 0.1 * len(held)).double()))


@program()
def a_cache_of_transformers(parallelize: Parallelize) -> Result:
    """`DynamicCache`, of which each block reads its own entry."""
    from transformers import DynamicCache

    class Attending(Block):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(8, 24)

        def forward(self, x: Tensor, cache: DynamicCache, number: int) -> Tensor:
            query, key, value = (each.unflatten(-1, (2, 4)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
            key, value = cache.update(key, value, number)
            made = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            return super().forward(x + made.transpose(1, 2).flatten(2))

    return trained(start(parallelize, Handing(Attending, DynamicCache, lambda _: 0.0).double()))
