"""Weights that are used again, scores that are changed, and experts of one's own."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.habits.tensor_models import HIDDEN, LENGTH, WIDTH, WORDS, Feed, Loss, Model, entropy, program, tokens

ALL_OF_FEED = ("up", "down")


class Tied(Model):
    """The head is the embedding's, and something else is made of the matrix too."""

    def __init__(self, more: str = "") -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.more = more

    def forward(self, ids: Tensor) -> Any:
        x = self.features(ids)
        if self.more == "soft":
            x = x + functional.softmax(x @ self.embed.weight.T, -1) @ self.embed.weight
        scores = self.head(x)
        if self.more == "second":
            return scores + functional.linear(x.roll(1, 1), self.embed.weight)
        if self.more == "penalty":
            return scores, self.embed.weight.square().mean()
        return scores


def penalised(output: Any, batch: dict[str, Tensor]) -> Tensor:
    return entropy(output[0], batch) + 0.3 * output[1]


def weight_decay_in(module: nn.Module) -> Loss:
    weight = module.get_parameter("embed.weight")
    return lambda output, batch: entropy(output, batch) + 0.3 * weight.square().mean()


def decay_of_all(module: nn.Module) -> Loss:
    def loss(output: Any, batch: dict[str, Tensor]) -> Tensor:
        return entropy(output, batch) + 0.1 * sum(each.norm() for each in module.parameters() if each.dim() > 1)

    return loss


class Spread(Feed):
    """A regulariser of a weight inside of forward."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.up.weight.norm() / 5


program("a tied head", Tied)
program("a tied matrix, used softly", lambda: Tied("soft"), whole=("head", "embed"))
program("a second head of the tied matrix", lambda: Tied("second"), whole=("head", "embed"))
program("a penalty in forward", lambda: Tied("penalty"), loss=lambda _: penalised, whole=("head", "embed"))
program("a penalty in the loss", Tied, loss=weight_decay_in, whole=("head", "embed"))
program("a penalty of all matrices", Model, loss=decay_of_all, whole=("head", "up", "down"))
program("a norm of a weight in forward", lambda: Model(Spread), whole=ALL_OF_FEED)


def _embedding(**options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        module = Model()
        module.embed = nn.Embedding(WORDS, WIDTH, **options)
        return module

    return make


def few_words() -> dict[str, Tensor]:
    batch = tokens()
    return {**batch, "ids": batch["ids"] % 3 + 14}


program("scale_grad_by_freq", _embedding(scale_grad_by_freq=True), batch=few_words, whole=("embed",))
program("padding_idx", _embedding(padding_idx=15), batch=few_words)
program("max_norm", _embedding(max_norm=1.0), batch=few_words, refused="max_norm = None")
program("sparse gradients", _embedding(sparse=True), refused="sparse = False")


def scored(name: str, change: Callable[[Tensor, dict[str, Tensor]], Tensor | None], **rest: Any) -> None:
    """A loss that does something to scores first. What returns None has done it in place."""

    def loss(output: Any, batch: dict[str, Tensor]) -> Tensor:
        made = change(output, batch)
        return entropy(output if made is None else made, batch)

    program(name, Model, loss=lambda _: loss, **rest)


def _set_word(scores: Tensor, _: Any) -> None:
    scores[..., 3] = -1e4


def _set_view(scores: Tensor, _: Any) -> None:
    scores.view(-1, WORDS)[:, 5].fill_(-1e4)


def _set_flat(scores: Tensor, _: Any) -> None:
    flat = scores.flatten(0, 1)
    flat[:, 20] -= 3


def _mask(scores: Tensor, _: Any) -> None:
    scores.masked_fill_(torch.arange(WORDS) > 28, -1e4)


def _sub(scores: Tensor, _: Any) -> None:
    scores.sub_(scores.detach().mean(-1, keepdim=True)).mul_(2)


def _add_prior(scores: Tensor, _: Any) -> None:
    scores += torch.linspace(0, 1, WORDS)


def _late(scores: Tensor, _: Any) -> Tensor:
    flat = scores.view(-1, WORDS)
    scores[..., 7] = 2.0
    return flat.view(4, LENGTH, WORDS)


def _of_copy(scores: Tensor, _: Any) -> None:
    other = scores.clone()
    other[..., 3] = -1e4
    assert float(other.amax()) > -1e4


def _in_function(scores: Tensor, _: Any) -> None:
    torch.clamp_(scores, -0.5, 0.5)


def _mixtures(scores: Tensor, _: Any) -> Tensor:
    return torch.stack([scores, scores / 2]).logsumexp(0)


def _beside(scores: Tensor, _: Any) -> Tensor:
    return torch.cat([scores, scores * 0.5], 1)[:, :LENGTH]


def _temperature(scores: Tensor, _: Any) -> Tensor:
    scores.div_(0.5)
    return scores.float() * 1.5


scored("a word is forbidden", _set_word)
scored("a word is forbidden in a view", _set_view)
scored("a word is forbidden in flat scores", _set_flat)
scored("masked_fill_", _mask)
scored("sub_ and mul_", _sub)
scored("+= of a prior", _add_prior)
scored("a view from before a change", _late)
scored("a copy that is changed", _of_copy)
scored("clamp_ by its function", _in_function)
scored("stacked scores", _mixtures)
scored("concatenated scores", _beside)
scored("a temperature in place", _temperature)


def by_hand(output: Any, batch: dict[str, Tensor]) -> Tensor:
    """The cross entropy from log_softmax and gather."""
    return -output.log_softmax(-1).gather(-1, batch["labels"][..., None]).mean()


def each_row(output: Any, batch: dict[str, Tensor]) -> Tensor:
    return torch.stack([functional.cross_entropy(*pair) for pair in zip(output, batch["labels"], strict=True)]).mean()


def with_z_loss(output: Any, batch: dict[str, Tensor]) -> Tensor:
    return entropy(output, batch) + 1e-2 * output.logsumexp(-1).square().mean()


def distilled(output: Any, batch: dict[str, Tensor]) -> Tensor:
    teacher = functional.one_hot(batch["labels"], WORDS).to(output.dtype) * 3
    return functional.kl_div(output.log_softmax(-1), teacher.softmax(-1), reduction="batchmean")


def shifted(output: Any, batch: dict[str, Tensor]) -> Tensor:
    return functional.cross_entropy(output[:, :-1].reshape(-1, WORDS), batch["labels"][:, 1:].reshape(-1))


def weighed(output: Any, batch: dict[str, Tensor]) -> Tensor:
    weight = torch.linspace(0.5, 1.5, WORDS, dtype=output.dtype)
    return functional.cross_entropy(output.flatten(0, 1), batch["labels"].flatten(), weight=weight)


def margin(output: Any, batch: dict[str, Tensor]) -> Tensor:
    scores = output.flatten(0, 1)
    own = scores[torch.arange(len(scores)), batch["labels"].flatten()]
    return (scores - own[:, None] + 1).relu().mean()


for _name, _loss in {
    "log_softmax and gather": by_hand, "a loss for each row": each_row, "a z-loss": with_z_loss,
    "distillation": distilled, "shifted labels": shifted, "weights of words": weighed, "a margin": margin,
}.items():  # fmt: skip
    program(_name, Model, loss=lambda _, loss=_loss: loss)


class Capped(Model):
    """Scores changed in forward, and returned."""

    def forward(self, ids: Tensor) -> Any:
        scores = self.head(self.features(ids))
        scores[:, :, -1] = 0.0
        return scores


program("scores changed in forward", Capped)


class Experts(nn.Module):
    """Experts in the form of transformers; what they do with the weights of a token's choices is their own."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.num_experts, self.style = 4, style
        self.up = nn.Parameter(torch.randn(4, WIDTH, HIDDEN) / 4)
        self.down = nn.Parameter(torch.randn(4, HIDDEN, WIDTH) / 4)

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        made = torch.zeros_like(tokens)
        for expert in range(self.num_experts):
            row, place = (chosen == expert).nonzero(as_tuple=True)
            given, weight = tokens[row], weights[row, place, None]
            if self.style == "before":
                out = (given * weight @ self.up[expert]).relu() @ self.down[expert]
            elif self.style == "inside":
                out = ((given @ self.up[expert]) * weight).tanh() @ self.down[expert]
            elif self.style == "together":
                hidden = given @ self.up[expert]
                out = ((hidden - hidden.mean(0)).relu() @ self.down[expert]) * weight if len(row) else given
            else:
                out = ((given @ self.up[expert]).relu() @ self.down[expert]) * weight
            made = made.index_add(0, row, out)
        return made


class Mixture(nn.Module):
    def __init__(self, style: str) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = Experts(style)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, chosen = self.router(flat).softmax(-1).topk(2, -1)
        return self.experts(flat, chosen, weights).view_as(x)


for _style, _refused in (
    ("after", ""), ("before", ""), ("inside", "ep=1"), ("together", "do not tell its loss"),
):  # fmt: skip
    program(
        f"experts that weigh {_style}", lambda style=_style: Model(lambda: Mixture(style)),  # type: ignore[misc]
        plan="dp=2,ep=2", refused=_refused,
    )  # fmt: skip


def _mixed() -> nn.Module:
    module = Model(lambda: Mixture("after"), num_blocks=2)
    module.blocks[1] = Mixture("inside")
    return module


program("experts of which some weigh inside", _mixed, plan="dp=2,ep=2")
