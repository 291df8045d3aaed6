"""Compute one loss of some rows: in evaluation or training mode, of a given output, or with some values hidden."""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwise.stages.backward_trial import (
    SeenHooks,
    find_bent,
    gradients_told,
    makes_constants,
    users_part,
)
from shardwise.stages.decisions import Decisions, find_decision
from shardwise.stages.full_precision import full_precision
from shardwise.stages.label_counts import LabelCounts
from shardwise.stages.metrics import take_metrics
from shardwise.stages.rows import Seen, changed, tensors_in
from shardwise.stages.split.arguments import Signature
from shardwise.stages.split.names_reached import numbers_reached
from shardwise.stages.split.seed import seed_torch
from shardwise.stages.split.switch import Noted, undisturbed
from shardwise.stages.stage import Batch, Loss
from shardwise.stages.steady_draws import KnownStatistics, RowDraws, has_own_forward, steady_for
from shardwise.stages.trial_rows import NUM_ROWS, two_and_one
from shardwise.stages.unrounded import Unrounded, is_small
from shardwise.torch_private import RunningNormModule, submodules

#: Makes a context in which a trial is run.
Context = Callable[[], AbstractContextManager[Any]]


#: Added to a mean over labels, to see whether a loss reads it.
_FAR = 1e4
#: The tolerance of 16-bit numbers.
_OF_16_BITS = 1e-2


class Run(NamedTuple):
    """The total of a loss, the number that it is over if the loss returned one, and the means over labels found."""

    total: float
    number: float | None
    counts: list[float]
    inside: int
    labels: int
    tolerance: float
    output: Any
    #: In a run with gradients: whether the number requires one too.
    is_learned: bool = False
    #: Whether the forward wrote to buffers. A comparison of buffers tells what that means for parts.
    writes: bool = False
    #: Whether Python's or NumPy's generators were drawn from, or torch's in a way that no trial makes alike: other rows
    #: may get other draws.
    has_drawn: bool = False
    #: Whether the forward or the loss called backward itself and left gradients in parameters.
    has_left: bool = False
    #: The values of buffers after the run, if some were written.
    left: list[Tensor] = []  # noqa: RUF012 - of a tuple, and never written
    #: In training mode, if the backward may mix rows that the forward does not: products of the gradients, with the
    #: magnitude that rounding is relative to.
    gradients: Mapping[str, tuple[float, float]] = {}
    #: How many labels of each mean were ignored on purpose.
    left_out: Sequence[int] = ()


Runs = tuple[Run, Run, Run]


class Trial:
    """Computes the loss of rows any number of times, and leaves no trace.

    The first run in each mode is within the context `at_first`: one that detects collectives, for example.
    """

    def __init__(
        self, module: nn.Module, loss: Loss, precision: Context, *, meets: bool = False,
        at_first: Context = nullcontext, in_turn: bool = True, draws: RowDraws | None = None, starts: bool = True,
        compares_buffers: bool = True,
    ) -> None:  # fmt: skip
        self.module, self.loss, self.precision, self.meets = module, loss, precision, meets
        #: If given, each row draws the same in all runs, and seeds change nothing.
        self._draws = draws
        #: Whether one process computes several parts of a batch.
        self.in_turn = in_turn
        #: Whether it is told elsewhere if rows write others to buffers: replicas compare theirs.
        self.compares_buffers = compares_buffers
        self._at_first = at_first
        #: Whether the backward of a part begins with another gradient than that of the whole.
        self._starts = starts
        #: The modes (is it training?) in which nothing was run yet.
        self._unknown = {False, True}
        self._signature = Signature(module)
        self._dtypes = {each.dtype for each in module.parameters()}
        self._is_half = not self._dtypes.isdisjoint((torch.bfloat16, torch.float16))
        #: The snapshot before the first run, restored after each.
        self._noted: Noted | None = None
        #: Whether the loss reads the means over labels that the module computes. HF models compute one of any labels.
        self._reads_inside = True

    def run_in_training(self, batch: Batch) -> tuple[Run, str | None]:
        """Run in training mode; also return a description of any nonlinearity of the backward in its initial gradient.

        Batch norms stay in evaluation mode: that they normalise over the rows of a part is known.
        """
        bent: list[str | None] = []
        gradients: dict[str, tuple[float, float]] = {}
        hooks = SeenHooks()
        is_random = False

        @contextmanager
        def steadily() -> Iterator[None]:
            nonlocal is_random
            with steady_for(self.module) as draws, hooks:
                yield
            is_random = draws is not None and draws.is_random

        def look(total: Tensor, number: Any) -> None:
            del number
            whose = users_part(self.module, total, hooks)
            bent.append(find_bent(self.module, total, whose) if self._starts else None)
            if bent[0] is None and (whose or self._makes_constants):
                gradients.update(gradients_told(self.module, total))

        found = self.run(batch, training=True, within=steadily, look=look)
        drawn = found.has_drawn or is_random
        return found._replace(output=None, gradients=gradients, has_drawn=drawn), bent[0]

    @cached_property
    def _makes_constants(self) -> bool:
        return makes_constants(self.module, self.loss)

    @cached_property
    def numbers(self) -> frozenset[float]:
        """The numbers in the code of the loss, and in what it reads."""
        return numbers_reached(self.loss)

    def run(
        self, batch: Batch, ignored: float | Sequence[int] = 0.0, *, seed: int = 0, output: Any = None,
        training: bool = False, within: Context = nullcontext, look: Callable[[Tensor, Any], None] | None = None,
        decisions: Decisions | None = None, asks: bool = False, in_full: bool = False, added_inside: float = 0.0,
    ) -> Run:  # fmt: skip
        """Compute the loss of a batch, from a given `output` or from the module. `look` gets the loss with its graph,
        and the number that it is over, if there is one.

        There is a graph in training mode, or if `asks` is set. A loss of outputs `in_full` precision is not cast. Only
        the computation is `within` the context, not the snapshot and its restoration: a torch mode would see their
        operations too. To means over labels that the module computes, `added_inside` is added."""
        were_training = [each for each in modules_of(self.module) if each.training]
        counts = LabelCounts(ignored)
        norms = [each for each in were_training if training and has_own_forward(each)]
        for each in were_training:
            _set_mode(each, training and (not isinstance(each, RunningNormModule) or has_own_forward(each)))
        known = {id(each) for norm in norms for each in norm.buffers()}
        before = [(each, each.clone()) for each in self._buffers(known)] if training else []
        gradients = GradientsKept(self.module) if training else None
        try:
            with (
                undisturbed(self.module, {}, self.loss, noted=self._noted) as switch,
                full_precision(),
                nullcontext() if in_full else self.precision(),
                torch.set_grad_enabled(training or asks),
                self._draws or nullcontext(),
                KnownStatistics(norms) if norms else nullcontext(),
                within(),
                counts,
            ):
                assert switch.noted is not None
                self._noted = switch.noted
                seed_torch(seed if self._draws is None else 0)
                if self._draws is not None:
                    self._draws.begin(batch)
                is_rounded = torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")
                with decisions or (self._at_first() if training in self._unknown else nullcontext()):
                    if output is None:
                        args, kwargs = self._signature.arguments(batch)
                        with counts.adding(added_inside):
                            output = self.module(*args, **kwargs)
                    if not self._reads_inside:
                        counts.forget()
                    inside = len(counts.found)
                    result, _ = take_metrics(self.loss(output, copy(batch)))
                self._unknown.discard(training)
                has_left = gradients is not None and gradients.put_back()
                has_drawn = switch.noted.state.have_drawn()
                if look is not None:
                    look(*(result if isinstance(result, tuple) else (result, None)))
                writes = training and (
                    [*map(id, self._buffers(known))] != [id(each) for each, _ in before]
                    or any(not torch.equal(each, value) for each, value in before)
                )
                left = [each.detach().clone() for each in self.module.buffers()] if writes else []
        finally:
            for each in were_training:
                _set_mode(each, True)
        total, number = result if isinstance(result, tuple) else (result, None)
        is_rounded = (is_rounded or self._is_half) and not in_full
        tolerance = _OF_16_BITS if is_rounded else self._tolerance(total, output)
        return Run(
            float(total.detach()), None if number is None else float(torch.as_tensor(number).detach()),
            [float(each.number) for each in counts.found], inside,
            max(1, counts.found[0].size // NUM_ROWS) if counts.found else 1, tolerance, output,
            isinstance(number, Tensor) and number.requires_grad, writes, has_drawn, has_left, left,
            left_out=counts.left_out,
        )  # fmt: skip

    def _tolerance(self, total: Tensor, output: Any) -> float:
        made = {each.dtype for each in tensors_in({"": output}) if each.is_floating_point()}
        # A loss in double precision is no better than what it is computed of.
        is_single = total.dtype == torch.float64 and torch.float32 in self._dtypes | made
        dtype = torch.float32 if is_single else total.dtype
        # A GPU may use another kernel for another number of rows, with another order of sums.
        return {torch.float64: 1e-9, torch.float32: 1e-4 if total.is_cuda else 1e-5}.get(dtype, _OF_16_BITS)

    def begin(self, batch: Batch) -> Run:
        """Run for the first time, and find whether the loss reads what the module computes of labels, if it does."""
        found = self.run(batch)
        # A loss may take the larger or the smaller of two means.
        if found.inside and all(self.run(batch, added_inside=each).total == found.total for each in (-_FAR, _FAR)):
            self._reads_inside = False
            found = self.run(batch)
        return found

    def unrounded(self, batches: Sequence[Batch], output: Any) -> Sequence[Any]:
        """Return what a small module that returns numbers would return without rounding to 16 bits."""
        if all(each.dim() for each in tensors_in({"": output})) or not is_small(self.module):
            return ()
        try:
            return [self.run(each, in_full=True, within=Unrounded).output for each in batches]
        except Exception:  # A part of it may need 16 bits.
            return ()

    def again(self, draws: RowDraws | None = None) -> "Trial":
        """Return a trial with a snapshot of its own, for other weights."""
        return Trial(
            self.module, self.loss, self.precision, meets=self.meets, at_first=self._at_first, in_turn=self.in_turn,
            draws=draws, starts=self._starts, compares_buffers=self.compares_buffers,
        )  # fmt: skip

    def with_draws(self, seen: Seen) -> "Trial":
        """Return a trial in which each row draws the same numbers in runs of three rows, and of two and one of them."""
        return self.again(RowDraws(seen))

    @property
    def has_own_norms(self) -> bool:
        """Whether batch norms have a forward of their own."""
        return any(has_own_forward(each) for each in modules_of(self.module))

    def _buffers(self, known: Set[int]) -> list[Tensor]:
        """Return the buffers that a forward is not known to write."""
        return [each for each in self.module.buffers() if id(each) not in known]

    @property
    def is_lost(self) -> bool:
        """Whether some draws could not be assigned to rows."""
        return self._draws is not None and self._draws.is_lost

    @property
    def is_rounded(self) -> bool:
        """Whether losses are compared up to the rounding of 16 bits."""
        with self.precision():
            return self._is_half or torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")

    def is_random(self, batch: Batch) -> bool:
        """Whether another seed gives another loss."""
        return self.run(batch).total != self.run(batch, seed=1).total

    def has_changed(self) -> bool:
        """Whether the current run has changed state of Python that the next would read."""
        return self._noted is not None and bool(self._noted.state.changed())

    def takes(self, path: str) -> bool:
        """Whether an entry of the batch is an argument of the module."""
        return path in self._signature.names

    def decides(self, three: Batch, one: Batch) -> str | None:
        """Return the line that branches on a value over all rows; None if there is none or it cannot be tried."""
        tolerance = 0.0

        def loss_of(rows: Batch, seen: Decisions) -> float:
            nonlocal tolerance
            found = self.run(rows, decisions=seen)
            tolerance = found.tolerance
            return found.total

        try:
            # Code that tests whether anything is masked uses another kernel if not, with another rounding.
            return find_decision(loss_of, three, one, lambda: tolerance)
        except Exception:
            return None

    def less(
        self, hidden: Batch, seen: Seen, runs: Runs, ignored: float = 0.0, *, again: bool = True,
        within: Context = nullcontext,
    ) -> Runs | None:  # fmt: skip
        """Return the runs with parts of two rows hidden; None if the module or the loss does not support that.

        Without `again` only the loss gets them, on the host: an index out of range raises there, and would break a GPU.
        The module runs `within` a context: one that checks indices, for example.
        """
        two, one = two_and_one(hidden, seen)
        try:
            if again:
                whole = self.run(hidden, ignored / NUM_ROWS, within=within)
                made = whole, self.run(two, whole.left_out, within=within), runs[2]
            else:
                outputs = [_on_host(each.output) for each in runs]
                # The last row too, where nothing is hidden: a loss may read what a forward left on the module.
                hosted = [_on_host(each) for each in (hidden, two, one)]
                given = [self.run(each, output=output) for each, output in zip(hosted, outputs, strict=True)]
                # The module has counted its own labels when it made these outputs.
                counted = [
                    each._replace(counts=own.counts[: own.inside] + each.counts)
                    for each, own in zip(given, runs, strict=True)
                ]
                made = counted[0], counted[1], counted[2]
        except Exception:
            return None
        return made if all(map(is_finite, made)) else None


class GradientsKept:
    """A snapshot of the gradients of parameters."""

    def __init__(self, module: nn.Module) -> None:
        self._kept = [
            (each, each.grad, None if each.grad is None else each.grad.clone()) for each in module.parameters()
        ]

    def put_back(self) -> bool:
        """Restore the gradients; return whether any had changed."""
        found = False
        for parameter, gradient, numbers in self._kept:
            now = parameter.grad
            if now is gradient and (now is None or numbers is None or torch.equal(now, numbers)):
                continue
            found, parameter.grad = True, gradient
            if gradient is not None and numbers is not None:
                gradient.copy_(numbers)
        return found


def modules_of(module: nn.Module) -> list[nn.Module]:
    """Return a module and all modules in it. `modules()` also builds names, which takes four times as long."""
    found, waiting = {id(module): module}, [module]
    while waiting:
        for each in submodules(waiting.pop()).values():
            if each is not None and id(each) not in found:
                found[id(each)] = each
                waiting.append(each)
    return list(found.values())


def _set_mode(module: nn.Module, training: bool) -> None:
    # torch's `__setattr__` also checks for parameters, buffers and modules, which takes as long as a small layer.
    if type(module).__setattr__ is nn.Module.__setattr__:
        object.__setattr__(module, "training", training)
    else:
        module.training = training


def is_finite(run: Run) -> bool:
    return abs(run.total) < float("inf")


def _on_host(value: Any) -> Any:
    return changed({"": value}, lambda _, each: each.cpu() if isinstance(each, Tensor) else None)[""]


def are_left_alike(one: Run, other: Run) -> bool:
    """Whether two forwards of different rows left the same buffers: counts of calls, for example, but not means."""
    pairs = list(zip(one.left, other.left, strict=False))
    return len(one.left) == len(other.left) and all(a.shape == b.shape and torch.equal(a, b) for a, b in pairs)
