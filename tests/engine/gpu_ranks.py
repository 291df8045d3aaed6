"""What ranks do that share one GPU: they train a small tied model under many plans."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW

from shardwise.engine.parallelize import parallelize

WIDTH, WORDS, LENGTH, ROWS = 64, 96, 16, 16
STEPS = 3


class Attention(nn.Module):
    """Causal attention of four heads."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        heads = [each(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for each in (self.q, self.k, self.v)]
        seen = functional.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        return self.out(seen.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention and a feedforward layer, each added to what came in."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm, self.second_norm = Attention(), nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.down(functional.gelu(self.up(self.second_norm(x))))  # type: ignore[no-any-return]


class Tied(nn.Module):
    """Tokens to scores of the next one, with one matrix at both ends."""

    def __init__(self, num_blocks: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        nn.init.normal_(self.embed.weight, std=0.1)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def next_token(output: Tensor, batch: Mapping[str, Any]) -> tuple[Tensor, int]:
    labels = batch["labels"]
    return functional.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="sum"), labels.numel()


def make_optimizer(parameters: Any) -> AdamW:
    # Without a large eps, Adam makes a whole step of a gradient that is rounding alone.
    return AdamW(parameters, lr=1e-2, eps=1e-3)


def make_module() -> Tied:
    torch.manual_seed(0)
    return Tied().cuda()


def make_batches() -> list[dict[str, Tensor]]:
    drawn = torch.Generator().manual_seed(1)
    found = [torch.randint(WORDS, (ROWS, LENGTH + 1), generator=drawn).cuda() for _ in range(STEPS)]
    return [{"input_ids": each[:, :-1].contiguous(), "labels": each[:, 1:].contiguous()} for each in found]


def train_plain() -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of one device, by plain torch."""
    module, losses = make_module(), []
    optimizer = make_optimizer(module.parameters())
    for batch in make_batches():
        optimizer.zero_grad()
        total, count = next_token(module(batch["input_ids"]), batch)
        (total / count).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(total.detach()) / count)
    return losses, {name: each.detach().cpu() for name, each in module.state_dict().items()}


def train_plans(plans: Sequence[str]) -> dict[str, tuple[list[float], dict[str, Tensor]] | str]:
    """The same under each plan; what was raised, where something was."""
    found: dict[str, tuple[list[float], dict[str, Tensor]] | str] = {}
    for plan in plans:
        try:
            batches = make_batches()
            engine = parallelize(
                make_module(),
                plan,
                loss=next_token,
                optimizer=make_optimizer,
                example=batches[0],
                positions=None,
            )
            with engine:
                losses = [engine.train_step(batch) for batch in batches]
                found[plan] = losses, {name: each.cpu() for name, each in engine.state_dict().items()}
        except Exception as error:
            found[plan] = f"{type(error).__name__}: {error}"
            break  # The others may wait for this rank: what comes after it would be told of the same.
    return found
