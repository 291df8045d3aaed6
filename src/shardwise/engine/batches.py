"""This process's part of a batch: its rows (dp), cut into microbatches, and its tokens of these (cp)."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwise.engine.first_steps import FirstSteps
from shardwise.engine.parts import Parts
from shardwise.engine.rank_device import batch_on
from shardwise.engine.same_batch import SameBatch
from shardwise.engine.same_weights import outside_writes, settings_of
from shardwise.errors import ShardwiseError
from shardwise.planner.plan import Plan
from shardwise.ranks.mesh import Mesh
from shardwise.sharding.context.sequence_shards import LocalBatch
from shardwise.sharding.dropout import Place, num_tokens_of
from shardwise.sharding.zigzag import zigzag_shard
from shardwise.stages.batch import cut_batch
from shardwise.stages.rows import RowRule, Seen, check_openable, take_rows, unmarked
from shardwise.stages.split.module_stage import ModuleStage
from shardwise.stages.stage import Batch


class Cutter:
    """Cuts batches for a process by one rule. It gets all rows or, if `is_local`, those of its replica."""

    def __init__(self, plan: Plan, mesh: Mesh, rule: RowRule, *, pad: bool, is_local: bool) -> None:
        self._plan, self._mesh, self._pad = plan, mesh, pad
        self.rule, self.is_local = rule, is_local
        self._num_replicas = 1 if is_local else plan.dp
        #: The index of this process's first row in the whole batch that was cut last.
        self.first_row = 0
        #: Which replica's rows are cut, counted from this process's own: another replica can repeat a step.
        self.shift = 0

    def cut(self, batch: Batch, device: torch.device | None = None) -> list[Batch]:
        """Return the microbatches of this process; on a device, if one is given."""
        if self._num_replicas * self._plan.microbatches == 1 and not self._pad:
            seen = Seen(self.rule.length(batch), frozenset())
            mine = unmarked(batch)
        else:
            check_openable(batch)
            seen = self.rule.look(batch)
            mine, seen = self._rows(batch, seen)
        self.first_row = self._replica * seen.length
        mine = mine if device is None else batch_on(mine, device)
        return cut_batch(mine, self._plan.microbatches, pad=self._pad, seen=seen)

    @property
    def _replica(self) -> int:
        return (self._mesh.coordinates["dp"] + self.shift) % self._plan.dp

    def _rows(self, batch: Batch, seen: Seen) -> tuple[Batch, Seen]:
        """Return the rows of this process's replica."""
        count, length = self._num_replicas, seen.length
        if length % count:
            below = length - length % count
            raise ShardwiseError(
                f"a batch of {length} cannot be shared out evenly over dp={count} replicas",
                remedy=f"a batch of {' or '.join(str(each) for each in (below, below + count) if each)}",
            )
        mine = self._replica if count > 1 else 0
        size = length // count
        return take_rows(batch, seen, mine * size, (mine + 1) * size), seen._replace(length=size)


class Batches:
    """Takes this process's part of every batch, and compares batches and `optimizers` between processes."""

    def __init__(self, parts: Parts, optimizers: Sequence[Optimizer]) -> None:
        self._plan, self._mesh, self._device = parts.plan, parts.wires.mesh, parts.device
        self._context, is_local = parts.sharded.context, parts.options.is_local
        self._cutter = Cutter(parts.plan, self._mesh, parts.rule, pad=parts.options.pad, is_local=is_local)
        self.outside, self.first = outside_writes(parts), FirstSteps(parts)
        self._check_weights = getattr(parts.loss, "check_weights", None)
        self.same = SameBatch(
            parts.plan, parts.wires, is_local=is_local, settings=lambda: settings_of(optimizers), outside=self.outside,
            routes=[each.route for each in parts.split.stages if isinstance(each, ModuleStage)], values=parts.settings,
            device=parts.device, computed=(parts.module, parts.loss), draws=self._draws(parts),
            parts=getattr(parts.loss, "alike", None), in_python=parts.split.draws_in_python,
        )  # fmt: skip

    @staticmethod
    def _draws(parts: Parts) -> bool:
        """Whether forwards may draw from torch's generators: cut layers were tried, unless that was not asked for."""
        tensor = parts.sharded.tensor
        return tensor is None or tensor.draws or not parts.options.verify

    def cut(self, batch: Batch, what: str = "step", *, predicts: bool = False) -> list[Batch]:
        """Return the microbatches of this process, on its device. `predicts`: they are used without a loss."""
        self.same.take(batch, what)
        if self._check_weights is not None and not predicts:
            self._check_weights(unmarked(batch))
        found, context = self._cutter.cut(batch, self._device), self._context
        return found if context is None else [context.cut(each, predicts=predicts) for each in found]

    @contextmanager
    def of_replica(self, shift: int) -> Iterator[None]:
        """Take the part of the replica that is `shift` after this one, within the context. All ranks do so alike."""
        assert shift == 0 or not self._cutter.is_local, "only who is given all rows has those of others"
        self._cutter.shift = shift
        try:
            yield
        finally:
            self._cutter.shift = 0

    @property
    def rule(self) -> RowRule:
        return self._cutter.rule

    def explain(self) -> list[str]:
        """Describe how batches are treated, in lines."""
        plan, rule, last = self._plan, self._cutter.rule, self._cutter.rule.last
        given = "rows of its own" if self._cutter.is_local else "all rows, and takes its own"
        lines = [f"every replica is given {given} ({plan.dp} replicas, {plan.microbatches} microbatches of each)"]
        if self.first.compared:
            lines.append(f"compared with steps of one process, and equal: {', '.join(map(str, self.first.compared))}")
        if last is None:
            return [*lines, "nothing is cut: each process takes the whole batch"]
        cut = ", ".join(sorted(last.paths)) or "nothing"
        lines.append(f"cut along its rows ({last.length} in the last batch): {cut}")
        for path in sorted(rule.uncut):
            why = "as long as the batch by chance, which was tried" if path in rule.tables else "it has no rows"
            lines.append(f"not cut: {path} ({why})")
        return lines

    def place(self, microbatch: Batch, step: int) -> Place:
        """Return the place of this process's first microbatch in the batch that was cut last."""
        axes, plan = self._mesh.coordinates, self._plan
        place = Place(step=step, first_row=0, num_tokens=num_tokens_of(microbatch))
        if plan.num_ranks == plan.pp:
            return place
        tokens: Tensor | None = None
        if isinstance(microbatch, LocalBatch):
            tokens = zigzag_shard(torch.arange(microbatch.tokens.length), 0, axes["cp"], plan.cp)
        num_pieces = plan.tp if plan.sp else 1
        first_row = self._cutter.first_row
        return replace(place, first_row=first_row, tokens=tokens, piece=axes["tp"] % num_pieces, num_pieces=num_pieces)
