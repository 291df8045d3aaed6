"""Data parallelism and ZeRO, driven by the instructions of a schedule.

    zero    weights          gradients                            optimizer
    0       whole            whole, summed to all                 whole
    1       whole            whole, each rank sums its shard      shard
    2       whole            summed to shards in each backward    shard
    3       shard            summed to shards in each backward    shard

A rank of a pipeline has one `DataParallel` in addition to its executor. GATHER and RELEASE gather and free weights;
REDUCE means that a stage's gradients of a step are complete; `begin` and `end` are called around every computation.
These only start transfers, which overlap with the next instructions. Its parts, each of which knows only the buckets:

    StageWeights           when weights are gathered, and what waits for them
    Reducer                when the sum of a bucket's gradients starts
    StepGradients          completes the gradients of a step, and their norm
    OffloadedBackward      buckets that live on the host: their transfers in a backward
    OptimizerInBackward    updates before the step ends, with optimizer state on the host
    Updates                the optimizer step
    WholeParameters        state by the names of parameters
"""

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from shardwise.ranks.exchange import Exchange
from shardwise.schedule.instruction import Instruction
from shardwise.states.buckets.bucket import Bucket
from shardwise.states.buckets.in_backward import OffloadedBackward, OptimizerInBackward, hands_over, refuse_gone
from shardwise.states.buckets.make import HeldStages, ParameterOwners, ZeroConfig, make_buckets
from shardwise.states.buckets.reducer import MAKES_GRADIENTS, Reducer
from shardwise.states.buckets.step_gradients import StepGradients
from shardwise.states.make_optimizers import MadeOptimizer
from shardwise.states.optimizers.updates import Held, Updates
from shardwise.states.stage_weights import StageWeights, find_users, make_unit_prefetch
from shardwise.states.tiers.host_states import HostStates
from shardwise.states.whole_parameters import WholeParameters


class DataParallel:
    """Data parallelism of one process: its buckets, the groups that hold the same parameters, and their sharding.

    `updates` has its optimizers, `wholes` its parameters by their names.
    """

    def __init__(
        self,
        held: HeldStages,
        owners: ParameterOwners,
        *,
        sharing: ZeroConfig,
        optimizers: Sequence[MadeOptimizer],
        exchange: Exchange,
    ) -> None:
        self.sharing, self.exchange = sharing, exchange
        units = make_unit_prefetch(held, sharing)
        users = find_users(units.values(), held.module)
        self.buckets = make_buckets(held, owners, sharing, users, exchange)
        self._trained = [bucket for bucket in self.buckets if bucket.gradients is not None]
        by_stage = sharing.zero == 3 and not sharing.layerwise
        self._weights = StageWeights(held.stages, {} if by_stage else units, self.buckets, users)
        self._backward = OffloadedBackward(self._trained)
        self._reducer = Reducer(
            [each for each in self._trained if each.local is None], held.schedule, held.ranks,
            scatters=sharing.scatters, listens=held.parameter_of is None, on_start=self._started,
            on_pass=torch.no_grad()(self._backward.passed), is_final=self._is_final,
        )  # fmt: skip
        self._gradients = StepGradients(self._trained, owners, exchange)
        self._in_backward: OptimizerInBackward | None = None
        comes_late = sharing.updates_late or sharing.offloaded > 0
        self.updates = Updates(optimizers, self._trained, owners, are_cut=sharing.zero > 0, sort=comes_late)
        self.wholes = WholeParameters(self.buckets, held.parameters, exchange)
        #: Whether `begin` and `end` must be called: weights are gathered for computations, or gradients leave.
        self.is_beside = not sharing.local

    # --- what the executor calls -------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Drop the gradients of the last step. With two versions of the weights, another step is in progress."""
        for bucket in self.buckets:
            if bucket.is_touched:
                bucket.take_over()
        for bucket in self._trained:
            bucket.trained.begin()
        self._reducer.begin_step()
        self._backward.begin_step()
        if self._in_backward is not None:
            self._in_backward.begin_step()

    def gather(self, instruction: Instruction) -> None:
        """GATHER: start to gather a stage's weights."""
        self._weights.gather(instruction.stage)

    def release(self, instruction: Instruction) -> None:
        """RELEASE: free a stage's gathered weights."""
        self._weights.release(instruction.stage)

    def reduce(self, instruction: Instruction) -> None:
        """REDUCE: a stage's gradients of a step are complete, or a rank's part of a tie's."""
        if instruction.peer is None:
            self._reducer.reduce(instruction)
        else:
            self._gradients.ties.start(instruction.peer, instruction.microbatch)

    def begin(self, instruction: Instruction) -> None:
        """Prepare for a computation on a stage."""
        self._weights.begin(instruction)
        if instruction.kind in MAKES_GRADIENTS:
            self._backward.begin(instruction.stage)
        self._reducer.begin(instruction)
        if self._in_backward is not None:
            self._in_backward.look()

    def end(self, instruction: Instruction) -> None:
        """Finish a computation on a stage."""
        self._reducer.end(instruction)
        self._weights.end(instruction.stage)

    # --- what the engine calls ---------------------------------------------------------------------------------------

    def finish(self, step: int = 0) -> None:
        """Wait until this rank's gradients of a step are summed over all replicas, and over tied stages."""
        self._gradients.finish(step, self._updated_in_backward)
        self._reducer.end_step()

    def square(self) -> Tensor:
        """Return this rank's part of the squared gradient norm, on its device: summed over the world, the model's."""
        return self._gradients.norm.square()

    @torch.no_grad()
    def step(self, scale: float = 1.0) -> None:
        """Scale the gradients (by one over the tokens of the whole batch, and by clipping) and update."""
        self.exchange.settle()
        self._gradients.scale(scale, self._updated_in_backward)
        self.updates.step(self._gradients.used, done=self._updated_in_backward)

    @torch.no_grad()
    def step_divided(self, divisor: Tensor, skips: Tensor) -> None:
        """Update with the gradients divided by a device scalar, or not at all if `skips` is 1; the host reads neither.
        For gradients that stay where autograd put them, and optimizers that support it."""
        self.exchange.settle()
        self.updates.step(self._gradients.used, divided=(divisor, skips))

    def keep_states(self, states: HostStates, find_scale: Callable[[], float | None] | None) -> None:
        """Move the state of these optimizers to the host.

        With `find_scale`, which returns the scale of the gradients during a step, weights are updated as soon as their
        gradients are final. Without it, the norm of all gradients is needed first.
        """
        self.updates.states = states
        states.followers = [bucket.weights for bucket in self._trained if bucket.is_renewed_late]
        if find_scale is None:
            self._gradients.norm.measure_on_the_way()
        else:
            self._in_backward = OptimizerInBackward(states, find_scale)
            for bucket in self._trained:
                bucket.hands_over = hands_over(bucket)

    def look_at_gradients(self, look: Callable[[Tensor], None] | None) -> None:
        """From the next step on, call it with this rank's own gradients before they are summed over ranks."""
        for bucket in self._trained:
            bucket.trained.look = look

    def whole_gradient(self, name: str) -> Tensor | None:
        """Return the gradient of a parameter in the last step, as given to the optimizer. Replicas call this alike."""
        if self._in_backward is not None and not self._in_backward.keeps_gradients:
            refuse_gone(self._in_backward.done, name)
        return self.wholes.gradient(name, self._gradients.used)

    def held(self) -> Held:
        """Return the bytes that this rank holds now."""
        return self.updates.held(self.buckets)

    def keep_gradients(self) -> None:
        """Keep the gradients of every step until the next one begins, also of weights that are updated in the
        backward."""
        if self._in_backward is not None:
            self._in_backward.keeps_gradients = True

    def is_always_here(self, name: str) -> bool:
        """Whether a parameter is by itself, and its own tensor always has its newest numbers."""
        return self.sharing.local and not self.wholes.is_offloaded(name)

    @torch.no_grad()
    def load(self, values: Mapping[str, Tensor]) -> None:
        """Load whole parameters, by name."""
        self.exchange.settle()
        if self.updates.states is not None:
            self.updates.states.take_home()
        self.wholes.load(values)
        self.updates.refresh()
        for bucket in self.buckets:
            if bucket.gradients is None:
                bucket.weights.expire()

    def take_over(self) -> None:
        """Gather all weights that every rank has whole, with the script's writes to the module's parameters."""
        for bucket in self.buckets:
            bucket.take_over()

    def close(self) -> None:
        """Release the parameters' hooks, the groups and the thread.

        Weights that other ranks updated are in transit since the last step: wait for them, so that the module has them.
        """
        for bucket in self.buckets:
            bucket.weights.arrive()
        self._reducer.close()
        self._gradients.close()
        self.exchange.close()

    # -----------------------------------------------------------------------------------------------------------------

    @property
    def _updated_in_backward(self) -> Collection[Bucket]:
        return () if self._in_backward is None else self._in_backward.done

    @torch.no_grad()
    def _started(self, bucket: Bucket, is_last: bool) -> None:
        """Handle a bucket whose sum of gradients has started, after its unit's backward."""
        if bucket.key.unit is not None:
            bucket.weights.let_go(bucket.key.unit)
        if is_last and self._in_backward is not None:
            self._in_backward.begun(bucket)
        self._backward.started(bucket)

    def _is_final(self, bucket: Bucket) -> bool:
        """Whether gradients whose sum has begun are gone from here: a later one would be lost, or added to too much."""
        has_gone = bucket.key.replicas.count > 1 or bucket.is_offloaded
        return has_gone or bucket in self._updated_in_backward
