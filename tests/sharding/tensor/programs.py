"""What ranks run in tests of tensor parallelism. They are imported by the processes that `Ranks` starts."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from shardwise.errors import ShardwiseError
from shardwise.execution.backward import input_gradients
from shardwise.ranks.collectives import Group
from shardwise.sharding.tensor import Sharding, shard
from shardwise.sharding.tensor.vocabulary import VocabParallelLogits
from shardwise.stages.split import split
from shardwise.stages.split.materialise import materialise
from tests.stages.families import FAMILIES, make_batch, make_family
from tests.stages.small import small_matrices

Make = Callable[[], tuple[nn.Module, dict[str, Tensor]]]


@dataclass
class Outcome:
    """How far a sharded module is from the whole one."""

    loss: float = 0.0
    worst: float = 0.0
    where: str = ""
    norm: float = 0.0
    local_sizes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    partial: tuple[str, ...] = ()
    description: str = ""
    calls: dict[str, int] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)


def loss_of(output: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """A cross entropy as users write it; of what is no logits, something that depends on every number."""
    output = output.logits if hasattr(output, "logits") else output
    if "labels" in batch:
        return functional.cross_entropy(output.flatten(0, 1), batch["labels"].flatten())
    made: Tensor = (output * torch.linspace(-1, 1, output.shape[-1])).square().mean()
    return made


def family(name: str, length: int = 12) -> tuple[nn.Module, dict[str, Tensor]]:
    """A Hugging Face model of two layers with other numbers than it is made with, and a batch."""
    module = make_family(name, num_layers=2)
    batch = make_batch(name, length=length)
    if name == "t5":  # Another length than the encoder's, that 2, 3 and 4 ranks divide too if they divide that.
        batch["decoder_input_ids"] = torch.randint(3, 97, (2, 2 * length))
    torch.manual_seed(3)
    # Norms and biases are made alike everywhere: then a mistake in where they lie would not be seen.
    with torch.no_grad():
        for each in module.parameters():
            each.add_(0.1 * torch.randn_like(each))
    if name != "vit":
        labels = torch.randint(97, batch.get("decoder_input_ids", batch["input_ids"]).shape)
        labels[0, :2] = -100
        batch["labels_"] = labels
    return module, batch


def parity(make: Make, arguments: tuple[Any, ...] = (), *, verify: bool = False, **options: Any) -> Outcome:
    """Loss and gradients of a module, cut and whole, on the ranks of the world.

    They are compared here, so the trial that would compare a copy first is left out unless it is asked for.
    """
    with small_matrices():
        module, batch = make(*arguments)
        labels = batch.pop("labels_", None)
        loss_batch = {**batch, **({} if labels is None else {"labels": labels})}
        reference = copy.deepcopy(module)
        loss = loss_of(reference(**batch), loss_batch)
        loss.backward()  # type: ignore[no-untyped-call]
        group = Group(dist.group.WORLD)
        sharding = shard(module, group, example=batch, verify=verify, **options)
        group.traffic.clear()
        mine = loss_of(module(**batch), loss_batch)
        mine.backward()  # type: ignore[no-untyped-call]
        outcome = Outcome(calls=dict(group.traffic.calls), bytes=dict(group.traffic.bytes))
        sharding.finish_gradients(dict(module.named_parameters()))
        outcome.loss = abs(mine.item() / loss.item() - 1)
        _compare(outcome, module, reference, sharding)
        return outcome


def _compare(outcome: Outcome, module: nn.Module, reference: nn.Module, sharding: Sharding) -> None:
    expected = dict(reference.named_parameters())
    parameters = dict(module.named_parameters())
    assert parameters.keys() == expected.keys()
    square = 0.0
    for name, parameter in parameters.items():
        outcome.local_sizes[name] = tuple(parameter.shape)
        assert torch.equal(sharding.gather(name, parameter.detach()), expected[name].detach()), name
        gradient = expected[name].grad
        if gradient is None:
            assert parameter.grad is None or not parameter.grad.any(), name
            continue
        assert parameter.grad is not None, name
        square += float(gradient.double().square().sum())
        error = float((sharding.gather(name, parameter.grad) - gradient).norm() / (gradient.norm() + 1e-12))
        if error > outcome.worst and float(gradient.norm()) > 1e-6:
            outcome.worst, outcome.where = error, name
    counted = [sharding.counted(name, each.grad) for name, each in parameters.items() if each.grad is not None]
    total = torch.stack([each.double().square().sum() for each in counted]).sum()
    dist.all_reduce(total)
    outcome.norm = abs(float(total) / square - 1)
    outcome.partial = tuple(sorted(sharding.partial))
    outcome.description = sharding.describe()


class Attention(nn.Module):
    """Heads written by hand: counts are kept, and keys may be fewer than queries."""

    def __init__(self, width: int, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.query = nn.Linear(width, num_heads * head_dim)
        self.pair = nn.Linear(width, 2 * num_kv_heads * head_dim)
        self.scale = nn.Parameter(torch.rand(head_dim))
        self.drop: nn.Module = nn.Dropout(0.0)
        self.out = nn.Linear(num_heads * head_dim, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        query = self.query(x).view(batch, length, self.num_heads, self.head_dim).transpose(1, 2) * self.scale
        pair = self.pair(x).view(batch, length, 2, self.num_kv_heads, self.head_dim)
        key, value = (each.transpose(1, 2) for each in pair.unbind(2))
        times = self.num_heads // self.num_kv_heads
        key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
        scores = self.drop((query @ key.transpose(-1, -2)).softmax(-1))
        out: Tensor = self.out((scores @ value).transpose(1, 2).reshape(batch, length, -1))
        return out


class Block(nn.Module):
    def __init__(self, width: int, hidden: int, num_heads: int, num_kv_heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, num_heads, num_kv_heads, 4)
        self.attention.drop = nn.Dropout(dropout)
        self.feed = nn.Sequential(self.second, nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.first(x)))
        out: Tensor = x + self.drop(self.feed(x))
        return out


class Net(nn.Module):
    """A language model of a user's own: nothing in it has a name that is known."""

    def __init__(self, words: int, hidden: int, num_heads: int, num_kv_heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.words = nn.Embedding(words, 16)
        self.blocks = nn.ModuleList(Block(16, hidden, num_heads, num_kv_heads, dropout) for _ in range(2))
        self.head = nn.Linear(16, words)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(x)
        return scores


def net(
    words: int, hidden: int, num_heads: int, num_kv_heads: int, dropout: float = 0.0, length: int = 12, rows: int = 2
) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    module = Net(words, hidden, num_heads, num_kv_heads, dropout)
    return module, {name: torch.randint(words, (rows, length)) for name in ("tokens", "labels_")}


class Mlp(nn.Module):
    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = layer(x).relu()
        out: Tensor = self.layers[-1](x)
        return out


def mlp(*widths: int) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Mlp(*widths), {"x": torch.randn(6, widths[0])}


def parities(cases: list[tuple[Make, tuple[Any, ...], dict[str, Any]]]) -> list[Outcome]:
    """Several at once: each costs a fraction of what a call to all ranks does."""
    return [parity(make, arguments, **options) for make, arguments, options in cases]


def halves(sequence: bool, num_chunks: int | None = None) -> tuple[float, dict[str, int], dict[str, int]]:
    """A backward in two halves against one in whole: the worst gradient, and what was sent in each half."""
    with small_matrices():
        module, batch = net(97, 24, 4, 2)
        labels = batch.pop("labels_")
        group = Group(dist.group.WORLD)
        shard(module, group, example=batch, sequence=sequence, num_chunks=num_chunks, verify=False)
        start = module.get_submodule("words")(batch["tokens"]).detach().requires_grad_()
        module.words = _Given()

        def loss() -> Tensor:
            return functional.cross_entropy(module(start).flatten(0, 1), labels.flatten())

        loss().backward()  # type: ignore[no-untyped-call]
        parameters = dict(module.named_parameters())
        whole = {name: each.grad.clone() for name, each in parameters.items() if each.grad is not None}
        assert start.grad is not None
        whole["start"], start.grad = start.grad, None
        module.zero_grad(set_to_none=True)
        output = loss()
        group.traffic.clear()
        rest = input_gradients([output], [None], [start])
        first = dict(group.traffic.calls)
        assert all(each.grad is None for each in parameters.values())
        group.traffic.clear()
        rest.run()
        found = {**{name: each.grad for name, each in parameters.items()}, "start": start.grad}
        errors = [float((found[name] - each).norm() / each.norm()) for name, each in whole.items()]
        return max(errors), first, dict(group.traffic.calls)


class _Given(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


def staged(name: str, sequence: bool) -> tuple[float, float]:
    """A cut module in two pipeline stages, both here: its loss and gradients against the whole module's."""
    with small_matrices():
        module, batch = family(name)
        labels = batch.pop("labels_")
        reference = copy.deepcopy(module)
        expected = loss_of(reference(**batch), {"labels": labels})
        expected.backward()  # type: ignore[no-untyped-call]
        sharding = shard(module, Group(dist.group.WORLD), example=batch, sequence=sequence, verify=False)
        stages = split(module, 2, batch).stages
        values: dict[str, Tensor] = {}
        all_made: dict[str, Tensor] = {}
        output: Any = None
        for stage in stages:
            assert stage is not None
            made, output = stage.run(values, batch)
            all_made |= made
            values |= {key: each.detach().requires_grad_(each.requires_grad) for key, each in made.items()}
        loss = loss_of(output, {"labels": labels})
        loss.backward()  # type: ignore[no-untyped-call]
        arrived = {key: each.grad for key, each in values.items() if each.grad is not None}
        torch.autograd.backward([all_made[key] for key in arrived], list(arrived.values()))
        parameters = dict(module.named_parameters())
        sharding.finish_gradients(parameters)
        worst = 0.0
        for key, each in reference.named_parameters():
            gradient = parameters[key].grad
            assert each.grad is not None
            assert gradient is not None
            worst = max(worst, float((sharding.gather(key, gradient) - each.grad).norm() / each.grad.norm()))
        return abs(loss.item() / expected.item() - 1), worst


def drawn_alike(seed: int) -> bool:
    """A module on the meta device, cut and then made, against one that is made whole."""
    with torch.device("meta"):
        module, whole = hf_llama(), hf_llama()
    sharding = shard(module, Group(dist.group.WORLD))
    sharding.materialise(module, seed=seed)
    materialise(whole, [name for name, _ in whole.named_parameters()], seed=seed)
    return all(
        torch.equal(sharding.gather(name, each.detach()), whole.get_parameter(name).detach())
        for name, each in module.named_parameters()
    )


def hf_llama() -> nn.Module:
    return FAMILIES["llama"]()


def dropped(sequence: bool) -> tuple[list[float], bool]:
    """With dropout: the loss on every rank of two runs from one seed, and whether ranks draw alike afterwards."""
    with small_matrices():
        module, batch = net(97, 24, 4, 4, 0.5)
        labels = batch.pop("labels_")
        shard(module.train(), Group(dist.group.WORLD), example=batch, sequence=sequence, verify=False)
        losses = []
        for _ in range(2):
            torch.manual_seed(5)
            losses.append(loss_of(module(**batch), {"labels": labels}).item())
        after = torch.rand(4)
        others = [torch.empty(4) for _ in range(dist.get_world_size())]
        dist.all_gather(others, after)
        return losses, all(torch.equal(after, other) for other in others)


def masks(probability: float) -> list[Tensor]:
    """What the attention of one block drops, on every rank."""
    with small_matrices():
        module, batch = net(97, 24, 4, 4, probability)
        batch.pop("labels_")
        shard(module.train(), Group(dist.group.WORLD), example=batch, verify=False)
        seen: list[Tensor] = []
        attention = module.get_submodule("blocks.0.attention.drop")
        attention.register_forward_hook(lambda _, __, out: seen.append((out == 0).detach()))
        torch.manual_seed(5)
        module(**batch)
        return seen


def refusal(make: Make, arguments: tuple[Any, ...], options: dict[str, Any]) -> str:
    """What is said when a module cannot be cut."""
    module, batch = make(*arguments)
    batch.pop("labels_", None)
    try:
        shard(module, Group(dist.group.WORLD), **{"example": batch, **options})
        module(**batch)
    except ShardwiseError as error:
        return str(error)
    return ""


def entropy(words: int, smoothing: float, kind: str) -> tuple[float, float]:
    """Our cross entropy and its gradient against torch's, on shards of the same scores."""
    group = Group(dist.group.WORLD)
    torch.manual_seed(0)
    scores = (5 * torch.randn(10, words)).requires_grad_()
    target = torch.randint(words, (10,))
    target[3] = -100
    expected = functional.cross_entropy(scores, target, label_smoothing=smoothing, reduction=kind)
    (expected * torch.arange(1.0, 11) if kind == "none" else expected).sum().backward()  # type: ignore[no-untyped-call]
    size = -(-words // group.size)
    padded = functional.pad(scores.detach(), (0, size * group.size - words), value=1e4)
    local = padded[:, group.rank * size : (group.rank + 1) * size].clone().requires_grad_()
    logits = VocabParallelLogits.of(local * 1, group, words)
    found = functional.cross_entropy(logits, target, label_smoothing=smoothing, reduction=kind)
    (found * torch.arange(1.0, 11) if kind == "none" else found).sum().backward()  # type: ignore[no-untyped-call]
    assert local.grad is not None
    assert scores.grad is not None
    mine = functional.pad(scores.grad, (0, size * group.size - words))[:, group.rank * size : (group.rank + 1) * size]
    far = (found - expected).abs().max() / expected.abs().max().clamp(min=1.0)  # A sum of rows rounds as it is large.
    return float(far), float((local.grad - mine).abs().max())


def scored() -> dict[str, bool]:
    """What looks like the whole scores against the whole scores: which operations agree, and which gathered."""
    group = Group(dist.group.WORLD)
    torch.manual_seed(0)
    whole = torch.randn(2, 3, 97)
    padded = functional.pad(whole, (0, 49 * 2 - 97), value=1e4)
    mine = padded[..., group.rank * 49 : (group.rank + 1) * 49].contiguous()
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "shape": lambda each: torch.tensor(each.shape),
        "float": lambda each: each.float() / 2.0,
        "view": lambda each: each.view(-1, 97),
        "flatten": lambda each: each.flatten(0, 1),
        "rows": lambda each: each[:, :-1],
        "all rows": lambda each: each[..., :-1, :],
        "last token": lambda each: each[:, -1],
        "words": lambda each: each[..., :5],
        "softmax": lambda each: each.softmax(-1),
        "argmax": lambda each: each.argmax(-1),
        "added": lambda each: each + torch.ones(97),
        "transposed": lambda each: functional.cross_entropy(each.transpose(1, 2), torch.zeros(2, 3, dtype=torch.long)),
    }
    found = {}
    for name, way in ways.items():
        group.traffic.clear()
        made = way(VocabParallelLogits.of(mine.clone(), group, 97))
        stayed = not group.traffic.calls
        made = made.whole() if isinstance(made, VocabParallelLogits) else made
        found[name] = stayed
        assert torch.allclose(made.float(), way(whole).float(), atol=1e-6), name
    return found


def in_chunks(sequence: bool, num_chunks: int | None, kind: torch.dtype | None) -> tuple[Tensor, dict[str, int]]:
    """All gradients in one row, of two runs that give the same, under autocast if a type is given; what was sent."""
    with small_matrices():
        module, batch = net(97, 24, 4, 2, length=7, rows=3)
        labels = batch.pop("labels_")
        group = Group(dist.group.WORLD)
        sharding = shard(module, group, example=batch, sequence=sequence, num_chunks=num_chunks, verify=False)
        found = []
        for _ in range(2):
            module.zero_grad(set_to_none=True)
            group.traffic.clear()
            with torch.autocast("cpu", dtype=kind, enabled=kind is not None):
                loss = loss_of(module(**batch), {"labels": labels})
            loss.backward()  # type: ignore[no-untyped-call]
            sent = dict(group.traffic.bytes)
            sharding.finish_gradients(dict(module.named_parameters()))
            gradients = (sharding.gather(name, _gradient(each)) for name, each in module.named_parameters())
            found.append(torch.cat([each.flatten() for each in gradients]))
        assert torch.equal(*found)
        return found[0], sent


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
