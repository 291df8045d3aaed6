"""Small programs as users of PyTorch write them, run by plain torch and under every kind of plan.

A program is a function that is given `parallelize` and returns what came of it, numbers by name:

    @program()
    def decay_by_shape(parallelize):
        model = small_net()
        return trained(parallelize(model, loss=squares, optimizer=by_shape, example=batch(0)))

It is run from the same seed with an engine of plain torch (`Plain`), and on ranks with that of a plan. What it returns
must be equal to 1e-5, or the plan must have refused it with a `ShardwiseError` whose sentence matches what the program
expects: `refused={"zero=3": "a piece of it"}` says that plans with zero=3 in their short form refuse it so. Anything
else fails: a difference, a traceback, a refusal that nobody expected, and none where one was.

To add programs, write functions into a file of this folder, or add a file: `test_habits.py` finds both.
"""

import random
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import shardwise as sw
from shardwise.errors import ShardwiseError
from shardwise.parity.problem import microbatches_of
from shardwise.planner.plan import Plan
from shardwise.stages.rows import unmarked
from shardwise.stages.split.arguments import Signature
from shardwise.stages.split.python_state import PythonState
from shardwise.states.parameter_group import shares_of, sort_out

#: Every kind of plan on two ranks that any module can be trained under, and on four.
TWO = (
    "dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "pp=2,microbatches=2", "tp=2", "dp=2,offload.optimizer=1.0",
    "dp=2,offload.parameters=1.0", "pp=2,microbatches=2,recompute=full", "cp=2", "dp=2,ep=2", "tp=2,sp=true",
)  # fmt: skip
FOUR = ("dp=2,pp=2,microbatches=2,zero=1", "dp=2,tp=2,zero=3")
#: Of a file with more programs than each of these every other, one in three and so on is tried by default: each takes
#: an engine's time or more, on every rank.
_MANY = (3, 5, 7, 10, 14, 19, 26)
_TOLERANCE = 1e-5

Result = Mapping[str, Any]
#: `sw.parallelize` without the plan.
Parallelize = Callable[..., Any]
Batch = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Program:
    """A function, and by a part of a plan what the sentence of its refusal says.

    It is tried under plans that have `only`, and have not `but`, where these are given. `whole`: plain torch computes
    whole batches, and no microbatches. `always`: it is tried by default wherever it stands in its file, and on two
    ranks, as it takes long. `apart`: each part of a batch is computed by itself, as batch norms see it.
    `as_it_is`: under cp too its loss may be one number, and it says itself where tokens are.
    """

    run: Callable[[Parallelize], Result]
    refused: Mapping[str, str] = field(default_factory=dict)
    only: str | None = None
    but: str | None = None
    whole: bool = False
    always: bool = False
    apart: bool = False
    as_it_is: bool = False

    def is_for(self, plan: str) -> bool:
        """Whether it is tried under this plan. Under ep those with experts are; cp has tests of losses of its own."""
        if _has(plan, "cp") and self.run.__module__.endswith((".losses", ".loaders")):
            return False
        if _has(plan, "ep") and self.only != "ep":
            return False
        without = () if self.but is None else self.but.split(",")
        return (self.only is None or _has(plan, self.only)) and not any(_has(plan, each) for each in without)

    @property
    def name(self) -> str:
        return self.run.__name__

    def expects(self, plan: str) -> str | None:
        """What the sentence is to say, if this plan is to refuse it."""
        found = [words for part, words in self.refused.items() if part == "all" or _has(plan, part)]
        return "|".join(found) or None


def _has(plan: str, part: str) -> bool:
    """Whether a plan's short form has an entry, or one of that name."""
    entries = plan.split(",")
    return part in entries or part in [each.partition("=")[0] for each in entries]


PROGRAMS: dict[str, list[Program]] = {}


def program(
    refused: Mapping[str, str] | None = None, *, only: str | None = None, but: str | None = None, whole: bool = False,
    always: bool = False, apart: bool = False, as_it_is: bool = False,
) -> Callable[[Callable[[Parallelize], Result]], Callable[[Parallelize], Result]]:  # fmt: skip
    """Enter a function as a program of its file."""

    def enter(run: Callable[[Parallelize], Result]) -> Callable[[Parallelize], Result]:
        made = Program(
            run=run, refused=refused or {}, only=only, but=but, whole=whole, always=always, apart=apart,
            as_it_is=as_it_is,
        )  # fmt: skip
        PROGRAMS.setdefault(run.__module__.rpartition(".")[2], []).append(made)
        return run

    return enter


def programs_of(topic: str) -> list[Program]:
    """The programs of a file."""
    import_module(f"tests.habits.{topic}")
    return PROGRAMS[topic]


def tried_by_default(topic: str) -> list[Program]:
    """The programs of a file that are tried without `--whole`."""
    every = programs_of(topic)
    one_in = 1 + sum(len(every) > each for each in _MANY)
    if topic == "crossing":
        one_in = 3  # Of its plans some are left out too (`tests/left_out.py`), and each has to meet a program.
    return [each for place, each in enumerate(every) if place % one_in == 0 or each.always]


def turns_of(topic: str, plans: Sequence[str]) -> dict[str, str]:
    """The plan that each program of a file is tried under by default, by its name: in turn one of those it is for.

    Of one file in seven the first is tried on four ranks, which takes three times as long as on two. On two a file
    begins where its name says: else all would begin with the first plans, and few would come to the last.
    """
    found = {}
    place = crc32(topic.encode())
    for number, each in enumerate(tried_by_default(topic)):
        fitting = [plan for plan in plans if each.is_for(plan)]
        on_four = [plan for plan in fitting if plan in FOUR]
        on_two = [plan for plan in fitting if plan not in FOUR]
        is_wide = bool(on_four) and number == 0 and place % 7 == 0 and not each.always
        found[each.name] = on_four[place // 7 % len(on_four)] if is_wide else on_two[(place + number) % len(on_two)]
    return found


def run_topic(topic: str, plan: str, plans: Sequence[str] | None = None) -> list[str]:
    """Run the programs of a file on this rank of a plan; what was not as expected.

    With `plans`, those whose turn it is: each program is run under one of these plans.
    """
    found = []
    turns = None if plans is None else turns_of(topic, plans)
    for each in programs_of(topic):
        if each.is_for(plan) if turns is None else turns.get(each.name) == plan:
            wrong = _tried(each, plan)
            if wrong is not None:
                found.append(f"{topic}.{each.name} under {plan}: {wrong}")
    return found


def run_one(topic: str, name: str, plan: str) -> str | None:
    """Run one program of a file on this rank of any plan; what was not as expected."""
    return next(_tried(each, plan) for each in programs_of(topic) if each.name == name)


def _tried(one: Program, plan: str) -> str | None:
    expected, open_engines = one.expects(plan), []
    parsed = Plan.parse(plan.removeprefix("place,"))
    make = Placed if plan.startswith("place,") else sw.parallelize

    def under_plan(module: nn.Module, **options: Any) -> Any:
        if _has(plan, "cp") and not one.as_it_is:
            options = _for_parts(options)
        open_engines.append(make(module, parsed, **options))
        return open_engines[-1]

    torch.manual_seed(0)
    try:
        came = one.run(under_plan)
    except ShardwiseError as error:
        for each in open_engines:
            _close(each)  # While the error is there: another rank may have none, and is told of this one's.
        said = str(error)
        if expected is None:
            return f"refused: {said}"
        return None if re.search(expected, said) else f"refused, but not for {expected!r}: {said}"
    except Exception:
        return f"raised:\n{traceback.format_exc()}"
    finally:
        for each in open_engines:
            _close(each)
    if expected is not None:
        return f"not refused, though {expected!r} was expected"
    torch.manual_seed(0)
    alone = InTurn if one.apart else Apart if one.run.__module__.endswith(".crossing") else Plain
    plain, against = Joined if make is Placed else alone, Plan() if one.whole else parsed
    return _difference(came, one.run(lambda module, **options: plain(module, against, **options)))


def _for_parts(options: dict[str, Any]) -> dict[str, Any]:
    """What cp is to be told of these programs: where tokens are; and of a mean, its sum and over how many it is."""
    loss = options["loss"]

    def summed(output: Any, given: Batch) -> Any:
        count = (given["labels"] >= 0).sum()
        found = loss(output, given)
        return found if isinstance(found, tuple) else (found * count, count)

    return {"positions": None, "entries": {"x": 1}, **options, "loss": summed}


def _close(engine: Any) -> None:
    with suppress(Exception):  # It has failed, and that was told.
        engine.close()


def _difference(came: Result, wanted: Result) -> str | None:
    if came.keys() != wanted.keys():
        return f"gives {sorted(came.keys() ^ wanted.keys())} on one side alone"
    for name, value in wanted.items():
        one, other = (torch.as_tensor(each) for each in (came[name], value))
        one, other = (each.to(torch.complex128 if each.is_complex() else torch.float64) for each in (one, other))
        if one.shape != other.shape or not torch.allclose(one, other, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True):
            far = f"{float((one - other).abs().max()):.3g} apart" if one.shape == other.shape else f"{one.shape}"
            return f"{name} is {far} from plain torch"
    return None


class Plain:
    """What an engine does, by plain torch: one microbatch after the other, each of all replicas together."""

    def __init__(
        self, module: nn.Module, plan: Plan, *, loss: Any, optimizer: Any, clip: float | None = None, **_: Any
    ) -> None:
        if any(each.is_meta for each in module.parameters()):
            module.to_empty(device="cpu")
        self.module, self._plan, self._loss, self._clip = module, plan, loss, clip
        self.plan = plan
        if not any(each.training for each in module.modules()):
            module.train()
        parameters = dict(module.named_parameters())
        shares = shares_of(optimizer)
        taken = sort_out(shares, {name: each for name, each in parameters.items() if each.requires_grad})
        self.optimizers: list[Optimizer] = (
            [optimizer(list(module.parameters()))]
            if callable(optimizer)
            else [share.make([parameters[name] for name in names]) for share, names in zip(shares, taken, strict=True)]
        )
        self.gradient_norm: float | None = None
        self.replica, self.num_replicas = 0, 1
        self._signature = Signature(module)
        self._measured: list[Mapping[str, Any]] = []

    def _output(self, batch: Any) -> Any:
        args, kwargs = self._signature.arguments(batch)
        return self.module(*args, **kwargs)

    def _loss_of(self, batch: Any, metrics: Any) -> Tensor:
        return self._measure(self._output(batch), batch, metrics) / self._plan.microbatches

    def _microbatches(self, batch: Any) -> list[Any]:
        is_whole = self._plan.dp * self._plan.microbatches == 1
        return [unmarked(batch)] if is_whole else microbatches_of(batch, self._plan, apart=False)

    def train_step(self, batch: Batch, *, metrics: Any = None) -> float:
        self.module.zero_grad()
        losses, self._measured = [], []
        for each in self._microbatches(batch):
            loss = self._loss_of(each, metrics)
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(float(loss.detach()))
        if self._clip is not None:
            every = [each for each in self.module.parameters() if each.requires_grad]
            self.gradient_norm = float(nn.utils.clip_grad_norm_(every, self._clip))
        for optimizer in self.optimizers:
            optimizer.step()
        return sum(losses)

    @torch.no_grad()
    def evaluate(self, batch: Batch, *, metrics: Any = None) -> float:
        self._measured = []
        with self._evaluating():
            return sum(float(self._loss_of(each, metrics)) for each in self._microbatches(batch))

    @torch.no_grad()
    def predict(self, batch: Batch) -> Any:
        with self._evaluating():
            return self._output(unmarked(batch))

    @property
    def metrics(self) -> dict[str, float]:
        """Means count as one each, sums with their numbers."""
        names = {name: None for each in self._measured for name in each}
        pairs = {name: [each[name] for each in self._measured if name in each] for name in names}
        both = {
            name: [each if isinstance(each, tuple) else (each, 1) for each in found] for name, found in pairs.items()
        }
        return {
            name: sum(_number(total) for total, _ in found) / sum(_number(number) for _, number in found)
            for name, found in both.items()
        }

    def _measure(self, output: Any, given: Mapping[str, Any], metrics: Any) -> Tensor:
        """The loss of a microbatch; its metrics are noted."""
        observed = {} if metrics is None else metrics(output, given)
        result = self._loss(output, given)
        parts = list(result) if isinstance(result, tuple) else [result]
        own = parts.pop() if isinstance(parts[-1], dict) else {}
        self._measured.append({**observed, **own})
        loss: Tensor = parts[0] / parts[1] if len(parts) > 1 else parts[0]
        return loss

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        training = [(each, each.training) for each in self.module.modules()]
        self.module.eval()
        yield
        if training[0][1]:
            self.module.train()
        for each, was in training:
            each.training = was

    def state_dict(self) -> dict[str, Any]:
        state = self.module.state_dict().items()
        return {name: each.detach().clone() if isinstance(each, Tensor) else each for name, each in state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.module.load_state_dict(state)

    def gradients(self) -> dict[str, Tensor]:
        return {n: each.grad.clone() for n, each in self.module.named_parameters() if each.grad is not None}

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


class Apart(Plain):
    """The same where a loss is meant of each part by itself: `return loss, 1`. Each replica's part of a microbatch is
    computed alone, and begins with the attributes, buffers and random numbers that the others begin with."""

    def __init__(self, module: nn.Module, plan: Plan, **options: Any) -> None:
        super().__init__(module, plan, **options)
        self._num_parts = 0
        self._begin: Any = None

    def _microbatches(self, batch: Any) -> list[Any]:
        pieces, count = microbatches_of(batch, self._plan, apart=True), self._plan.microbatches
        return [each for number in range(count) for each in pieces[number::count]]

    def _loss_of(self, batch: Any, metrics: Any) -> Tensor:
        if self._num_parts % self._plan.dp == 0:
            buffers = [(each, each.clone()) for each in self.module.buffers()]
            self._begin = PythonState(self.module), buffers, random.getstate()
        else:
            state, buffers, drawn = self._begin
            state.restore()
            random.setstate(drawn)
            for each, value in buffers:
                each.copy_(value)
        self._num_parts += 1
        return super()._loss_of(batch, metrics) / self._plan.dp


class InTurn(Apart):
    """The same, one replica's parts after the other's, each with the buffers that those before it have left."""

    def _microbatches(self, batch: Any) -> list[Any]:
        return microbatches_of(batch, self._plan, apart=True)

    def _loss_of(self, batch: Any, metrics: Any) -> Tensor:
        return Plain._loss_of(self, batch, metrics) / self._plan.dp


class Joined(Plain):
    """The same where the loss sees the whole batch: outputs of microbatches in turn, one under the other."""

    def train_step(self, batch: Batch, *, metrics: Any = None) -> float:
        del metrics
        self.module.zero_grad()
        result = self._loss(self._forward(batch), batch)
        loss: Tensor = result[0] / result[1] if isinstance(result, tuple) else result
        loss.backward()  # type: ignore[no-untyped-call]
        for optimizer in self.optimizers:
            optimizer.step()
        return float(loss.detach())

    def _forward(self, batch: Batch) -> Any:
        outputs = [self.module(each["x"]) for each in microbatches_of(batch, self._plan, apart=False)]
        if isinstance(outputs[0], Tensor):
            return torch.cat(outputs)
        leaves = zip(*outputs, strict=True)
        return tuple(torch.cat(parts) if parts[0].dim() else sum(parts) / len(parts) for parts in leaves)


class Placed(Joined):
    """A loop as users write it, with the module of `sw.place` over two threads."""

    def __init__(self, module: nn.Module, plan: Plan, **options: Any) -> None:
        super().__init__(module, plan, **options)
        self._placed = sw.place(
            module, ["cpu:0", "cpu:1"], microbatches=plan.microbatches, schedule=plan.schedule,
            example={"x": options["example"]["x"]},
        )  # fmt: skip

    def _forward(self, batch: Batch) -> Any:
        return self._placed(batch["x"])


def _number(value: Any) -> float:
    return float(torch.as_tensor(value).detach())


# What programs are made of. In double precision: what differs then is another computation, and no rounding.


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.down(torch.tanh(self.up(self.norm(x))))
        return x + hidden


class Net(nn.Module):
    """An embedding, two blocks and a head; the head may have the embedding's weight."""

    def __init__(self, *, tied: bool = False, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.layers = nn.ModuleList([block(), block()])
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 12, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = layer(hidden)
        scores: Tensor = self.head(self.norm(hidden))
        return scores


def small_net(**options: Any) -> Net:
    return Net(**options).double()


def batch(seed: int, rows: int = 4) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(12, (rows, 4), generator=generator)
    return {"x": ids[:, :-1], "labels": ids[:, 1:]}


def cross_entropy(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), given["labels"].flatten())


def sgd(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def in_two_groups(first: Tensor, first_rate: float, rate: float) -> Callable[..., Optimizer]:
    """One parameter with a rate of its own, and all others."""

    def make(parameters: Iterable[nn.Parameter]) -> Optimizer:
        others = [each for each in parameters if each is not first]
        groups: list[dict[str, Any]] = [{"params": [first], "lr": first_rate}, {"params": others}]
        return torch.optim.SGD(groups, lr=rate)

    return make


def trained(engine: Any, *, steps: int = 3, between: Callable[[int], Any] | None = None) -> dict[str, Any]:
    """A few steps: their losses, and the weights and buffers after them."""
    found: dict[str, Any] = {}
    for step in range(steps):
        found[f"loss {step}"] = engine.train_step(batch(step))
        if between is not None:
            found.update(between(step) or {})
    return found | {name: each for name, each in engine.state_dict().items() if isinstance(each, Tensor)}


def start(parallelize: Parallelize, model: nn.Module, optimizer: Any = sgd, **options: Any) -> Any:
    """An engine of a model of this file."""
    return parallelize(model, loss=cross_entropy, optimizer=optimizer, example=batch(0), **options)


def topics(files: Sequence[str]) -> list[str]:
    """The files that have programs; those of tensor parallelism and of what crosses stages have tests of their own."""
    apart = ("harness", "random_modules")
    return sorted(each for each in files if each not in apart and not each.startswith(("test_", "tensor", "crossing")))
