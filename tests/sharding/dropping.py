"""A small transformer that drops everywhere, trained under a plan."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import dropout, scaled_dot_product_attention
from torch.optim import SGD

from shardwise.engine.parallelize import parallelize
from shardwise.nets.loss import next_token_loss
from shardwise.parity.models import batch_of

WIDTH, HEADS, WORDS, LENGTH, ROWS, NUM_STEPS = 16, 4, 53, 8, 8, 2


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for each in (self.q, self.k, self.v))
        # Inside of what tensor parallel ranks cut: weights by heads, and channels of heads.
        share = 0.25 if self.training else 0.0
        weighed = scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=share)
        seen = self.drop(weighed.transpose(1, 2).flatten(2))
        found: Tensor = self.o(seen)
        return found


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention, self.drop = nn.LayerNorm(WIDTH), Attention(), nn.Dropout(0.2)
        self.mlp_norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)
        self.inside, self.after = nn.Dropout(0.4), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.norm(x)))
        x = dropout(x, 0.1, self.training)
        found: Tensor = x + self.after(self.down(self.inside(torch.tanh(self.up(self.mlp_norm(x))))))
        return found


class Net(nn.Module):
    """Dropout behind the embedding, of attention's weights, inside and behind attention and the MLP, by a function."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(2 * LENGTH, WIDTH)
        self.drop = nn.Dropout(0.2)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).expand(input_ids.shape)
        x = self.drop(self.embed(input_ids) + self.positions(position_ids))
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.head(x)
        return found


class Experts(nn.Module):
    """Experts by hand, which drop from the tokens that chose them."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Dropout(0.5), nn.Linear(WIDTH, 24), nn.SiLU(), nn.Linear(24, WIDTH), nn.Dropout(0.3))
            for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        weight, chosen = self.router(flat).softmax(-1).max(-1)
        made = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            mine = chosen == number
            made[mine] = expert(flat[mine]) * weight[mine, None]
        return x + made.view_as(x)


class Late(nn.Module):
    """Dropouts, one between cut layers, of which the script raises the probability after the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)
        self.drop, self.attention = nn.Dropout(0.0), nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x, x, x)[0]
        found: Tensor = x + self.down(self.drop(torch.tanh(self.up(self.norm(x)))))
        return found


class Recurrent(nn.Module):
    """Drops between its layers, inside of a function of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(WIDTH, 8), nn.Linear(8, 3)
        self.lstm = nn.LSTM(8, 8, 2, dropout=0.5, batch_first=True)

    def forward(self, input: Tensor) -> Tensor:
        found: Tensor = self.head(self.lstm(self.embed(input))[0].mean(1))
        return found


class Joint(nn.Module):
    """Attention of torch, which drops its weights inside of one function."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, dropout=0.4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        with_weights: Tensor = self.attention(x, x, x)[0]
        found: Tensor = self.attention(with_weights, x, x, need_weights=False)[0]
        return found


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "experts": Experts,
    "attention": Joint,
    "encoder": partial(nn.TransformerEncoderLayer, WIDTH, HEADS, 24, 0.3, batch_first=True),
    "late": Late,
    "recurrent": Recurrent,
}


def train_layers(kind: str, plan: str) -> dict[str, Tensor]:
    """The weights after a few steps, with another seed of torch on each rank."""
    torch.manual_seed(0)
    layers, net = [LAYERS[kind](), LAYERS[kind]()], nn.Module()
    batch = {"input": batch_of(ROWS, 3, WORDS, 0)["input_ids"]}
    if kind == "recurrent":
        net = layers[0].double()
        batch = {"input": torch.randn(ROWS, 3, WIDTH, dtype=torch.float64)}
    else:
        net = nn.Sequential(nn.Embedding(WORDS, WIDTH), *layers, nn.Linear(WIDTH, WORDS)).double()
    with parallelize(
        net, plan, loss=lambda output, _: output.square().mean(), optimizer=lambda p: SGD(p, lr=0.1), example=batch,
        verify=True,
    ) as engine:  # fmt: skip
        torch.manual_seed(dist.get_rank() if dist.is_initialized() else 7)
        for _ in range(NUM_STEPS):
            engine.train_step(batch)
            for each in layers:
                if isinstance(each, Late):
                    each.drop.p = each.attention.dropout = 0.4
        return {name: each.clone() for name, each in engine.state_dict().items()}


def train(plan: str, seed: int = 0, first_step: int = 0) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of a few steps, and the weights after them."""
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    torch.manual_seed(0)
    net = Net()
    engine = parallelize(
        net,
        plan,
        loss=next_token_loss,
        optimizer=lambda parameters: SGD(parameters, lr=0.1),
        example=batch_of(ROWS, LENGTH, WORDS, 0),
        seed=seed,
        verify=False,
    )
    engine.num_steps = first_step
    losses = [engine.train_step(batch_of(ROWS, LENGTH, WORDS, step)) for step in range(NUM_STEPS)]
    weights: dict[str, Any] = {name: each.clone() for name, each in engine.state_dict().items()}
    engine.close()
    return losses, weights
