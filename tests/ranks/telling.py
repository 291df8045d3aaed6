"""Modules of which `parallelize` must be told something, trained under a plan."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.optim import SGD, AdamW

from shardwise.engine.parallelize import parallelize
from shardwise.sharding.context.mask import Mask
from shardwise.states.muon import Muon
from shardwise.states.parameter_group import Share, is_hidden_matrix
from tests.stages.small import small_matrices

WORDS, LENGTH, ROWS, NUM_STEPS = 29, 8, 4, 2


class Attention(nn.Module):
    """Gives its mask as a tensor, of which nobody can see what it means."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (-1, 4)).transpose(1, 2) for each in (self.q, self.k, self.v))
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        found: Tensor = self.o(scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))
        return found


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.up, self.down = Attention(), nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        found: Tensor = x + self.down(torch.tanh(self.up(x)))
        return found


class Net(nn.Module):
    """Without positions, and with a speaker for each token, which is no entry that a batch usually has."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.speakers = nn.Embedding(WORDS, 16), nn.Embedding(3, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(16, WORDS)

    def forward(self, input_ids: Tensor, who: Tensor) -> Tensor:
        x = self.embed(input_ids) + self.speakers(who)
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.head(x)
        return found


def loss_of(output: Tensor, batch: Mapping[str, Any]) -> tuple[Tensor, int]:
    labels = batch["labels"].flatten()
    return cross_entropy(output.flatten(0, 1), labels, reduction="sum"), labels.numel()


def batch_of(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(WORDS, (ROWS, LENGTH + 1), generator=generator)
    who = torch.randint(3, (ROWS, LENGTH), generator=generator)
    return {"input_ids": tokens[:, :-1], "who": who, "labels": tokens[:, 1:].contiguous()}


def muon_and_adamw() -> list[Share]:
    return [
        Share(make=lambda parameters: Muon(parameters, lr=0.02), takes=is_hidden_matrix),
        Share(make=lambda parameters: AdamW(parameters, lr=0.01, eps=1e-4)),
    ]


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: lambda parameters: SGD(parameters, lr=0.1),
    "two": muon_and_adamw,
}
#: What is said of the module to a plan with cp.
OF_CONTEXT: dict[str, Any] = {"positions": None, "entries": {"who": 1}, "masks": Mask(causal=True)}


def train(plan: str, optimizer: str = "sgd", **told: Any) -> tuple[list[float], dict[str, Tensor], dict[str, str]]:
    """The losses of a few steps, the weights after them, and which layers were cut."""
    with small_matrices():
        torch.manual_seed(0)
        engine = parallelize(Net(), plan, loss=loss_of, optimizer=OPTIMIZERS[optimizer](), example=batch_of(0), **told)
        losses = [engine.train_step(batch_of(step)) for step in range(NUM_STEPS)]
        weights = {name: each.clone() for name, each in engine.state_dict().items()}
        state = engine.optimizer_state_dict()
        engine.load_optimizer_state_dict(state)
        tensor = engine.sharded.tensor
        cut = {} if tensor is None else dict(tensor.cut)
        engine.close()
        return losses, weights, cut


def train_in_context(plan: str) -> tuple[list[float], dict[str, Tensor], dict[str, str]]:
    return train(plan, **OF_CONTEXT)


def train_cut(plan: str, tensor: Mapping[str, str]) -> tuple[list[float], dict[str, Tensor], dict[str, str]]:
    return train(plan, tensor=tensor)
