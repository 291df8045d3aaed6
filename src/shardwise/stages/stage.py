"""The interface between a splitter and an executor: the stages of a module, and the values that flow between them.

A value is one named tensor that a stage makes and others read. One stage makes it; any later stages may read it, not
only the next one. A skip connection is nothing more than that.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from shardwise.errors import ShardwiseError

#: Values by name. A stage makes tensors; a batch may hold anything.
Values = dict[str, torch.Tensor]
Batch = Mapping[str, Any]

#: Maps the module's output and the microbatch to its loss, or to a sum and the number that it is summed over; either
#: may be followed by metrics by name (`metrics.py`).
Loss = Callable[[Any, Batch], "torch.Tensor | tuple[Any, ...]"]

#: A call of a unit, whatever its arguments.
Call = Callable[..., Any]


class Stage(Protocol):
    """One stage, as an executor sees it."""

    #: Its parameters and buffers, by their names in the original module. A tied parameter is in each of its stages.
    parameters: Mapping[str, nn.Parameter]
    buffers: Mapping[str, torch.Tensor]

    def run(self, values: Values, batch: Batch) -> tuple[Values, Any]:
        """Compute on one microbatch: `values` are those it reads, `batch` the microbatch's entries.

        Return the values that other stages read, and the module's output if this is the last stage (else None).
        Nothing is detached or moved: gradients flow from the returned values to `values` and to the parameters.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Split:
    """A module in stages. Stages that are not materialised in this process are None.

    `reads[stage]` and `writes[stage]` are names of values, in a fixed order that all processes share. `makers` is the
    stage that makes each. `ties` are the parameters that several stages hold: original name to stages, first to last.
    `units` are the pieces of each stage by name, so that one can check that none is lost. `unit_costs` are their costs
    in FLOPs or the equivalent, and `unit_bytes` the bytes of their weights. `left` are attributes and the like that
    forwards write: the dictionaries that hold them, and their keys. `rewritten` are parameters that forwards write to,
    and how (`split/write_guard.py`). `shapes_by_data`: the shapes of values between stages may depend on the data, not
    only on the shapes of the batch. `compiled` is a function that the user compiles and that calls units. `assigns`:
    the module's own forward puts values into attributes, which other threads that run it would find. `held_last` are
    the names of the parameters and buffers that the last stage holds. `evaluated` makes the split of evaluations from
    this one, where they need another.
    """

    stages: tuple[Stage | None, ...]
    reads: tuple[tuple[str, ...], ...]
    writes: tuple[tuple[str, ...], ...]
    makers: Mapping[str, int]
    ties: Mapping[str, tuple[int, ...]]
    units: tuple[tuple[str, ...], ...]
    unit_costs: tuple[tuple[float, ...], ...] = ()
    unit_bytes: tuple[tuple[float, ...], ...] = ()
    left: tuple[tuple[dict[str, Any], str], ...] = ()
    rewritten: Mapping[str, Any] = field(default_factory=dict)
    shapes_by_data: bool = False
    draws_in_python: bool = False
    compiled: str | None = None
    assigns: bool = False
    held_last: frozenset[str] = frozenset()
    evaluated: Callable[["Split"], "Split"] | None = None

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    @property
    def as_data(self) -> dict[str, Any]:
        """The cut in plain values: the number of units of each stage, and the cost and bytes of each unit."""
        stages = zip(self.unit_costs, self.unit_bytes, strict=True)
        return {
            "layers": "+".join(str(len(units)) for units in self.units),
            "units": [[list(unit) for unit in zip(costs, sizes, strict=True)] for costs, sizes in stages],
        }

    @property
    def of_evaluation(self) -> "Split":
        """The stages as evaluations and predictions run them."""
        return self if self.evaluated is None else self.evaluated(self)

    @property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """Every (maker, reader), each once, in order."""
        pairs = {(self.makers[name], reader) for reader, names in enumerate(self.reads) for name in names}
        return tuple(sorted(pairs))

    def between(self, maker: int, reader: int) -> tuple[str, ...]:
        """Return the values that one stage makes and another reads."""
        return tuple(name for name in self.reads[reader] if self.makers[name] == maker)


@dataclass(frozen=True, kw_only=True)
class Second:
    """A second batch on which stages are compared with the unsplit module (`split/compare.py`)."""

    batch: Batch
    loss: Loss | None = None
    #: Which process runs each stage.
    processes: Sequence[int] = ()
    #: Why state that forwards leave in attributes must not depend on their rows (`dp=2`, for example), or must not have
    #: an entry for each of them (`microbatches=4`); and why a forward must leave no trace (`recompute=full`).
    replicas: str | None = None
    microbatches: str | None = None
    reruns: str | None = None
    #: Whether the user's own code may read attributes left by a forward of several microbatches.
    is_read_after: bool = False
    #: Whether stages are run by several threads of this process.
    has_threads: bool = False
    #: Takes the error that speaks against the cut (None if none does), and whether forwards draw from Python's
    #: generators outside of units. Raises the error of any rank.
    agree: Callable[[ShardwiseError | None, bool], None] | None = None
    #: Whether this process runs the comparison; another may do so for it.
    is_tried: bool = True
