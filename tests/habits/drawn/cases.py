"""A case: a module, what hangs on it, an optimizer, a loss and a plan, as a value: drawn, printed, made smaller."""

import inspect
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from tests.habits.drawn import plans
from tests.habits.drawn.attentions import WIDTH
from tests.habits.drawn.hangings import HANGS
from tests.habits.drawn.operations import KINDS
from tests.habits.drawn.trainings import LOSSES, OPTIMIZERS, UNEVEN_LOSSES, WORDS

#: How the output of an operation joins what went into it. The simplest comes first.
WAYS = ("residual", "plain", "norm first", "norm last", "layer scale")
CONTAINERS = ("list", "sequential", "dict")
OUTPUTS = ("tensor", "tuple", "dict")
#: What the forward of the whole hands on beside what blocks return. Numbers of a batch are for plans without replicas.
CROSSINGS = ("none", "skips", "a float", "an int", "floats in a list")


@dataclass(frozen=True)
class Operation:
    """One of `KINDS`, with all that it leaves to choose, and how it joins."""

    kind: str
    choices: dict[str, Any] = field(default_factory=dict)
    way: str = WAYS[0]

    def mixes_tokens(self) -> bool:
        return KINDS[self.kind].mixes(self.choices)


@dataclass(frozen=True)
class Case:
    """All of a program. `hangs` are names of `HANGS`, each with the number that says where."""

    seed: int
    plan: str
    blocks: tuple[tuple[Operation, ...], ...]
    hangs: tuple[tuple[str, int], ...] = ()
    container: str = CONTAINERS[0]
    output: str = OUTPUTS[0]
    takes_ids: bool = True
    optimizer: str = "sgd"
    loss: str = "mean"
    clip: float | None = None
    crossing: str = CROSSINGS[0]

    @property
    def num_ranks(self) -> int:
        return plans.num_ranks_of(self.plan)


class Block(nn.Module):
    """Operations in turn."""

    def __init__(self, operations: tuple[Operation, ...]) -> None:
        super().__init__()
        self.ways = [each.way for each in operations]
        self.steps = nn.ModuleList(KINDS[each.kind].make(**each.choices) for each in operations)
        self.norms = nn.ModuleList(
            nn.LayerNorm(WIDTH) if way.startswith("norm") else nn.Identity() for way in self.ways
        )
        self.gammas = nn.ParameterList(
            nn.Parameter(torch.full((WIDTH,), 0.3)) for way in self.ways if way == "layer scale"
        )

    def forward(self, x: Tensor) -> Tensor:
        number = 0
        for way, step, norm in zip(self.ways, self.steps, self.norms, strict=True):
            if way == "residual":
                x = x + step(x)
            elif way == "norm first":
                x = x + step(norm(x))
            elif way == "norm last":
                x = norm(x + step(x))
            elif way == "layer scale":
                x = x + self.gammas[number] * step(x)
                number += 1
            else:
                x = step(x)
        return x


class Net(nn.Module):
    """Blocks between an embedding (or a layer) and a head."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.embed: nn.Module = nn.Embedding(WORDS, WIDTH) if case.takes_ids else nn.Linear(6, WIDTH)
        blocks = [Block(each) for each in case.blocks]
        self.blocks: Any
        if case.container == "sequential":
            self.blocks = nn.Sequential(*blocks)
        elif case.container == "dict":
            self.blocks = nn.ModuleDict({f"block{place}": each for place, each in enumerate(blocks)})
        else:
            self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=not case.takes_ids)
        self.output, self.crossing = case.output, case.crossing

    def forward(self, x: Tensor) -> Any:
        h = first = self.embed(x)
        if isinstance(self.blocks, nn.Sequential):
            h = self.blocks(h)
        else:
            for each in self.blocks.values() if isinstance(self.blocks, nn.ModuleDict) else self.blocks:
                h = each(h)
        h = self._crossed(h, first)
        h = self.norm(h)
        scores = self.head(h)
        if self.output == "tuple":
            return scores, h
        return {"logits": scores, "hidden": h} if self.output == "dict" else scores

    def _crossed(self, h: Tensor, first: Tensor) -> Tensor:
        if self.crossing == "skips":
            return h + first
        if self.crossing == "a float":
            return h * (1 + float(first.detach().mean()))
        if self.crossing == "an int":
            return h + int(first.detach().mean() > 0)
        if self.crossing == "floats in a list":
            seen = [float(each.detach().mean()) for each in (first, h)]
            return h * (1 + sum(seen))
        return h


def make_module(case: Case, dtype: torch.dtype) -> nn.Module:
    """The module, the same whenever it is made."""
    torch.manual_seed(case.seed)
    module = Net(case).train()
    for name, number in sorted(case.hangs, key=lambda each: list(HANGS).index(each[0])):
        HANGS[name](module, number)
    return module.to(dtype)


def draw(seed: int, plan: str | None = None, *, with_crossing: bool = False, with_losses: bool = False) -> Case:
    """The case of a seed; if asked for, with what is no tensor between stages, or a loss that weighs parts unevenly."""
    rng = random.Random(seed)
    chosen = plan or plans.draw(rng)
    stages = plans.num_stages_of(chosen)
    num_blocks = rng.choice((1, 2, 2, 3)) if stages <= 2 else max(stages - 1, rng.choice((3, 4)))
    fits = plans.fitting(chosen)
    if rng.random() < 0.5:  # Blocks that are alike, as in most models.
        block = _block(rng, fits)
        blocks = (block,) * num_blocks
    else:
        blocks = tuple(_block(rng, fits) for _ in range(num_blocks))
    if "ep" in chosen and not any(each.kind == "Mixture" for block in blocks for each in block):
        blocks = (blocks[0] + (_operation(rng, lambda each: each.kind == "Mixture" and fits(each)),), *blocks[1:])
    if "cp" in chosen and not any(_attends(each) for block in blocks for each in block):
        blocks = (blocks[0] + (_operation(rng, _attends),), *blocks[1:])
    hangs = tuple((rng.choice(list(HANGS)), rng.randrange(1000)) for _ in range(rng.choice((0, 0, 1, 1, 2))))
    losses = [name for name in LOSSES if LOSSES[name].counts or "cp" not in chosen]
    loss = rng.choice(losses)
    drawn = Case(
        seed=seed,
        plan=chosen,
        blocks=blocks,
        hangs=hangs,
        container=rng.choice(CONTAINERS),
        output=rng.choice(OUTPUTS[:1] * 2 + OUTPUTS),
        takes_ids=rng.random() < 0.8,
        optimizer=rng.choice(list(OPTIMIZERS)),
        loss=loss,
        clip=rng.choice((None, None, 0.5)),
    )
    if with_crossing:
        drawn = replace(drawn, crossing=rng.choice(CROSSINGS[:2] if "dp" in chosen or "cp" in chosen else CROSSINGS))
    if with_losses:
        drawn = replace(drawn, loss=rng.choice(list(UNEVEN_LOSSES)))
    return drawn


def _attends(each: Operation) -> bool:
    """Whether it is attention that cp finds."""
    return each.kind == "Attention" and not each.mixes_tokens()


def _block(rng: random.Random, fits: Callable[[Operation], bool]) -> tuple[Operation, ...]:
    return tuple(_operation(rng, fits) for _ in range(rng.choice((1, 2, 2, 3))))


def _operation(rng: random.Random, fits: Callable[[Operation], bool]) -> Operation:
    names = list(KINDS)
    while True:
        (kind,) = rng.choices(names, [KINDS[name].weight for name in names])
        choices = {key: rng.choice(values) for key, values in KINDS[kind].choices.items()}
        made = Operation(kind, choices, rng.choice(WAYS))
        if fits(made):
            return made


def smaller(case: Case) -> Iterator[Case]:
    """Cases that are a little smaller, the smallest steps last."""
    blocks = case.blocks
    for at in range(len(blocks)):
        if len(blocks) > 1:
            yield replace(case, blocks=blocks[:at] + blocks[at + 1 :])
    for at, block in enumerate(blocks):
        for place in range(len(block)):
            if len(block) > 1:
                yield replace(case, blocks=(*blocks[:at], block[:place] + block[place + 1 :], *blocks[at + 1 :]))
    for at in range(len(case.hangs)):
        yield replace(case, hangs=case.hangs[:at] + case.hangs[at + 1 :])
    plain: dict[str, Any] = {
        "container": CONTAINERS[0], "output": OUTPUTS[0], "takes_ids": True, "optimizer": "sgd",
        "loss": "sum and number" if "cp" in case.plan else "mean", "clip": None, "crossing": CROSSINGS[0],
    }  # fmt: skip
    for key, value in plain.items():
        if getattr(case, key) != value:
            yield replace(case, **{key: value})
    for plan in plans.simpler(case.plan):
        yield replace(case, plan=plan)
    for at, block in enumerate(blocks):
        for place, each in enumerate(block):
            for simple in _simpler(each):
                changed = (*block[:place], simple, *block[place + 1 :])
                yield replace(case, blocks=(*blocks[:at], changed, *blocks[at + 1 :]))


def _simpler(each: Operation) -> Iterator[Operation]:
    if each.way != WAYS[0]:
        yield replace(each, way=WAYS[0])
    for key, values in KINDS[each.kind].choices.items():
        if each.choices[key] != values[0]:
            yield replace(each, choices={**each.choices, key: values[0]})


def program_of(case: Case, *, with_source: bool = True) -> str:
    """The case as text: what it is made of, and the source of its operations."""
    made = "\n".join(
        f"    block {at}: " + "; ".join(f"{each.kind}({_said(each.choices)}) [{each.way}]" for each in block)
        for at, block in enumerate(case.blocks)
    )
    kinds = dict.fromkeys(each.kind for block in case.blocks for each in block)
    sources = [inspect.getsource(KINDS[kind].make) for kind in kinds]
    sources += [inspect.getsource(HANGS[name]) for name, _ in case.hangs]
    head = (
        f"seed {case.seed} under {case.plan}: embed({'ids' if case.takes_ids else 'numbers'})\n{made}\n"
        f"    hangs {case.hangs}, container {case.container}, output {case.output}, optimizer {case.optimizer},"
        f" loss {case.loss}, clip {case.clip}, crossing {case.crossing}"
    )
    return "\n".join([head, *sources] if with_source else [head])


def _said(choices: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in choices.items())
