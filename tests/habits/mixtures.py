"""Mixtures as users write them: stacked experts that know more than their own weights, and lists of experts."""
# Programs as users write them.
# mypy: disable-error-code="no-any-return,no-untyped-call,attr-defined,operator,assignment,override,index,union-attr"

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.habits.harness import Parallelize, Result, batch, cross_entropy, program, sgd, start, trained
from tests.habits.hugging import fitted
from tests.habits.tokens import with_loss

WIDTH, HIDDEN, NUM = 8, 12, 4
FEWER = "beside fewer others they make something else of a token"
READ = "something else in the module reads layers.0.experts.up"


class Experts(nn.Module):
    """Experts in stacked parameters, as in transformers: a loop over them and `index_add_`."""

    def __init__(self, num: int = NUM) -> None:
        super().__init__()
        self.num_experts = num
        self.up = nn.Parameter(torch.randn(num, HIDDEN, WIDTH) / 3)
        self.down = nn.Parameter(torch.randn(num, WIDTH, HIDDEN) / 4)

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        made = torch.zeros_like(tokens)
        for expert in range(self.num_experts):
            row, place = torch.where(chosen == expert)
            part = self.one(expert, tokens[row]) * weights[row, place, None]
            made.index_add_(0, row, part)
        return made

    def one(self, expert: int, x: Tensor) -> Tensor:
        return functional.silu(x @ self.up[expert].T) @ self.down[expert].T


class Mixture(nn.Module):
    """A router, its experts and a shared one."""

    def __init__(self, experts: Callable[[], nn.Module] = Experts, *, top: int = 2) -> None:
        super().__init__()
        self.top = top
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, NUM, bias=False)
        self.experts = experts()
        self.shared = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x)
        flat = hidden.reshape(-1, WIDTH)
        weights, chosen = self.route(flat)
        made = self.experts(flat, chosen, weights)
        return x + made.view_as(x) + self.shared(hidden)

    def route(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = self.router(flat).softmax(-1).topk(self.top, -1)
        return weights / weights.sum(-1, keepdim=True), chosen


class Net(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, WIDTH)
        self.layers = nn.ModuleList(blocks or [Mixture(), Mixture(top=1)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 12, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = layer(hidden)
        scores: Tensor = self.head(self.norm(hidden))
        return scores


def net(experts: Callable[[], nn.Module] = Experts, block: Callable[..., nn.Module] = Mixture) -> nn.Module:
    return Net(block(experts), block(experts, top=1)).double()


@program(only="ep")
def experts_and_a_shared_one(parallelize: Parallelize) -> Result:
    """Tokens travel, and come back weighted."""
    return trained(start(parallelize, net()))


class Indexed(Experts):
    def one(self, expert: int, x: Tensor) -> Tensor:
        return super().one(expert, x) * (1 + 0.2 * expert)


@program({"ep": FEWER}, only="ep")
def an_index_of_an_expert(parallelize: Parallelize) -> Result:
    """Each expert is scaled by its number."""
    return trained(start(parallelize, net(Indexed)))


class Numbered(Experts):
    def one(self, expert: int, x: Tensor) -> Tensor:
        return super().one(expert, x) / self.num_experts**0.5


@program({"ep": FEWER}, only="ep")
def the_number_of_experts(parallelize: Parallelize) -> Result:
    """Outputs are divided by a root of `num_experts`."""
    return trained(start(parallelize, net(Numbered)))


class Buffered(Experts):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.5, 2, NUM))

    def one(self, expert: int, x: Tensor) -> Tensor:
        return super().one(expert, x) * self.scale[expert]


@program({"ep": FEWER}, only="ep")
def a_table_of_experts(parallelize: Parallelize) -> Result:
    """A buffer with an entry for each expert."""
    return trained(start(parallelize, net(Buffered)))


class Listed(Experts):
    def one(self, expert: int, x: Tensor) -> Tensor:
        act = [functional.silu, functional.relu, torch.tanh, functional.gelu][expert]
        return act(x @ self.up[expert].T) @ self.down[expert].T


@program({"ep": FEWER}, only="ep")
def an_activation_for_each_expert(parallelize: Parallelize) -> Result:
    """A list of functions, in the order of experts."""
    return trained(start(parallelize, net(Listed)))


class Centred(Experts):
    def one(self, expert: int, x: Tensor) -> Tensor:
        up = self.up - self.up.mean(0)
        return functional.silu(x @ up[expert].T) @ self.down[expert].T


@program({"ep": FEWER}, only="ep")
def weights_centred_over_experts(parallelize: Parallelize) -> Result:
    """The mean of all experts is taken off each."""
    return trained(start(parallelize, net(Centred)))


class Normed(Experts):
    def one(self, expert: int, x: Tensor) -> Tensor:
        up = self.up / self.up.norm() * 5
        return functional.silu(x @ up[expert].T) @ self.down[expert].T


@program({"ep": FEWER}, only="ep")
def weights_by_the_norm_of_all(parallelize: Parallelize) -> Result:
    """Weights are divided by the norm of all experts together."""
    return trained(start(parallelize, net(Normed)))


class Standard(Experts):
    def one(self, expert: int, x: Tensor) -> Tensor:
        return super().one(expert, (x - x.mean(0)) if len(x) > 1 else x)


@program({"ep": "rows see each other in layers.0.experts"}, only="ep")
def tokens_of_an_expert_centred(parallelize: Parallelize) -> Result:
    """An expert takes the mean of its tokens off each."""
    return trained(start(parallelize, net(Standard)))


class Full(Experts):
    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        made = torch.zeros_like(tokens)
        room = int(1.0 * chosen.numel() / self.num_experts)
        for expert in range(self.num_experts):
            row, place = torch.where(chosen == expert)
            row, place = row[:room], place[:room]
            made.index_add_(0, row, self.one(expert, tokens[row]) * weights[row, place, None])
        return made


@program({"ep": "rows see each other in layers.0.experts"}, only="ep")
def a_capacity_inside(parallelize: Parallelize) -> Result:
    """An expert takes the first tokens that choose it."""
    return trained(start(parallelize, net(Full)))


@program({"ep": "is not the sum of what each expert chosen makes"}, only="ep")
def a_capacity_inside_of_each_part(parallelize: Parallelize) -> Result:
    """The same where the mean of each part is said to be meant: under ep an expert has the tokens of all."""

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> tuple[Tensor, int]:
        return cross_entropy(output, given), 1

    return trained(parallelize(net(Full), loss=loss, optimizer=sgd, example=batch(0)))


class Counted(Experts):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(NUM))

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        if self.training:
            self.seen += torch.bincount(chosen.flatten(), minlength=NUM)
        return super().forward(tokens, chosen, weights)


@program({"ep": "2 replicas have 2 different ones"}, only="ep")
def a_count_inside(parallelize: Parallelize) -> Result:
    """A buffer counts how often experts are chosen."""
    return trained(start(parallelize, net(Counted)))


class Reading(Mixture):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + 0.1 * self.experts.up.square().mean())


@program({"ep": READ}, only="ep")
def weights_read_by_the_block(parallelize: Parallelize) -> Result:
    """A scale from the weights of all experts."""
    return trained(start(parallelize, net(block=Reading)))


class Merged(Mixture):
    """A shared path of the mean expert."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.norm(x) @ self.experts.up.mean(0).T @ self.experts.down.mean(0).T


@program({"ep": READ}, only="ep")
def a_mean_expert(parallelize: Parallelize) -> Result:
    """The block itself computes with the mean of all experts."""
    return trained(start(parallelize, net(block=Merged)))


@program({"ep": "the loss reads 4 parameters"}, only="ep")
def a_penalty_on_all_parameters(parallelize: Parallelize) -> Result:
    """A regulariser in the loss."""
    model = net()

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        return cross_entropy(output, given) + 0.01 * sum(each.square().sum() for each in model.parameters())

    return trained(parallelize(model, loss=loss, optimizer=sgd, example=batch(0)))


@program({"ep": "the loss reads 1 parameters"}, only="ep")
def a_penalty_on_experts_that_are_alike(parallelize: Parallelize) -> Result:
    """Products of experts with each other, in the loss."""
    model = net()

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        up = model.layers[0].experts.up.flatten(1)
        return cross_entropy(output, given) + 0.01 * (up @ up.T).square().mean()

    return trained(parallelize(model, loss=loss, optimizer=sgd, example=batch(0)))


@program(only="ep")
def experts_shared_by_layers(parallelize: Parallelize) -> Result:
    """Two layers with routers of their own have the same experts."""
    experts = Experts()
    return trained(start(parallelize, net(lambda: experts)))


@program({"ep": "a parameter of theirs is also layers.1.experts.up"}, only="ep")
def weights_tied_between_layers(parallelize: Parallelize) -> Result:
    """One parameter of two layers of experts."""
    model = net()
    model.layers[1].experts.up = model.layers[0].experts.up
    return trained(start(parallelize, model))


class Swapped(Experts):
    def forward(self, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        return super().forward(tokens, chosen, weights)


class MixtureSwapped(Mixture):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x)
        flat = hidden.reshape(-1, WIDTH)
        weights, chosen = self.route(flat)
        return x + self.experts(flat, weights, chosen).view_as(x) + self.shared(hidden)


@program({"ep": "is not called with tokens"}, only="ep")
def arguments_in_another_order(parallelize: Parallelize) -> Result:
    """Weights before choices."""
    return trained(start(parallelize, net(Swapped, block=MixtureSwapped)))


class Shaped(Experts):
    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        flat = tokens.reshape(-1, WIDTH)
        made = super().forward(flat, chosen.reshape(len(flat), -1), weights.reshape(len(flat), -1))
        return made.view_as(tokens)


class MixtureShaped(Mixture):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x)
        weights, chosen = self.route(hidden)
        return x + self.experts(hidden, chosen, weights) + self.shared(hidden)


@program(only="ep")
def choices_by_rows_and_tokens(parallelize: Parallelize) -> Result:
    """Tokens that are not flattened."""
    return trained(start(parallelize, net(Shaped, block=MixtureShaped)))


class MixtureTop1(Mixture):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x)
        flat = hidden.reshape(-1, WIDTH)
        weight, chosen = self.router(flat).softmax(-1).max(-1)
        return x + self.experts(flat, chosen, weight).view_as(x) + self.shared(hidden)


class Experts1(Experts):
    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        made = torch.zeros_like(tokens)
        for expert in range(self.num_experts):
            row = chosen == expert
            made[row] = self.one(expert, tokens[row]) * weights[row][:, None]
        return made


@program(only="ep")
def one_choice_without_a_dim(parallelize: Parallelize) -> Result:
    """The choice of the best expert alone, as `max` returns it."""
    return trained(start(parallelize, net(Experts1, block=MixtureTop1)))


class MixtureDropped(Mixture):
    def route(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = super().route(flat)
        return weights, torch.where(weights < 0.45, NUM, chosen)


@program(only="ep")
def dropped_choices_have_no_expert(parallelize: Parallelize) -> Result:
    """A router drops choices: their expert is one past the last."""
    return trained(start(parallelize, net(block=MixtureDropped)))


class MixtureMinus(Mixture):
    def route(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = super().route(flat)
        return weights, torch.where(weights < 0.45, -1, chosen)


@program(only="ep")
def dropped_choices_are_minus_one(parallelize: Parallelize) -> Result:
    """The same, with -1."""
    return trained(start(parallelize, net(block=MixtureMinus)))


class Wide(Experts):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(NUM, 2 * WIDTH, HIDDEN) / 4)

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        made = tokens.new_zeros(len(tokens), 2 * WIDTH)
        for expert in range(self.num_experts):
            row, place = torch.where(chosen == expert)
            made.index_add_(0, row, self.one(expert, tokens[row]) * weights[row, place, None])
        return made


class MixtureWide(Mixture):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x)
        flat = hidden.reshape(-1, WIDTH)
        weights, chosen = self.route(flat)
        one, other = self.experts(flat, chosen, weights).chunk(2, -1)
        return x + (one * other.sigmoid()).view_as(x)


@program({"ep": "a token has 8 numbers, and its output 16"}, only="ep")
def outputs_wider_than_tokens(parallelize: Parallelize) -> Result:
    """Experts whose outputs are two halves of a gate."""
    return trained(start(parallelize, net(Wide, block=MixtureWide)))


class Dense(Experts):
    """All experts compute all tokens, as gpt-oss does in evaluation."""

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        full = torch.zeros(len(tokens), self.num_experts, dtype=tokens.dtype).scatter(1, chosen, weights)
        each = functional.silu(torch.einsum("tw,ehw->teh", tokens, self.up))
        return torch.einsum("teh,ewh,te->tw", each, self.down, full)


@program(only="ep")
def all_experts_at_once(parallelize: Parallelize) -> Result:
    """Einsums of all tokens with all experts."""
    return trained(start(parallelize, net(Dense)))


class Tupled(Experts):
    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Any:
        return super().forward(tokens, chosen, weights), weights.square().mean()


class MixtureTupled(Mixture):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x)
        flat = hidden.reshape(-1, WIDTH)
        weights, chosen = self.route(flat)
        made, extra = self.experts(flat, chosen, weights)
        return x + made.view_as(x) * (1 + extra)


@program({"ep": "rows see each other in layers.0"}, only="ep")
def outputs_with_something_beside(parallelize: Parallelize) -> Result:
    """Experts return a penalty, too."""
    return trained(start(parallelize, net(Tupled, block=MixtureTupled)))


class MixtureTwice(Mixture):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(super().forward(x)).reshape(-1, WIDTH)
        weights, chosen = self.route(hidden)
        return x + self.experts(hidden, chosen, weights).view_as(x)


@program(only="ep")
def experts_called_twice(parallelize: Parallelize) -> Result:
    """Two calls in one block."""
    return trained(start(parallelize, net(block=MixtureTwice)))


class Biased(Experts):
    def __init__(self) -> None:
        super().__init__()
        self.up_bias = nn.Parameter(torch.randn(NUM, HIDDEN) / 3)

    def one(self, expert: int, x: Tensor) -> Tensor:
        return functional.silu(x @ self.up[expert].T + self.up_bias[expert]) @ self.down[expert].T


@program(only="ep")
def experts_with_biases(parallelize: Parallelize) -> Result:
    """A bias for each expert."""
    return trained(start(parallelize, net(Biased)))


class Router3(nn.Module):
    """A router with num_experts, one weight and three arguments: no experts."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = NUM
        self.weight = nn.Parameter(torch.randn(NUM, WIDTH))

    def forward(self, x: Tensor, top: int, scale: float) -> Any:
        return (scale * x @ self.weight.T).softmax(-1).topk(top, -1)


class MixtureRouter(Mixture):
    def __init__(self, experts: Callable[[], nn.Module], *, top: int = 2) -> None:
        super().__init__(experts, top=top)
        self.router = Router3()

    def route(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = self.router(flat, self.top, 0.7)
        return weights / weights.sum(-1, keepdim=True), chosen


@program(only="ep")
def a_router_that_looks_like_experts(parallelize: Parallelize) -> Result:
    """A router with `num_experts`, one row of a weight for each, and three arguments."""
    return trained(start(parallelize, net(block=MixtureRouter)))


class RouterT(Router3):
    def forward(self, x: Tensor, bias: Tensor, scale: Tensor) -> Any:
        return (scale * x @ self.weight.T + bias).softmax(-1)


class MixtureRouterT(Mixture):
    def __init__(self, experts: Callable[[], nn.Module], *, top: int = 2) -> None:
        super().__init__(experts, top=top)
        self.router = RouterT()
        self.register_buffer("bias", torch.linspace(0, 1, NUM))
        self.register_buffer("scale", torch.tensor(0.7))

    def route(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = self.router(flat, self.bias, self.scale).topk(self.top, -1)
        return weights / weights.sum(-1, keepdim=True), chosen


@program(only="ep")
def a_router_of_three_tensors(parallelize: Parallelize) -> Result:
    """The same with tensors."""
    return trained(start(parallelize, net(block=MixtureRouterT)))


class Prototypes(nn.Module):
    """Experts that look at no token."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = NUM
        self.table = nn.Parameter(torch.randn(NUM, WIDTH))

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return (self.table[chosen] * weights[..., None]).sum(1).view_as(tokens)


@program(only="ep")
def vectors_for_each_choice(parallelize: Parallelize) -> Result:
    """A vector for each expert, whatever the token."""
    return trained(start(parallelize, net(Prototypes)))


class Residual(Experts):
    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return tokens + super().forward(tokens, chosen, weights)


@program({"ep": "is not the sum"}, only="ep")
def a_residual_inside(parallelize: Parallelize) -> Result:
    """Experts add what they make to the tokens."""
    return trained(start(parallelize, net(Residual)))


class Accumulating(Experts):
    """Notes a mean of its weights."""

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        made = super().forward(tokens, chosen, weights)
        self.last = weights.detach().mean()
        return made


class MixtureLast(Mixture):
    def forward(self, x: Tensor) -> Tensor:
        made = super().forward(x)
        return made * (1 + self.experts.last)


@program({"ep": "leaves something in last, and with a part of the rows others"}, only="ep")
def an_attribute_left_by_experts(parallelize: Parallelize) -> Result:
    """The block scales its output by a mean that the experts have noted."""
    return trained(start(parallelize, net(Accumulating, block=MixtureLast)))


class SortedExperts(Experts):
    """argsort and split, as in DeepSeek's own code."""

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        top = chosen.shape[1]
        counts = torch.bincount(chosen.flatten(), minlength=self.num_experts).tolist()
        order = chosen.flatten().argsort(stable=True)
        rows = tokens[order // top].split(counts)
        made = torch.cat([self.one(i, each) for i, each in enumerate(rows)])
        back = torch.empty_like(made)
        back[order] = made
        return (back.view(len(tokens), top, -1) * weights[..., None]).sum(1)


@program(only="ep")
def tokens_sorted_and_split(parallelize: Parallelize) -> Result:
    """As in the code of DeepSeek: sorted by expert, and put back."""
    return trained(start(parallelize, net(SortedExperts)))


class SortedExperts4(SortedExperts):
    """With the number of experts as a constant of the file."""

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        made = torch.zeros_like(tokens)
        for expert in range(NUM):
            row, place = torch.where(chosen == expert)
            if len(row):
                made.index_add_(0, row, self.one(expert, tokens[row]) * weights[row, place, None])
        return made


@program(only="ep")
def a_constant_number(parallelize: Parallelize) -> Result:
    """A loop over as many experts as the file says."""
    return trained(start(parallelize, net(SortedExperts4)))


class Noisy(Mixture):
    def route(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.router(flat)
        scores = scores + torch.randn_like(scores) * functional.softplus(scores) * 0.0
        weights, chosen = scores.softmax(-1).topk(self.top, -1)
        return weights, chosen


@program(only="ep")
def a_noisy_gate_without_noise(parallelize: Parallelize) -> Result:
    """Noise that is drawn, and multiplied by 0."""
    return trained(start(parallelize, net(block=Noisy)))


class ZLoss(Net):
    def forward(self, x: Tensor) -> Any:
        hidden = self.embed(x)
        extra = 0.0
        for layer in self.layers:
            extra = extra + torch.logsumexp(layer.router(layer.norm(hidden)), -1).square().mean()
            hidden = layer(hidden)
        return self.head(self.norm(hidden)), extra


def with_extra(output: Any, given: Mapping[str, Tensor]) -> Tensor:
    return cross_entropy(output[0], given) + 0.1 * output[1]


@program({"ep": FEWER}, only="ep")
def a_noisy_gate_and_an_index(parallelize: Parallelize) -> Result:
    """Where steps draw, none is compared with one process."""
    return trained(start(parallelize, net(Indexed, block=Noisy)))


@program(only="ep")
def a_z_loss(parallelize: Parallelize) -> Result:
    """The mean of squared logsumexps, beside the scores."""
    model = ZLoss(Mixture(), Mixture(top=1)).double()
    return trained(parallelize(model, loss=with_extra, optimizer=sgd, example=batch(0)))


@program(only="ep", as_it_is=True, whole=True)
def a_z_loss_of_parts(parallelize: Parallelize) -> Result:
    """The same as a sum over tokens and their number, which parts of sequences have too."""

    def loss(output: Any, given: Mapping[str, Tensor]) -> tuple[Tensor, int]:
        number = given["labels"].numel()
        return with_extra(output, given) * number, number

    model = ZLoss(Mixture(), Mixture(top=1)).double()
    return with_loss(parallelize, loss, model)


@program(only="ep", as_it_is=True, whole=True)
def a_mean_over_labels_beside_experts(parallelize: Parallelize) -> Result:
    """`cross_entropy`, with nothing said of its labels."""
    return with_loss(parallelize, cross_entropy, net())


class Switch(Net):
    def forward(self, x: Tensor) -> Any:
        hidden = self.embed(x)
        extra = 0.0
        for layer in self.layers:
            probabilities = layer.router(layer.norm(hidden)).softmax(-1).flatten(0, -2)
            chosen = functional.one_hot(probabilities.argmax(-1), NUM).to(probabilities.dtype)
            extra = extra + NUM * (chosen.mean(0) * probabilities.mean(0)).sum()
            hidden = layer(hidden)
        return self.head(self.norm(hidden)), extra


@program({"ep": "rows see each other in the loss"}, only="ep")
def a_switch_loss(parallelize: Parallelize) -> Result:
    """A balancing loss of means over all tokens, beside the scores."""
    model = Switch(Mixture(), Mixture(top=1)).double()
    return trained(parallelize(model, loss=with_extra, optimizer=sgd, example=batch(0)))


class BiasUpdated(Mixture):
    """Aux-loss-free: the bias is moved in forward."""

    def __init__(self, experts: Callable[[], nn.Module], *, top: int = 2) -> None:
        super().__init__(experts, top=top)
        self.register_buffer("bias", torch.zeros(NUM))

    def route(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.router(flat).sigmoid()
        chosen = (scores + self.bias).topk(self.top, -1).indices
        if self.training:
            load = torch.bincount(chosen.flatten(), minlength=NUM).double()
            self.bias += 0.01 * torch.sign(load.mean() - load)
        weights = scores.gather(1, chosen)
        return weights / weights.sum(-1, keepdim=True), chosen


@program({"ep": "2 replicas have 2 different ones"}, only="ep")
def a_bias_moved_in_forward(parallelize: Parallelize) -> Result:
    """Balance without a loss: each forward moves a bias of choices."""
    return trained(start(parallelize, net(block=BiasUpdated)))


@program(only="ep")
def a_bias_moved_between_steps(parallelize: Parallelize) -> Result:
    """The same between steps, alike on every rank."""

    class Later(BiasUpdated):
        def route(self, flat: Tensor) -> tuple[Tensor, Tensor]:
            scores = self.router(flat).sigmoid()
            chosen = (scores + self.bias).topk(self.top, -1).indices
            weights = scores.gather(1, chosen)
            return weights / weights.sum(-1, keepdim=True), chosen

    model = net(block=Later)
    engine = start(parallelize, model)

    def move(step: int) -> None:
        for layer in engine.module.layers:
            layer.bias += 0.05 * torch.tensor([1.0, -1, 1, -1]) * (step + 1)

    return trained(engine, between=move)


class Mixed(nn.Module):
    """Soft mixture: slots are averages of all tokens of a row (SoftMoE)."""

    def __init__(self) -> None:
        super().__init__()
        self.phi = nn.Parameter(torch.randn(WIDTH, NUM))
        self.experts = Experts()

    def forward(self, x: Tensor) -> Tensor:
        scores = x @ self.phi
        slots = scores.softmax(1).transpose(1, 2) @ x
        flat = slots.reshape(-1, WIDTH)
        chosen = torch.arange(NUM).repeat(len(x))[:, None]
        made = self.experts(flat, chosen, torch.ones_like(chosen, dtype=x.dtype))
        return x + scores.softmax(-1) @ made.view(len(x), NUM, WIDTH)


@program(only="ep")
def a_soft_mixture(parallelize: Parallelize) -> Result:
    """Slots of all tokens of a row, one for each expert."""
    return trained(start(parallelize, Net(Mixed(), Mixed()).double()))


class ExpertChoice(nn.Module):
    """Experts choose tokens of their row: capacity 2 of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, NUM)
        self.experts = Experts()

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).softmax(-1)
        weight, which = scores.topk(2, 1)  # rows, 2, experts
        rows = torch.arange(len(x))[:, None, None].expand_as(which)
        picked = x[rows, which].reshape(-1, WIDTH)
        chosen = torch.arange(NUM).expand_as(which).reshape(-1, 1)
        made = self.experts(picked, chosen, weight.reshape(-1, 1))
        out = torch.zeros_like(x).view(-1, WIDTH)
        out = out.index_add(0, (rows * x.shape[1] + which).reshape(-1), made)
        return x + out.view_as(x)


@program(only="ep")
def experts_that_choose(parallelize: Parallelize) -> Result:
    """Each expert chooses two tokens of a row."""
    return trained(start(parallelize, Net(ExpertChoice(), ExpertChoice()).double()))


@program(only="ep")
def a_mixture_of_transformers(parallelize: Parallelize) -> Result:
    """Qwen3-MoE, whose gate is a parameter of the router and whose experts are stacked."""
    import transformers as hf

    config = hf.Qwen3MoeConfig(
        vocab_size=24, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, head_dim=4,
        num_key_value_heads=2, max_position_embeddings=16, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=12, pad_token_id=0, bos_token_id=1, eos_token_id=2, experts_implementation="eager",
    )  # fmt: skip
    model = hf.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for each in model.parameters():
            each.mul_(4 if each.dim() > 1 else 1)  # From 0.02: routers should prefer some experts.
    return fitted(parallelize, model.double())


@program({"ep": "its 4 experts are modules"}, only="ep")
def a_list_of_experts(parallelize: Parallelize) -> Result:
    """Modules in a list, whose forward takes tokens, choices and weights."""

    class Loop(nn.ModuleList):
        def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
            made = torch.zeros_like(tokens)
            for number, each in enumerate(self):
                row, place = torch.where(chosen == number)
                made.index_add_(0, row, each(tokens[row]) * weights[row, place, None])
            return made

    return trained(start(parallelize, net(lambda: Loop(nn.Linear(WIDTH, WIDTH) for _ in range(NUM)))))
