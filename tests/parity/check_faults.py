"""Faults of the library that `check` must find, each under a plan in which it can be made: `check_faults.toml`.

A fault is a piece of one function's text that is replaced. Ranks make it before they make an engine, in all that they
run for one check, and undo it afterwards; the one device that they are held against is another process, and is right.
Beside what its module has, a replacement may use `rank()`, the rank in the world; `calls(key)`, how often it has asked
so since the fault was made, this time included; and `noted`, a dictionary for what one call tells a later one.
"""

import inspect
import sys
import textwrap
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shardwise.errors import ShardwiseError
from shardwise.parity.check import check
from shardwise.parity.course import Course
from shardwise.parity.legs import legs_of
from shardwise.parity.models import default_settings, named_settings, problem_of
from shardwise.parity.one_device import train_alone
from shardwise.parity.problem import MakeProblem, Problem, small_matrices
from shardwise.parity.verdict import Verdict
from shardwise.planner.plan import Plan
from shardwise.ranks.spawn import Ranks
from tests.parity import check_problems

FILE = Path(__file__).with_suffix(".toml")
NUM_STEPS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SeededFault:
    """`wrong` is what goes wrong; `at` is a module and a function of it, or of a class of it.

    `model` is the default one, a known one, or a problem of `check_problems.py`. `kind` is a heading of the page.
    `steps` are as many as it takes to show: by default it is tried with these, and with `--whole` with all.
    Without `verify` layers and sequences are cut untried: a trial would see what is wrong, and leave or refuse them.
    If something `raises`, an engine refuses the next step itself, before numbers are compared.
    """

    id: str
    kind: str
    wrong: str
    plan: str
    at: str
    text: str
    replacement: str
    model: str = ""
    by_default: bool = False
    steps: int = NUM_STEPS
    verify: bool = True
    raises: str = ""


def read_faults() -> list[SeededFault]:
    """All of them, in the order of the file."""
    return [SeededFault(**each) for each in tomllib.loads(FILE.read_text(encoding="utf-8"))["fault"]]


class Found:
    """What a check said of a fault: where numbers differ first, or what was raised."""

    def __init__(self, verdict: Verdict | None, raised: str = "") -> None:
        self.verdict, self.raised = verdict, raised

    @property
    def is_found(self) -> bool:
        return self.verdict is None or not self.verdict.is_same

    @property
    def where(self) -> str:
        """In a few words."""
        if self.verdict is None:
            return f"raised: {self.raised}"
        first = self.verdict.comparison.first
        if first is not None:
            return f"{first.kind} in step {first.step}"
        halves = self.verdict.halves
        return "not found" if isinstance(halves, str) or halves.problem is None else f"bf16: {halves.problem}"


def try_fault(fault: SeededFault, ranks: Ranks, num_steps: int = NUM_STEPS) -> Found:
    """Check a plan whose ranks make a fault. A fault whose text is not there any more is none."""
    assert text_of(fault).count(fault.text) == 1, f"{fault.id}: its text is not in {fault.at}, or several times"
    plan = Plan.parse(fault.plan)
    try:
        faulty: Any = _Faulty(ranks, fault)
        make = partial(_made, _make(plan, fault.model, num_steps), fault.verify)
        return Found(check(plan, make, ranks=faulty, alone=_alone(plan, fault.model, num_steps)))
    except ShardwiseError as error:
        return Found(None, error.problem.splitlines()[0])


def _make(plan: Plan, model: str, num_steps: int) -> MakeProblem:
    if model in check_problems.PROBLEMS:
        return partial(check_problems.PROBLEMS[model], num_steps)
    return problem_of(named_settings(model, plan) if model else default_settings(plan), plan, num_steps)


def _made(make: MakeProblem, verify: bool) -> Problem:
    problem = make()
    return replace(problem, options={**problem.options, "verify": verify})


@cache
def _alone(plan: Plan, model: str, num_steps: int) -> Course:
    """One device, which is right whatever ranks do: once for all faults of a plan."""
    with small_matrices():
        problem = _make(plan, model, num_steps)()
        return train_alone(problem, plan, legs_of(plan, problem.batches))


class _Faulty:
    """Ranks that make a fault whatever they run."""

    def __init__(self, ranks: Ranks, fault: SeededFault) -> None:
        self._ranks, self._fault = ranks, fault

    def run(self, fn: Callable[..., Any], *args: Any, timeout_seconds: float | None = None) -> list[Any]:
        return self._ranks.run(_with_fault, self._fault, fn, *args, timeout_seconds=timeout_seconds)


def _with_fault(fault: SeededFault, fn: Callable[..., Any], *args: Any) -> Any:
    with made(fault):
        return fn(*args)


@contextmanager
def made(fault: SeededFault) -> Iterator[None]:
    """Where the fault is."""
    home, _, path = fault.at.partition(":")
    module = import_module(home)
    *names, name = path.split(".")
    owner: Any = module
    for each in names:
        owner = getattr(owner, each)
    before = inspect.getattr_static(owner, name)
    broken = _rewritten(fault, module, owner, name)
    # Others may have imported a function by its name.
    holders = [owner] if names else [each for each in _modules() if vars(each).get(name) is before]
    for each in holders:
        setattr(each, name, broken)
    try:
        yield
    finally:
        for each in holders:
            setattr(each, name, before)


def _modules() -> list[Any]:
    return [each for name, each in sys.modules.items() if name.startswith("shardwise")]


def _rewritten(fault: SeededFault, module: Any, owner: Any, name: str) -> Any:
    """The function of a fault, with its text replaced."""
    counts: Counter[Any] = Counter()

    def calls(key: Any) -> int:
        counts[key] += 1
        return counts[key]

    given = {**vars(module), "rank": dist.get_rank, "calls": calls, "noted": {}}
    # Inside of a function, so that `super()` finds its class.
    body = textwrap.indent(textwrap.dedent(text_of(fault).replace(fault.text, fault.replacement)), "    ")
    exec(compile(f"def _make(__class__):\n{body}\n    return {name}\n", f"<{fault.id}>", "exec"), given)
    return given["_make"](owner)


def text_of(fault: SeededFault) -> str:
    """The function that a fault is made in, as it is written."""
    home, _, path = fault.at.partition(":")
    found: Any = import_module(home)
    for name in path.split("."):
        found = inspect.getattr_static(found, name)
    function: Any = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
    return inspect.getsource(inspect.unwrap(function))
