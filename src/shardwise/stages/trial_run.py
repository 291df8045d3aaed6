"""One loss of some rows: in evaluation or in training mode, of an output that is there, with something hidden."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwise.errors import some
from shardwise.stages.backward_trial import SeenHooks, find_bent
from shardwise.stages.decisions import Decisions, find_decision
from shardwise.stages.full_precision import full_precision
from shardwise.stages.label_counts import LabelCounts
from shardwise.stages.metrics import take_metrics
from shardwise.stages.rows import Seen, changed
from shardwise.stages.split.arguments import Signature
from shardwise.stages.split.python_state import PythonState
from shardwise.stages.split.seed import seed_torch
from shardwise.stages.split.switch import Noted, undisturbed
from shardwise.stages.stage import Batch, Loss
from shardwise.stages.steady_draws import steady_for
from shardwise.stages.trial_rows import FIRST, NUM_ROWS, two_and_one
from shardwise.torch_private import RunningNormModule, submodules

#: What a trial is run in.
Context = Callable[[], AbstractContextManager[Any]]


class Run(NamedTuple):
    """One number of the loss, the number that it is over if it was told, and the means over labels that were seen."""

    total: float
    number: float | None
    counts: list[float]
    inside: int
    labels: int
    tolerance: float
    output: Any
    #: Of a run with gradients: whether its number has one too.
    is_learned: bool = False
    #: Whether the forward wrote to buffers: what then comes of parts is told by who compares these.
    writes: bool = False
    #: Whether Python's or NumPy's generators were drawn from: other rows may draw something else.
    has_drawn: bool = False
    #: Whether a backward of its own has left gradients in parameters.
    has_left: bool = False
    #: What buffers had then, if some were written.
    left: list[Tensor] = []  # noqa: RUF012 - of a tuple, and never written


Runs = tuple[Run, Run, Run]


class Trial:
    """Computes the loss of rows as often as is asked, and leaves no trace.

    Its first run of either mode is `at_first` within another context: one that looks for collectives, say.
    """

    def __init__(
        self, module: nn.Module, loss: Loss, precision: Context, *, meets: bool = False, at_first: Context = nullcontext
    ) -> None:
        self.module, self.loss, self._precision, self.meets = module, loss, precision, meets
        self._at_first = at_first
        #: The modes, training or not, in which nothing was run yet.
        self._unknown = {False, True}
        self._signature = Signature(module)
        self._is_half = any(each.dtype in (torch.bfloat16, torch.float16) for each in module.parameters())
        #: What was there before the first run, and is there again after each.
        self._noted: Noted | None = None

    def run_in_training(self, batch: Batch) -> tuple[Run, str | None]:
        """The same in training mode; and what in the backward is not in proportion to the gradient it begins with.

        Batch norms are as in evaluation: that each normalises its own rows is known.
        """
        bent: list[str | None] = []
        hooks = SeenHooks()

        @contextmanager
        def steadily() -> Iterator[None]:
            with steady_for(self.module), hooks:
                yield

        found = self.run(
            batch, training=True, within=steadily,
            look=lambda total: bent.append(find_bent(self.module, total, hooks)),
        )  # fmt: skip
        return found._replace(output=None), bent[0]

    def run(
        self, batch: Batch, ignored: float = 0.0, *, seed: int = 0, output: Any = None, training: bool = False,
        within: Context = nullcontext, look: Callable[[Tensor], None] | None = None,
        decisions: Decisions | None = None, asks: bool = False,
    ) -> Run:  # fmt: skip
        """The loss of a batch; of an `output` that is given, or else computed. `look` is given it with its graph.

        There is one in training mode, and where it `asks` for one of an output. What is computed is computed `within` a
        context; what is noted and put back around it is not: a mode of torch would look at all of that too."""
        were_training = [each for each in modules_of(self.module) if each.training]
        counts = LabelCounts(ignored)
        for each in were_training:
            _set_mode(each, training and not isinstance(each, RunningNormModule))
        before = [(each, each.clone()) for each in self.module.buffers()] if training else []
        gradients = GradientsKept(self.module) if training else None
        try:
            with (
                undisturbed(self.module, {}, self.loss, noted=self._noted) as switch,
                full_precision(),
                self._precision(),
                torch.set_grad_enabled(training or asks),
                within(),
                counts,
            ):
                assert switch.noted is not None
                self._noted = switch.noted
                seed_torch(seed)
                is_rounded = torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")
                with decisions or (self._at_first() if training in self._unknown else nullcontext()):
                    if output is None:
                        args, kwargs = self._signature.arguments(batch)
                        output = self.module(*args, **kwargs)
                    inside = len(counts.found)
                    result, _ = take_metrics(self.loss(output, copy(batch)))
                self._unknown.discard(training)
                has_left = gradients is not None and gradients.put_back()
                has_drawn = switch.noted.state.have_drawn()
                if look is not None:
                    look(result[0] if isinstance(result, tuple) else result)
                writes = training and (
                    [*map(id, self.module.buffers())] != [id(each) for each, _ in before]
                    or any(not torch.equal(each, value) for each, value in before)
                )
                left = [each.detach().clone() for each in self.module.buffers()] if writes else []
        finally:
            for each in were_training:
                _set_mode(each, True)
        total, number = result if isinstance(result, tuple) else (result, None)
        # A GPU has another kernel for another number of rows, which adds up in another order.
        tolerance = {torch.float64: 1e-9, torch.float32: 1e-4 if total.is_cuda else 1e-5}.get(total.dtype, 1e-2)
        if is_rounded or self._is_half:
            tolerance = 1e-2
        return Run(
            float(total.detach()), None if number is None else float(torch.as_tensor(number).detach()),
            [float(each.number) for each in counts.found], inside,
            max(1, counts.found[0].size // NUM_ROWS) if counts.found else 1, tolerance, output,
            isinstance(number, Tensor) and number.requires_grad, writes, has_drawn, has_left, left,
        )  # fmt: skip

    def decides(self, three: Batch, one: Batch) -> str | None:
        """The line that decides by a number of all rows; None too where that cannot be tried."""
        tolerance = 0.0

        def loss_of(rows: Batch, seen: Decisions) -> float:
            nonlocal tolerance
            found = self.run(rows, decisions=seen)
            tolerance = found.tolerance
            return found.total

        try:
            # Whoever asks whether anything is masked takes another kernel if not, which rounds otherwise.
            return find_decision(loss_of, three, one, lambda: tolerance)
        except Exception:
            return None

    def less(self, hidden: Batch, seen: Seen, runs: Runs, ignored: float = 0.0, *, again: bool = True) -> Runs | None:
        """The same where some of two rows is hidden; None if the module or the loss does not take that.

        Without `again` the loss alone is given it, on the host: what is out of range there raises, and no GPU is lost.
        """
        two = two_and_one(hidden, seen)[0]
        try:
            if again:
                made = self.run(hidden, ignored / NUM_ROWS), self.run(two, ignored / FIRST), runs[2]
            else:
                outputs = [_on_host(each.output) for each in runs]
                hosted = [_on_host(each) for each in (hidden, two)]
                made = self.run(hosted[0], output=outputs[0]), self.run(hosted[1], output=outputs[1]), runs[2]
        except Exception:
            return None
        return made if all(map(is_finite, made)) else None

    @torch.no_grad()
    def remembers(self, before: tuple[Batch, Run], then: tuple[Batch, Run]) -> str | None:
        """What the loss leaves behind for its next call, if that is another for it."""
        kept = PythonState(self.loss)
        try:
            with undisturbed(self.module, {}, self.loss), self._precision():
                at_first = self._total(*then)
                kept.restore()
                self._total(*before)
                changed = kept.changed()
                later = self._total(*then)
        except Exception:  # It reads what a forward leaves for it, and there is none here.
            return None
        if not changed or abs(later - at_first) <= then[1].tolerance * abs(at_first):
            return None
        return some([f"{name} ({words})" for name, words in changed.items()])

    def _total(self, batch: Batch, run: Run) -> float:
        seed_torch(0)
        result, _ = take_metrics(self.loss(run.output, copy(batch)))
        return float(result[0] if isinstance(result, tuple) else result)


class GradientsKept:
    """The gradients that parameters have."""

    def __init__(self, module: nn.Module) -> None:
        self._kept = [
            (each, each.grad, None if each.grad is None else each.grad.clone()) for each in module.parameters()
        ]

    def put_back(self) -> bool:
        """Whether any is another now; and as they were."""
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
    """A module and all inside of it. `modules()` names them as well, which takes four times as long."""
    found, waiting = {id(module): module}, [module]
    while waiting:
        for each in submodules(waiting.pop()).values():
            if each is not None and id(each) not in found:
                found[id(each)] = each
                waiting.append(each)
    return list(found.values())


def _set_mode(module: nn.Module, training: bool) -> None:
    # What torch's modules do beside it (is it a parameter, a buffer, a module?) takes as long as a small layer.
    if type(module).__setattr__ is nn.Module.__setattr__:
        object.__setattr__(module, "training", training)
    else:
        module.training = training


def is_finite(run: Run) -> bool:
    return abs(run.total) < float("inf")


def _on_host(value: Any) -> Any:
    return changed({"": value}, lambda _, each: each.cpu() if isinstance(each, Tensor) else None)[""]
