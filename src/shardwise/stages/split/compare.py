"""Run the stages of a cut on a second batch, and compare them with the unsplit module.

Tensors and numbers that a unit returns are sent to the stages that use them. State that it stores in an attribute, a
list or a global is not: another stage would use an outdated value. So all stages are run once, one after the other,
each with the attributes, lists and buffers that its process would have, and every unit must return what it returns in
the module's own forward. The second batch has other values than the example, so only true constants pass. Weights are
moved (`moved_weights.py`): one that is 0 at first hides what it is multiplied with.

    the module      embed  layers.0  layers.1  layers.2  head          prints of what each unit returns
    stage 0         embed  layers.0                                    the same prints
    stage 1                          layers.1  layers.2  head          the same prints, output and loss
"""

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import product
from operator import itemgetter
from typing import Any

import torch
from torch import nn

from shardwise.errors import ShardwiseError, some
from shardwise.stages.moved_weights import moved_weights
from shardwise.stages.split.arguments import Signature
from shardwise.stages.split.forecast import Forecast
from shardwise.stages.split.lines import line_of_error
from shardwise.stages.split.module_stage import ModuleStage
from shardwise.stages.split.outline import tensors_in
from shardwise.stages.split.parts import StagePart
from shardwise.stages.split.prints import Print, far_apart, print_of
from shardwise.stages.split.python_state import PythonState
from shardwise.stages.split.second_batch import turned_round, twice
from shardwise.stages.split.seed import Steady, seeded_alike
from shardwise.stages.split.switch import Inner, Switch, Visitor, undisturbed
from shardwise.stages.split.unit_flow import UnitFlow
from shardwise.stages.stage import Batch, Second, Values

_RETURN = "return it from the unit that computes it, as a tensor, and hand it on from there"


class _Plain:
    """A visitor that lets every unit run."""

    def call(self, unit: str, inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        del unit
        return inner(*args, **kwargs)


@dataclass(slots=True)
class _Run:
    """The results of one forward: a print for each call that was really made, of the output, and of the loss."""

    calls: dict[int, Print]
    output: Print | None = None
    loss: Print | None = None


class _Recorder:
    """Lets a visitor decide, and keeps a print of the result of each call."""

    def __init__(self, visitor: Visitor, calls: range | None, run: _Run) -> None:
        self._visitor, self._calls, self._run = visitor, calls, run
        self._steady, self._next = Steady(), 0

    def call(self, unit: str, inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        index, self._next = self._next, self._next + 1
        with self._steady.during(index):
            returned = self._visitor.call(unit, inner, args, kwargs)
        if self._calls is None or index in self._calls:
            self._run.calls[index] = print_of(returned)
        return returned


class StageCheck:
    """A trial of the stages of one cut."""

    def __init__(
        self, module: nn.Module, units: Mapping[str, nn.Module], flow: UnitFlow, parts: Sequence[StagePart],
        example: Batch, second: Second,
    ) -> None:  # fmt: skip
        self._module, self._units, self._flow, self._parts = module, units, flow, parts
        self._example, self._second = example, second
        self._signature = Signature(module)
        #: Whether the forward draws from Python's or NumPy's generators.
        self._draws = False
        self._roots = (module, *([] if second.loss is None else [second.loss]))

    def check(self) -> None:
        """Raise if stages would not compute what the module does."""
        found: ShardwiseError | None = None
        if self._second.is_tried and (len(self._parts) > 1 or self._flow.traces):
            # Other weights: a gate that is 0 at first hides what it lets through later.
            with (
                seeded_alike(),  # Ranks that run it together skip the same at random.
                moved_weights(self._module),
                undisturbed(self._module, self._units, *self._roots[1:]) as switch,
            ):
                found = self._find(switch)
        if self._second.agree is not None:
            self._second.agree(found, self._draws and len(self._parts) > 1)
        elif found is not None:
            raise found

    def _find(self, switch: Switch) -> ShardwiseError | None:
        before = PythonState(*self._roots, with_buffers=True)
        try:
            plain = [self._run_plain(switch, self._second.batch)]
            traces = before.changed()
            self._draws |= before.have_drawn()
            if traces:
                plain.append(self._run_plain(switch, self._example))
        except Exception:  # The second batch is made up, and a module may reject it.
            return None
        before.restore()
        found = self._try_stages(switch, before, plain, traces)
        if found is None and traces and len(self._parts) > len(set(self._second.processes)):
            found = self._try_stages(switch, before, plain, traces, batch_by_batch=True)
        found = found or self._try_again(switch, before, plain[0], traces)
        numbers = [f"{left.name} ({left.value!r})" for left in self._flow.left if left.is_from_data]
        if found is None and numbers and self._second.is_read_after:
            return ShardwiseError(
                f"its forward leaves {some(numbers)}, and with several microbatches that is of the last one alone",
                remedy="return it, as a tensor; or microbatches=1",
            )
        return found

    def _run_plain(self, switch: Switch, batch: Batch) -> _Run:
        run = _Run({})
        args, kwargs = self._signature.arguments(batch)
        with Steady.start(), switch.visited_by(_Recorder(_Plain(), None, run)):
            output = self._module(*args, **kwargs)
        self._end(run, output, batch)
        return run

    def _end(self, run: _Run, output: Any, batch: Batch) -> None:
        run.output = print_of(output)
        if self._second.loss is not None:
            with Steady.start():
                # A copy, as a loss may remove entries.
                run.loss = print_of(self._second.loss(output, copy(batch)))

    def _try_stages(
        self, switch: Switch, before: PythonState, plain: Sequence[_Run], traces: Mapping[str, str], *,
        batch_by_batch: bool = False,
    ) -> ShardwiseError | None:  # fmt: skip
        """Run the stages, each with the Python state that its process would have.

        A pipeline is filled before it is drained: each stage runs all batches, then the next one does. Where a process
        has several stages, `batch_by_batch` shows what the last of them leaves for the next forward of the first.
        """
        if len(self._parts) < 2:
            return None
        batches = [self._second.batch, self._example][: len(plain)]
        values: list[Values] = [{} for _ in batches]
        states: dict[int, PythonState] = {}
        misled: set[int] = set()
        forecast = Forecast(self._units, self._example)
        order = list(product(self._parts, range(len(plain))))
        for part, number in sorted(order, key=itemgetter(1)) if batch_by_batch else order:
            process = self._second.processes[part.stage] if self._second.processes else 0
            states.get(process, before).restore()
            if process not in states:
                self._flow.leave_for(self._calls_of(process))
            if part.stage not in misled:
                misled.add(part.stage)
                self._flow.mislead(self._calls_of(process) if batch_by_batch else part.calls)
            stage = ModuleStage(self._module, switch, self._flow, part, forecast)
            try:
                run = self._run_stage(stage, part, values[number], batches[number])
            except Exception as error:
                told = error.problem if isinstance(error, ShardwiseError) else f"{type(error).__name__}: {error}"
                return self._refusal(f"stage {part.stage} fails at {line_of_error(error)}: {told}", traces)
            for what, far in self._differences(run, plain[number]):
                return self._refusal(f"{what} of stage {part.stage} is {far} apart", traces)
            states[process] = before.again()
        before.restore()
        return None

    def _calls_of(self, process: int) -> set[int]:
        processes = self._second.processes
        mine = [part for part in self._parts if not processes or processes[part.stage] == process]
        return {call for part in mine for call in part.calls}

    def _run_stage(self, stage: ModuleStage, part: StagePart, values: Values, batch: Batch) -> _Run:
        run = _Run({})
        stage.visited_by = lambda visit: _Recorder(visit, part.calls, run)
        # Copied as by a transfer, so that no stage writes to what another reads.
        given = {name: _copied(values[name]) for name in part.reads.values()}
        with Steady.start():
            made, output = stage.run(given, batch)
        values.update({name: _copied(each) for name, each in made.items()})
        if part.is_last:
            self._end(run, output, batch)
        return run

    def _differences(self, run: _Run, wanted: _Run) -> Iterator[tuple[str, str]]:
        """Yield each difference from the module's own forward, with its size."""
        for call, each in run.calls.items():
            far = far_apart(each, wanted.calls.get(call))
            if far is not None:
                yield f"what {self._flow.calls[call].name} returns", far
        for what, one, other in (
            ("the output", run.output, wanted.output),
            ("the loss", run.loss, wanted.loss),
        ):
            far = None if one is None else far_apart(one, other)
            if far is not None:
                yield what, far

    def _refusal(self, what: str, traces: Mapping[str, str]) -> ShardwiseError:
        return ShardwiseError(
            f"on a second batch the {len(self._parts)} stages compute something else than the module: {what}."
            f" {self._told(traces)}",
            remedy=f"{_RETURN}; or a plan without pp",
        )

    def _told(self, traces: Mapping[str, str]) -> str:
        if self._draws:
            return "Its forward draws from Python's generators outside of units, and not all stages draw the same"
        if not traces:
            return "A unit leaves something where no other stage finds it"
        names = some([f"{name} ({words})" for name, words in traces.items()])
        return f"Its forward leaves {names}, and other stages do not have that"

    def _try_again(
        self, switch: Switch, before: PythonState, fresh: _Run, traces: Mapping[str, str]
    ) -> ShardwiseError | None:
        """Return an error if state left by one forward changes the next, depending on its rows or at all."""
        second = self._second
        if not traces or not (second.replicas or second.microbatches or second.reruns):
            return None
        names = some([f"{name} ({words})" for name, words in traces.items()])
        batches = [self._example, second.batch]
        # Of two rows the second batch may have one where it was, and a forward may leave that one alone.
        batches += [turned_round(self._example)] if second.replicas or second.microbatches else []
        after = self._run_after(switch, before, batches)
        is_of_rows = any(difference for each in after[1:] for difference in self._differences(after[0], each))
        by_row = self._left_by_row(switch, before) if second.microbatches and is_of_rows else []
        if by_row:
            return ShardwiseError(
                f"a forward leaves {some(by_row)}, with as many entries as it has rows, and the next one reads that:"
                f" under {second.microbatches} these would be other rows, those of the microbatch before",
                remedy="a plan without microbatches; or the state in the batch, and returned",
            )
        if second.replicas and is_of_rows:
            return ShardwiseError(
                f"a forward leaves {names}, which depends on its rows and changes the next one: under"
                f" {second.replicas} each replica would have its own",
                remedy="a buffer (register_buffer) for what is to be the same on all, with buffers=; or a plan without"
                " replicas",
            )
        # Attributes are restored before a forward is run again.
        lists = [f"{name} ({words})" for name, words in traces.items() if name not in self._flow.slots]
        if second.reruns and lists and any(self._differences(after[1], fresh)):
            return ShardwiseError(
                f"a forward leaves {some(lists)}, which changes the next one, and {second.reruns} runs each twice",
                remedy="an attribute or a buffer for what it leaves, and no list; or recompute=none",
            )
        return None

    def _run_after(self, switch: Switch, before: PythonState, batches: Sequence[Batch]) -> list[_Run]:
        """Run the second batch after each of these; one that is turned round may be none that the module takes."""
        after: list[_Run] = []
        for number, batch in enumerate(batches):
            before.restore()
            try:
                self._run_plain(switch, batch)
            except Exception:
                if number < 2:
                    raise
                continue
            left = PythonState(*self._roots)
            # Buffers are restored: those that a forward writes are handled separately.
            before.restore()
            left.restore()
            after.append(self._run_plain(switch, self._second.batch))
        before.restore()
        return after

    def _left_by_row(self, switch: Switch, before: PythonState) -> list[str]:
        """Return the attributes and entries that hold tensors of other shapes after a forward of twice as many rows."""
        shapes: list[dict[str, list[torch.Size]]] = []
        for batch in (self._example, twice(self._example)):
            try:
                self._run_plain(switch, batch)
            except Exception:  # Nobody said that it takes as many.
                return []
            left = {name: tensors_in(holder[key]) for name, holder, key in before.assigned()}
            shapes.append({name: [each.shape for each in tensors] for name, tensors in left.items()})
            before.restore()
        return [name for name, found in shapes[0].items() if found != shapes[1].get(name, found)]


def _copied(each: torch.Tensor) -> torch.Tensor:
    return each.detach().clone() if type(each) is torch.Tensor else each
