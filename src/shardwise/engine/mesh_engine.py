"""The engine of a mesh: this process runs one rank of one of several pipelines, on its part of every layer and batch.

batch ── rows of this replica (dp) ── microbatches ── tokens of this rank (cp) ──┐
                                                                                executor (pp)
module ── its part of layers (tp) ── its experts (ep) ── its stages (pp) ────────┘     │
                                                                         REDUCE, GATHER, RELEASE: data/ (dp, ZeRO)
"""

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.engine.distributed import ConnectedTrainer
from shardwise.engine.mesh_parts import MeshParts
from shardwise.engine.mesh_state import MeshState
from shardwise.engine.move_experts import place_experts
from shardwise.engine.optimizer_state import MeshOptimizers
from shardwise.engine.options import Options
from shardwise.engine.prepare import prepare
from shardwise.errors import ShardwiseError
from shardwise.execution.interpreter import Tally
from shardwise.execution.local import Record
from shardwise.execution.memory_by_owner import GRADIENTS, OPTIMIZER, PARAMETERS
from shardwise.execution.pipeline import complete
from shardwise.execution.recording import Recording, listening_to
from shardwise.planner.plan import Plan
from shardwise.ranks.collectives import Group
from shardwise.ranks.collectives import Traffic as GroupTraffic
from shardwise.ranks.faults import PipelineWatch
from shardwise.ranks.mesh import make_mesh
from shardwise.ranks.replicas import Replicas, make_replicas
from shardwise.schedule.instruction import Kind
from shardwise.schedule.schedule import Schedule
from shardwise.sharding.context.parallel import ContextParallel
from shardwise.sharding.context.sequence_shards import LocalBatch
from shardwise.sharding.context.stages import in_context
from shardwise.sharding.dropout import Place
from shardwise.sharding.expert.move import better_placements, count_moved
from shardwise.sharding.expert.shard import shard_experts
from shardwise.sharding.rng_tracker import Channels
from shardwise.sharding.tensor.columns import ColumnParallelLinear
from shardwise.sharding.tensor.shard import shard
from shardwise.sharding.tensor.sharding import Sharding
from shardwise.sharding.zigzag import zigzag_shard
from shardwise.stages.activation_bytes import KeptBytes
from shardwise.stages.batch import cut_batch, home_of, length_of
from shardwise.stages.losses import summed_only
from shardwise.stages.stage import Batch, Loss, Split
from shardwise.states.batch_norm import SharedStatistics
from shardwise.states.buckets.make import Sharing
from shardwise.states.buckets.tie_groups import make_ties
from shardwise.states.data_parallel import DataParallel
from shardwise.states.parameter_group import MakeOptimizer, Share
from shardwise.trace.events import Traffic

# Stages whose weights are gathered at a time, where a stage's come at once.
_MAX_GATHERED = 2


class MeshEngine(ConnectedTrainer):
    """Trains a module under a plan of several axes; every process of the default group holds one and calls it alike.

    All are given the same batch, of which each computes its part.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: Plan,
        *,
        loss: Loss,
        optimizer: MakeOptimizer | Sequence[Share],
        example: Batch,
        options: Options | None = None,
    ) -> None:
        how = options or Options()
        self.plan, self.mesh = plan, make_mesh(plan)
        self.rank = self.mesh.coordinates["pp"]
        self.ranks = (self.rank,)
        order = [name for name, _ in module.named_parameters()]
        shapes = {name: each.shape for name, each in module.state_dict().items() if isinstance(each, Tensor)}
        loss = summed_only(loss, plan.cp) if plan.cp > 1 else loss
        rows = self._rows(example)
        # What is dropped in training is seen in training mode only.
        self.tensor = self._shard(module.train(), cut_batch(rows, plan.microbatches, pad=how.pad)[0], how)
        self._context: ContextParallel | None = None
        if plan.dp * plan.cp > 1:
            self.experts = shard_experts(module, self.mesh, real=self._real_tokens)
        stages, schedule, callers = prepare(module, plan, loss=loss, example=rows, rank=self.rank, options=how)
        self._has_attended = False
        self._sent_before: list[tuple[Group, GroupTraffic]] = []
        self._context = self._attach_context(module, how)
        stages = stages if self._context is None else in_context(stages, self._context)
        self._sharing = Sharing(
            zero=plan.zero,
            masters=plan.precision != "fp32",
            layerwise=not _splits_backward(schedule),
            lodged=plan.offload.parameters,
        )
        if how.bucket_bytes is not None:
            self._sharing = replace(self._sharing, bucket_bytes=how.bucket_bytes)
        super().__init__(module, plan, stages, schedule, optimizer=None, clip=how.clip, pad=how.pad)
        self._connect(compiles=bool(how.compile))
        self.data = self._make_data(optimizer)
        held: dict[str, Any] = {
            "data": self.data,
            "tensor": self.tensor,
            "experts": self.experts,
            "shapes": shapes,
        }
        self._state = MeshState(module, self.parameters, self.buffers, from_pipeline=self._from_pipeline, **held)
        self._optimizers = MeshOptimizers(
            self.parameters,
            order=order,
            gather=lambda given, name: self._gather(given, self.mesh.group(name).handle),
            home_of=self.home_of,
            **held,
        )
        watch = PipelineWatch(self._watch, self.mesh.ranks("pp"))
        self._transport = self._make_transport(self.mesh.pipelines, home_of(example), watch)
        self._make_executors(loss, watch=watch, on_reduce=self.data.reduce, beside=self.data)
        if plan.dp > 1 or len(self.schedule.placement.pipes) > 1:
            self._statistics = SharedStatistics(module, self.buffers, self._from_copies)
        if not how.compile:
            self._draw_alike(how.seed, callers, _channels_of(module))
            if self._context is not None and self._dropouts is not None:
                self._context.drops = self._dropouts.weight_drop
        self._begin_host(self.data.lodged if plan.offload.parameters else None)
        if self._host is not None and self._host.states is not None:
            self.data.keep_states(self._host.states, self._find_scale if self._clip is None else None)

    def _shard(self, module: nn.Module, microbatch: Batch, how: Options) -> Sharding | None:
        """Keep this rank's part of every layer that comes apart."""
        if self.plan.tp == 1:
            return None
        sharding = shard(
            module,
            self.mesh,
            how.tensor,
            sequence=self.plan.sp,
            example=microbatch,
            num_chunks=how.tensor_chunks,
        )
        if any(each.is_meta for each in module.parameters()):
            sharding.materialise(module, seed=how.seed, device=home_of(microbatch))
        return sharding

    def _attach_context(self, module: nn.Module, how: Options) -> ContextParallel | None:
        """Let attention see what other ranks have of a sequence."""
        if self.plan.cp == 1:
            return None
        form = cast(Literal["ring", "all-to-all"], self.plan.context)
        context = ContextParallel(
            self.mesh.group("cp"),
            form=form,
            positions=how.positions,
            entries=how.entries,
            masks=how.masks,
        )
        context.attach(module)
        return context

    def _real_tokens(self) -> Tensor | None:
        """Of this rank's tokens of the sequences that are being computed, which are not added to make them divide."""
        return None if self._context is None else self._context.real_tokens()

    def _make_data(self, optimizer: MakeOptimizer | Sequence[Share]) -> DataParallel:
        dense = make_replicas(self.mesh.ranks("gradients"), shard_size=self.plan.zero_group)
        same = make_replicas(self.mesh.ranks("expert_gradients")) if self.plan.ep > 1 else dense
        experts = self.experts.parameters if self.experts is not None else {}

        def replicas_of(name: str) -> Replicas:
            return same if name in experts else dense

        count = self.split.num_stages
        mine = {stage: self.split.stages[stage % count] for stage in self.schedule.placement.stages[self.rank]}
        return DataParallel(
            {number: stage for number, stage in mine.items() if stage is not None},
            self.schedule,
            self.rank,
            sharing=self._sharing,
            replicas_of=replicas_of,
            optimizer=optimizer,
            ties=make_ties(self.schedule.placement, self.split, self.mesh.pipelines, self.mesh.rank),
            tensor=self.tensor,
            joining=None if self.tensor is None and not experts else MeshParts(self.tensor, self.experts),
            apart=experts,
            module=self.module,
            watch=self._watch,
        )

    def gradients(self) -> dict[str, Tensor]:
        """The gradients of the last step as the optimizer was given them, whole, by original names, on every rank."""
        return self._state.gradients()

    def state_dict(self, *, sharded: bool = False) -> dict[str, Any]:
        """Parameters and buffers under the names of the original module.

        Whole, all of them on every rank; or the parts that this rank has of those of its stages.
        """
        return self._state.part() if sharded else self._state.whole()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take weights and buffers from a state of the whole module."""
        with self._told_to_all():
            self._state.load(state)

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        return self.data.optimizers

    def optimizer_state_dict(self, *, sharded: bool = False) -> dict[str, Any]:
        """What the optimizers remember, under the names of the original module: see `states/optimizers/state.py`.

        Whole, all of it on every rank; or of the parts that this rank has of the parameters of its stages.
        """
        self.flush()
        return self._optimizers.part() if sharded else self._optimizers.whole()

    def load_optimizer_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a whole state, of whatever plan."""
        self.flush()
        with self._told_to_all():
            self._optimizers.load(state)

    def assembled(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return self._state.assembled(parts)

    def rebalance_experts(self, *, gain: float = 0.05) -> dict[str, int]:
        if self.experts is None:
            return {}
        with self._told_to_all():
            wanted = better_placements(self.experts, self.loads.since_placed(), gain)
            moved = count_moved(self.experts, wanted)
            for layer, placement in wanted.items():
                place_experts(
                    layer,
                    placement,
                    parameters=self.parameters,
                    experts=self.experts,
                    data=self.data,
                    optimizers=self._optimizers,
                )
        self.loads.begin_anew()
        return moved

    # What a trainer leaves to engines.

    def _complete(self, schedule: Schedule, stages: Split) -> Schedule:
        gathers = self.plan.zero == 3 and not self._sharing.layerwise
        return complete(
            schedule,
            stages,
            reduce_gradients=True,
            max_gathered=_MAX_GATHERED if gathers else None,
            offloads_activations=self.plan.offload.activations > 0,
        )

    def _forget_gradients(self) -> None:
        self.data.begin_step()

    def _rows(self, batch: Batch) -> Batch:
        """The rows of this replica."""
        replicas, length = self.plan.dp, length_of(batch)
        if length % replicas:
            below = length - length % replicas
            raise ShardwiseError(
                f"a batch of {length} cannot be shared out evenly over dp={replicas} replicas",
                remedy=f"a batch of {' or '.join(str(each) for each in (below, below + replicas) if each)}",
            )
        return cut_batch(batch, replicas)[self.mesh.coordinates["dp"]]

    def _place(self, batch: Batch, microbatch: Batch) -> Place:
        place, axes = super()._place(batch, microbatch), self.mesh.coordinates
        tokens: Tensor | None = None
        if isinstance(microbatch, LocalBatch):
            tokens = zigzag_shard(torch.arange(microbatch.tokens.length), 0, axes["cp"], self.plan.cp)
        first_row = axes["dp"] * (length_of(batch) // self.plan.dp)
        num_pieces = self.plan.tp if self.plan.sp else 1
        return replace(place, first_row=first_row, tokens=tokens, piece=axes["tp"] % num_pieces, num_pieces=num_pieces)

    def _cut(self, batch: Batch) -> list[Batch]:
        microbatches = super()._cut(self._rows(batch))
        return microbatches if self._context is None else [self._context.cut(each) for each in microbatches]

    def _run(self, trains: bool, microbatches: list[Batch], signature: Hashable, record: Record | None) -> Tally:
        executor = self._trainer if trains else self._evaluator
        shares = trains and self._shares_statistics
        with self._statistics.shared() if shares else nullcontext():  # type: ignore[union-attr]
            tally = self._agree(executor.run(microbatches, signature=signature, record=record))
        if self._context is not None and not self._has_attended:
            self._check_attention(self._context)
        return tally

    def _check_attention(self, context: ContextParallel) -> None:
        """A module whose attention was not found would see the tokens of one rank alone, and train without a word."""
        numbers = torch.tensor([context.num_calls], dtype=torch.float64)
        self._sum(numbers, "the number of attentions")
        if not numbers.any():
            raise ShardwiseError(
                f"no attention of {type(self.module).__name__} was found, so tokens would see those of one rank alone",
                remedy="torch.nn.functional.scaled_dot_product_attention in the module, or cp=1",
            )
        self._has_attended = True

    def _step(self, tally: Tally) -> None:
        """Sum gradients over replicas, make them those of the whole batch's mean, clip them, and step."""
        self.was_finite = math.isfinite(tally.mean)  # A batch that has none says so here.
        self.data.finish()
        scale = 1 / tally.count
        if self._clip is not None:
            square = self.data.square()
            self._sum(square, "the norm of the gradients")
            self.gradient_norm = float(square) ** 0.5 * scale
            self.was_finite = self.was_finite and math.isfinite(self.gradient_norm)
            scale *= min(1.0, self._clip / (self.gradient_norm + 1e-6))
        if self.was_finite:
            self.data.step(scale)

    def _find_scale(self) -> float | None:
        count = self._find_count()
        return None if count is None else 1 / count

    def _finish(self, step: int) -> None:
        self.data.finish(step)

    def _pipelines(self) -> Sequence[Sequence[int]]:
        return self.mesh.pipelines

    @contextmanager
    def _listening(self, recording: Recording | None, kept: KeptBytes) -> Iterator[None]:
        groups = self._groups()
        with super()._listening(recording, kept), listening_to(groups, recording):
            self._sent_before = [(each, each.traffic.copy()) for each in groups]
            yield

    def _groups(self) -> list[Group]:
        """All that this rank sends in, but for its pipeline."""
        replicas = [bucket.home.replicas for bucket in self.data.buckets]
        known = [*self.mesh.groups.values(), *(each for pair in replicas for each in (pair.shard, pair.copies))]
        return list({id(each): each for each in known if each.handle is not None}.values())

    def _traffic(self, rank: int, recording: Recording) -> Iterator[Traffic]:
        yield from super()._traffic(rank, recording)
        for group, before in self._sent_before:
            for kind, count in (group.traffic.calls - before.calls).items():
                yield Traffic(rank, None, kind, count, group.traffic.bytes[kind] - before.bytes[kind])

    def _state_bytes(self) -> dict[str, int]:
        held = self.data.held()
        on_device = held.optimizer - self._hosted_state_bytes()
        return {PARAMETERS: held.parameters, GRADIENTS: held.gradients, OPTIMIZER: on_device}

    def _number_bytes(self) -> Mapping[Optimizer, Callable[[], float]]:
        return self.data.number_bytes

    def _from_pipeline(self, part: dict[str, Any]) -> list[dict[str, Any]]:
        """The parts of all ranks of this pipeline, on the CPU."""
        if self.plan.pp == 1:
            return []
        told = {name: each.cpu() if isinstance(each, Tensor) else each for name, each in part.items()}
        return self._gather(told, self.mesh.group("pp").handle)

    def _from_copies(self, given: Any) -> list[Any]:
        """What is given by the ranks that have other rows of the same layers, in the order of the rows."""
        axes = self.mesh.coordinates
        told = self._gather(((axes["dp"], axes["pp"], axes["cp"]), axes["tp"], given))
        return [each for _, tp, each in sorted(told, key=lambda part: part[0]) if tp == axes["tp"]]

    def _disconnect(self) -> None:
        if self._context is not None:
            self._context.detach()
        self.data.close()


def _channels_of(module: nn.Module) -> Callable[[], Channels | None]:
    """What says which channels this rank is at, inside of layers that are cut."""
    trackers = [
        each.rng for each in module.modules() if isinstance(each, ColumnParallelLinear) and each.rng is not None
    ]
    return lambda: next((each.channels for each in trackers if each.is_inside), None)


def _splits_backward(schedule: Schedule) -> bool:
    return any(part.kind is Kind.W for order in schedule.orders for each in order for part in each.parts)
