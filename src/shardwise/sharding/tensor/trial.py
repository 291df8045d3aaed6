"""Try a cut before making it: first on the meta device, for shapes, then with random weights, against the whole module.

The channel-group analysis is right about channels but knows nothing of constants: a module may divide by the root of
its width, take its first eight channels, or store its number of heads under an unknown name. So a copy is cut and run
as on every rank. If it fails, or computes something else, the layers at fault are

    cut otherwise       if their pieces are heads: other integers stored by their module are taken for head counts
    left whole          on every rank, by name, with the cost
    refused             if the user has named them to be cut

Blocks that differ only in their number are treated alike. Either one process tries all ranks and every other process
uses its result, or every process tries all ranks, and all get the same result.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from shardwise.errors import ShardwiseError
from shardwise.ranks.collectives import Group
from shardwise.ranks.simulated import SimulatedGroup, simulate
from shardwise.sharding.block_watch import BlockWatch
from shardwise.sharding.stand_in import another, converted, examples_of, fitting, stand_in, versions_of
from shardwise.sharding.tensor import numbers
from shardwise.sharding.tensor.channel_groups import ChannelTrace
from shardwise.sharding.tensor.cut_layers import LayerCutter, cut, is_by_heads
from shardwise.sharding.tensor.meta_runs import different_ranks, find_holder, is_crossed, run_on_meta
from shardwise.sharding.tensor.numbers import Course, Difference
from shardwise.sharding.tensor.regions import GUESSES, Found
from shardwise.sharding.tensor.sequence import UnsharedError
from shardwise.sharding.tensor.sharding import Shards, starred
from shardwise.stages.split.arguments import Signature
from shardwise.stages.split.meta import meta_twin
from shardwise.stages.stage import Batch, Loss

#: Why nothing is sharded along the sequence if a forward draws random numbers.
_DRAWS = "its forward draws at random, which each rank would for its tokens alone"


#: Arguments of a module on the meta device.
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class _UntriedError(Exception):
    """Why nothing could be compared."""


class _Whole(NamedTuple):
    """The whole copy, how it was run, and the results."""

    course: Course
    twin: nn.Module
    call: Callable[[nn.Module], Any]
    batch: Batch
    loss: Loss | None
    dtype: torch.dtype


@dataclass(kw_only=True)
class Trial:
    """One module, the cuts found for it, and how to make them."""

    module: nn.Module
    twin: nn.Module
    found: Found
    seen: ChannelTrace
    num_ranks: int
    #: One microbatch, and the arguments that it gives on the meta device.
    example: Batch
    on_meta: Arguments
    device: torch.device
    loss: Loss | None = None
    sequence: bool = False
    num_chunks: int | None = None
    named: frozenset[str] = frozenset()  #: Layers that the user has named to be cut.
    evaluates: bool = False  #: Whether it is run as in evaluation: without gradients.
    #: The context for runs of the whole; its argument says whether they are evaluations.
    around: Callable[[bool], AbstractContextManager[Any]] = nullcontext
    _writes: bool = False  #: Whether its forward writes to parameters: then the copy shares none of them.
    unverified: str = ""  #: Why numbers could not be compared, if so.
    unshared: str = ""  #: Why nothing is sharded along the sequence, though it was requested.
    draws: bool = False  #: Whether its forward drew random numbers, dropout aside.
    _first_reasons: dict[str, str] = field(default_factory=dict)
    _shards: Mapping[str, Shards] = field(default_factory=dict)  #: The shards of parameters, from the run for shapes.
    _passing: Mapping[str, Hashable] = field(default_factory=dict)  #: Blocks that may be skipped: hashes of operations.

    def settle(self, *, verify: bool) -> None:
        """Try until the remaining cuts compute the same as the whole module."""
        while (failure := self.fault(verify=verify)) is not None:
            self._give_up(*failure, guesses=verify)

    def cut_layers(self) -> list[str]:
        """Return the layers of which a rank would hold a part."""
        return [name.rpartition(".")[0] for name, lie in self._shards.items() if lie.dim is not None]

    def fault(self, *, verify: bool) -> tuple[list[str], str] | None:
        """Return the kinds of layers at fault and a description of the fault; None if there is none."""
        found = self._fault_of_shapes()
        is_cut = self.found.regions or self.found.heads or self.found.experts
        return self._fault_of_numbers() if found is None and verify and is_cut else found

    def cut(self, module: nn.Module, group: Group, *, sequence: bool | None = None) -> LayerCutter:
        """Cut a module of the same structure as this trial's."""
        with_sequence = self.sequence if sequence is None else sequence
        found = self.found.within({name for name, _ in module.named_modules()})
        return cut(module, group, found, self.seen, sequence=with_sequence, num_chunks=self.num_chunks)

    def _fault_of_shapes(self, *, blames: bool = True) -> tuple[list[str], str] | None:
        """Cut a copy on the meta device as on each rank, and run it. Without `blames` no kinds are named."""
        for rank in different_ranks(self.found, self.num_ranks):
            twin = meta_twin(self.twin)
            try:
                self._shards = self.cut(twin, SimulatedGroup(rank, self.num_ranks)).shards()
            except UnsharedError as error:
                return self._fault_without_sequence(error.problem)
            watch = BlockWatch(twin)
            try:
                run_on_meta(twin, self.on_meta, watch)
                self._passing = {path: done for path, done in watch.passing.items() if not is_crossed(self.found, path)}
            except Exception as error:
                if self.sequence and replace(self, sequence=False)._fault_of_shapes(blames=False) is None:
                    return self._fault_without_sequence(f"with a part of the tokens it raises: {error}")
                holder = find_holder(twin, error)
                why = f"{holder or type(self.module).__name__} cannot work with a part of its channels: {error}"
                if not blames:
                    return [], why
                kinds = (self._kinds_in(holder) if holder is not None else []) or _kinds_that_raise(self)
                if not kinds:
                    remedy = f'tensor={{"{starred(holder)}": "whole"}}, or tp=1' if holder else "tp=1"
                    raise ShardwiseError(why, remedy=remedy) from error
                return kinds, why
        return None

    def _fault_without_sequence(self, why: str) -> tuple[list[str], str] | None:
        """Give up sharding along the sequence, which does not change the results, and check shapes again."""
        self.sequence, self.unshared = False, why
        return self._fault_of_shapes()

    def _kinds_in(self, holder: str) -> list[str]:
        """Return the kinds of regions that have layers directly in a module."""
        within = starred(holder)
        return list(
            dict.fromkeys(
                region.kind
                for region in self.found.regions
                if any(starred(name).rpartition(".")[0] == within for name in (*region.columns, *region.rows))
            )
        )

    def _fault_of_numbers(self) -> tuple[list[str], str] | None:
        """Compare a copy of the whole module with its parts on all ranks."""
        try:
            difference = self._difference(sequence=self.sequence)
            if self.sequence and self.draws:
                return self._fault_without_sequence(_DRAWS) or self._fault_of_numbers()
            if difference is None:
                return None
            if self.sequence and self._difference(sequence=False) is None:
                return self._fault_without_sequence(f"with a part of the tokens {difference}")
            kinds = self._blamed(difference)
        except _UntriedError as error:
            self.unverified = str(error)
            return None
        if not kinds:
            raise ShardwiseError(
                f"tp={self.num_ranks} would train a different model: {difference}, and no split layer explains it",
                remedy="tp=1",
            )
        return kinds, str(difference)

    def _blamed(self, difference: Difference) -> list[str]:
        """Return the kind of cut that causes a difference: by its row, or by trying without it."""
        kinds = self._kinds()
        for kind, names in kinds.items():
            if difference.mark in names:
                return [kind]
        for kind in reversed(kinds):
            if _without(self, [kind])._difference(sequence=False) is None:
                return [kind]
        # Several at once, or none of them.
        return list(kinds) if _without(self, list(kinds))._difference(sequence=False) is None else []

    def _kinds(self) -> dict[str, list[str]]:
        """Map each kind of cut (regions by their rows, heads, experts) to the layers whose outputs show its result."""
        kinds: dict[str, list[str]] = {}
        for region in self.found.regions:
            kinds.setdefault(region.kind, []).extend(region.rows)
        for name in (*self.found.heads, *self.found.experts):
            kinds.setdefault(starred(name), []).append(name)
        return kinds

    def _difference(self, *, sequence: bool) -> Difference | None:
        """Return the first difference, if two sets of weights show one and the whole module is deterministic."""
        found: Difference | None = None
        with numbers.precisely(self.device):
            for seed in (1, 2):
                whole = self.run_whole(seed)
                found = self._compared(whole, sequence=sequence)
                if found is None and numbers.is_large(whole.course):
                    whole = self.run_whole(seed, gain=numbers.SMALL)
                    found = self._compared(whole, sequence=sequence)
                if found is None:
                    return None
                again = self._run(another(whole.twin, writes=self._writes), whole, ())
                if not numbers.are_alike(whole.course, again, whole.dtype):
                    raise _UntriedError("the module computes something else whenever it is called")
        return found

    def run_whole(self, seed: int, gain: float = 1.0) -> _Whole:
        """Run the whole copy: on few tokens and in float64, if the module supports it."""
        problem: Exception | None = None
        device, dtypes = fitting(self.module, self._sort, self.device)
        for example in examples_of(self.example, self.module, all_tokens=self.sequence):
            for dtype in dtypes:
                for loss in (self.loss, None):
                    try:
                        return self._whole_of(example, dtype, device, loss, seed, gain)
                    except Exception as error:
                        problem = problem or error
        raise _UntriedError(f"{type(problem).__name__}: {problem}")

    def _sort(self, name: str) -> Hashable:
        """Return how a parameter is sharded: parameters sharded differently cannot share memory in the copy."""
        if self._writes:
            return name
        lie = self._shards.get(name)
        return None if lie is None else (lie.dim, lie.runs, lie.is_partial)

    def _whole_of(
        self, example: Batch, dtype: torch.dtype, device: torch.device, loss: Loss | None, seed: int, gain: float
    ) -> _Whole:
        twin = stand_in(self.module, self._sort, self._passing, dtype=dtype, device=device, seed=seed, gain=gain)
        batch = converted(example, dtype, device)
        args, kwargs = Signature(self.module).arguments(batch)

        def call(module: nn.Module) -> Any:
            return module(*args, **kwargs)

        versions = versions_of(twin)
        problem: Exception | None = None
        try:
            copied, marks = another(twin, writes=self._writes), self._marks(twin)
            with self.around(self.evaluates):
                course = numbers.run(copied, call, marks, loss, batch, self.module, off=self.evaluates)
        except Exception as error:
            problem = error
        # Writes to the copy's parameters also count in the twin, whose memory they share.
        if not self._writes and versions != versions_of(twin):
            self._writes = True
            return self._whole_of(example, dtype, device, loss, seed, gain)
        if problem is not None:
            raise problem
        self.draws = self.draws or course.has_drawn
        return _Whole(course, twin, call, batch, loss, dtype)

    def _compared(self, whole: _Whole, *, sequence: bool) -> Difference | None:
        """Compare the copy's parts on all ranks with the whole."""
        modules: dict[int, nn.Module] = {}
        shards: dict[int, dict[str, Shards]] = {}
        before = numbers.StateOfLoss(whole.loss, with_buffers=True)

        def on_rank(group: SimulatedGroup) -> Course:
            modules[group.rank] = module = another(whole.twin, writes=self._writes)
            shards[group.rank] = self.cut(module, group, sequence=sequence).shards()
            return self._run(module, whole, self._marks(module), before=before)

        try:
            ranks = simulate(self.num_ranks, on_rank)
        except Exception as error:
            holders = [find_holder(each, error) for each in modules.values()]
            rows = [row for each in holders if each for kind in self._kinds_in(each) for row in self._kinds()[kind]]
            return Difference(mark=rows[0] if rows else "", error=1.0, raised=str(error))
        finally:
            before.restore()
        return numbers.compare(whole.course, ranks, shards[0], whole.dtype, with_marks=not sequence)

    def _run(self, module: nn.Module, whole: _Whole, marks: Sequence[str], **options: Any) -> Course:
        """Run a copy as the whole one was run."""
        given = module, whole.call, marks, whole.loss, whole.batch, self.module
        return numbers.run(*given, off=self.evaluates, **options)

    def _marks(self, module: nn.Module) -> list[str]:
        """Return the layers of a copy whose outputs are compared."""
        there = {name for name, _ in module.named_modules()}
        names = [name for names in self._kinds().values() for name in names]
        return [name for name in names if name in there and name not in self.found.heads]

    def _give_up(self, kinds: list[str], why: str, *, guesses: bool) -> None:
        """Cut layers of these kinds otherwise, if a guess is left, or leave them whole."""
        for kind in kinds:
            self._first_reasons.setdefault(kind, why)
        regions = [region for region in self.found.regions if region.kind in kinds]
        if guesses and regions and all(is_by_heads(each, self.seen) and each.guess != GUESSES[-1] for each in regions):
            for region in regions:
                region.guess = GUESSES[GUESSES.index(region.guess) + 1]
            return
        reasons = {
            name: self._first_reasons[region.kind] for region in regions for name in (*region.columns, *region.rows)
        }
        others = [name for name in (*self.found.heads, *self.found.experts) if starred(name) in kinds]
        reasons |= {name: self._first_reasons[starred(name)] for name in others}
        for name, reason in reasons.items():
            if name in self.named:
                raise ShardwiseError(f"{name} cannot be cut: {reason}", remedy=f'tensor={{"{name}": "whole"}}, or tp=1')
        self.found = _without(self, kinds).found
        self.found.whole |= reasons
        self.found.kept |= reasons.keys()


def _kinds_that_raise(trial: Trial) -> list[str]:
    """Return the kinds of cuts without which a copy runs: one if that is enough, else all. The layers of the root
    itself, and those of lists without a forward, have no module around them to blame."""
    every = list(trial._kinds())
    for kinds in (*([each] for each in reversed(every)), every):
        if _without(trial, kinds)._fault_of_shapes(blames=False) is None:
            return kinds
    return []


def _without(trial: Trial, kinds: list[str]) -> Trial:
    """Return the same trial with some kinds of layers whole."""
    found = replace(
        trial.found,
        regions=[region for region in trial.found.regions if region.kind not in kinds],
        heads=[name for name in trial.found.heads if starred(name) not in kinds],
        experts=[name for name in trial.found.experts if starred(name) not in kinds],
        whole=dict(trial.found.whole),
    )
    return replace(trial, found=found)


class Settled(NamedTuple):
    """The cuts, and whether also along the sequence; why numbers were not compared, or nothing is sharded along the
    sequence; and whether the forward draws random numbers."""

    found: Found
    sequence: bool
    unverified: str
    unshared: str
    draws: bool


#: The context for the first runs of a trial.
AtFirst = Callable[[], AbstractContextManager[Any]]
#: Takes a function that settles on one rank; returns what one rank has settled for all, or each for itself.
ByFirst = Callable[[Callable[[AtFirst], Settled]], Settled]


def settle(trial: Trial, *, verify: bool, by_first: ByFirst | None = None) -> None:
    """Try until the remaining cuts compute the same as the whole module, in evaluation too. `by_first`: on one rank."""

    def attempt(at_first: AtFirst) -> Settled:
        trial.around = _FirstRuns(at_first).around
        trial.settle(verify=verify)
        if verify and differs_in_evaluation(trial):
            settle_in_evaluation(trial)
        return Settled(trial.found, trial.sequence, trial.unverified, trial.unshared, trial.draws)

    settled = attempt(nullcontext) if by_first is None else by_first(attempt)
    trial.found, trial.sequence, trial.unverified, trial.unshared, trial.draws = settled


class _FirstRuns:
    """Runs the first run in training, and the first in evaluation, within a context: one that detects collectives, if
    only one rank tries the module."""

    def __init__(self, at_first: AtFirst) -> None:
        self._at_first, self._known = at_first, set[bool]()

    @contextmanager
    def around(self, evaluates: bool) -> Iterator[None]:
        with nullcontext() if evaluates in self._known else self._at_first():
            yield
        self._known.add(evaluates)


def differs_in_evaluation(trial: Trial) -> bool:
    """Whether the whole module, without dropout, computes something else in evaluation mode; or the same without
    calling layers that are cut, like fast paths that read their weights."""
    is_cut = trial.found.regions or trial.found.heads or trial.found.experts
    if not is_cut or trial.unverified or not numbers.may_differ(trial.module):
        return False
    try:
        with numbers.precisely(trial.device):
            whole = trial.run_whole(1)
            one, other = (another(whole.twin, writes=trial._writes) for _ in range(2))
            there = {name for name, _ in other.named_modules()}
            layers = [name for name in trial.cut_layers() if name in there]
            evaluated = replace(trial, evaluates=True)
            with trial.around(True):
                first = evaluated._run(one, whole, layers)
                with in_evaluation_mode(other):
                    second = evaluated._run(other, whole, layers)
    except Exception:
        return True
    called = [[name for name, _ in each.marks] for each in (first, second)]
    return called[0] != called[1] or not numbers.are_alike(first, second, whole.dtype)


def settle_in_evaluation(trial: Trial) -> None:
    """Try until the remaining cuts also compute the same as the whole module in evaluation mode."""
    trial.evaluates = True
    with in_evaluation_mode(trial.module, trial.twin):
        trial.settle(verify=True)
    trial.evaluates = False


@contextmanager
def in_evaluation_mode(*modules: nn.Module) -> Iterator[None]:
    """Set evaluation mode, and restore it afterwards. It sets attributes, since a user may override `train()`."""
    training = [each for module in modules for each in module.modules() if each.training]
    for each in training:
        each.training = False
    try:
        yield
    finally:
        for each in training:
            each.training = True
