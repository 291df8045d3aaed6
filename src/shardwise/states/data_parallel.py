"""Data parallelism and ZeRO, as the instructions of a schedule see it.

    zero    weights          gradients                            optimizer
    0       whole            whole, summed to all                 whole
    1       whole            whole, each rank sums its shard      shard
    2       whole            summed to shards in each backward    shard
    3       shard            summed to shards in each backward    shard

A rank of a pipeline has one of these beside its executor. GATHER and RELEASE bring weights in and let them go, REDUCE
says that a stage's gradients of a step are complete; `begin` and `end` stand around every computation. Whatever moves
is only started there, and runs beside the instructions that follow. Its parts, each of which knows the buckets only:

    StageWeights           when weights come, and who waits for them
    Reducer                when the gradients of a bucket begin to be summed
    OffloadedBackward      buckets that live on the host: what comes and goes in a backward
    OptimizerInBackward    what is updated before the step ends, with optimizer state on the host
    Updates                the step
    WholeParameters        state by the names of parameters
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.ranks.exchange import Exchange
from shardwise.ranks.faults import Watch
from shardwise.ranks.host_exchange import make_exchange
from shardwise.ranks.replicas import Replicas
from shardwise.schedule.instruction import Instruction, Kind
from shardwise.schedule.schedule import Schedule
from shardwise.stages.stage import Stage
from shardwise.states.buckets.bucket import Bucket
from shardwise.states.buckets.gradient_norm import GradientNorm
from shardwise.states.buckets.local_gradients import scale_all
from shardwise.states.buckets.make import CHANNELS_OF_A_BUCKET, ParameterOwners, ZeroConfig, make_buckets
from shardwise.states.buckets.offloaded_backward import OffloadedBackward
from shardwise.states.buckets.offloaded_buckets import OffloadedBuckets
from shardwise.states.buckets.optimizer_in_backward import OptimizerInBackward, hands_over, refuse_gone
from shardwise.states.buckets.reducer import Reducer
from shardwise.states.buckets.state_bytes import Held, measure
from shardwise.states.buckets.tensor_interface import Joining, TensorInterface, counted_places, sum_partial
from shardwise.states.buckets.tie_groups import Tie
from shardwise.states.buckets.tie_sums import TieSums
from shardwise.states.buckets.unused_parameters import UnusedParameters
from shardwise.states.optimizers.updates import Updated, Updates
from shardwise.states.parameter_group import MakeOptimizer, Share, shares_of
from shardwise.states.stage_weights import StageWeights, make_unit_prefetch
from shardwise.states.tiers.host_states import HostStates
from shardwise.states.unit_prefetch import find_users
from shardwise.states.whole_parameters import WholeParameters

_MAKES_GRADIENTS = (Kind.B, Kind.W)


class DataParallel:
    """The replicas' side of one process.

    `stages` are its own, by their numbers in the schedule; `ranks` are the ranks of the pipeline that this process
    runs: one, or all of them. `replicas_of` says for a parameter which ranks hold it too. `module` is needed where
    weights are gathered unit by unit. `joining` makes whole parameters where ranks of tp or ep have parts, and `apart`
    are those that ranks of ep have.
    `parameter_of(name, step)` says where a step's gradients are, where there are several versions of the weights.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        schedule: Schedule,
        ranks: Sequence[int],
        *,
        sharing: ZeroConfig,
        replicas_of: Callable[[str], Replicas],
        optimizer: MakeOptimizer | Sequence[Share],
        ties: Sequence[Tie] = (),
        tensor: TensorInterface | None = None,
        joining: Joining | None = None,
        apart: Collection[str] = (),
        module: nn.Module | None = None,
        parameter_of: Callable[[str, int], nn.Parameter] | None = None,
        exchange: Exchange | None = None,
        watch: Watch | None = None,
    ) -> None:
        self.sharing, self._tensor = sharing, tensor
        parameters = {number: stage.parameters for number, stage in stages.items()}
        self.exchange = exchange or make_exchange(_device_of(parameters), watch)
        units = make_unit_prefetch(stages, sharing, module)
        users = {} if module is None else find_users(units.values(), module)
        owners = ParameterOwners(
            replicas_of=replicas_of, ties=ties, partial=tensor.partial if tensor else frozenset(), users=users
        )
        self.buckets = make_buckets(parameters, sharing, owners, self.exchange, parameter_of)
        self._trained = [bucket for bucket in self.buckets if bucket.gradients is not None]
        by_stage = sharing.zero == 3 and not sharing.layerwise
        self._weights = StageWeights(stages, {} if by_stage else units, self.buckets, users)
        named = {name: each for held in parameters.values() for name, each in held.items()}
        self._wholes = WholeParameters(self.buckets, named, self.exchange)
        self._ties = TieSums(ties, self._trained, self.exchange)
        self._backward = OffloadedBackward(self._trained)
        self._reducer = Reducer(
            [each for each in self._trained if each.local is None], schedule, ranks, scatters=sharing.scatters,
            listens=parameter_of is None, on_start=self._started, on_pass=torch.no_grad()(self._backward.passed),
            is_final=self._is_final,
        )  # fmt: skip
        #: Whether computations have to be told of: where weights come for them, or gradients leave.
        self.is_beside = not sharing.local
        whole = joining or tensor
        self._updates = Updates(
            shares_of(optimizer), self._trained, are_cut=sharing.zero > 0 or tensor is not None,
            cost_of=lambda name: _num_numbers(self._wholes.shape_of(name) if whole is None else whole.of(name).shape),
            joining=whole, apart=apart,
        )  # fmt: skip
        #: What lives on the host.
        self.offloaded = OffloadedBuckets(self.buckets, self._updates.offloaded)
        self._norm = GradientNorm(
            self._trained,
            is_counted=self._ties.is_counted,
            counted=lambda name, shape: counted_places(tensor, name, shape),
        )
        self._unused = UnusedParameters(self._trained, ties, self.exchange)
        self._used: Mapping[Bucket, list[bool]] = {}
        self._in_backward: OptimizerInBackward | None = None

    # --- what the executor calls -------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Forget the gradients of the last step."""
        for bucket in self._trained:
            bucket.trained.begin()
        self._reducer.begin_step()
        self._backward.begin_step()
        if self._in_backward is not None:
            self._in_backward.begin_step()

    def gather(self, instruction: Instruction) -> None:
        """GATHER: a stage's weights begin to come in."""
        self._weights.gather(instruction.stage)

    def release(self, instruction: Instruction) -> None:
        """RELEASE: and go again."""
        self._weights.release(instruction.stage)

    def reduce(self, instruction: Instruction) -> None:
        """REDUCE: a stage's gradients of a step are complete, or a rank's part of a tie's."""
        if instruction.peer is None:
            self._reducer.reduce(instruction)
        else:
            self._ties.start(instruction.peer, instruction.microbatch)

    def begin(self, instruction: Instruction) -> None:
        """Something is about to be computed on a stage."""
        self._weights.begin(instruction)
        if instruction.kind in _MAKES_GRADIENTS:
            self._backward.begin(instruction.stage)
        self._reducer.begin(instruction)
        if self._in_backward is not None:
            self._in_backward.look()

    def end(self, instruction: Instruction) -> None:
        """It has been computed."""
        self._reducer.end(instruction)
        self._weights.end(instruction.stage)

    # --- what the engine calls ---------------------------------------------------------------------------------------

    @torch.no_grad()
    def finish(self, step: int = 0) -> None:
        """Wait until this rank's gradients of a step are the sums over all replicas, and over tied stages."""
        self._ties.finish_local(step)
        self._unused.start()
        for bucket in self._trained:
            if bucket not in self._updated_in_backward and bucket.local is None:
                bucket.trained.finish(step)
        self._ties.sum_shards()
        partial = [bucket for bucket in self._trained if bucket.home.is_partial]
        if self._tensor is not None and partial:
            numbers = {bucket: number for number, bucket in enumerate(self.buckets)}
            sum_partial(self._tensor, partial, self.exchange, lambda bucket: numbers[bucket] * CHANNELS_OF_A_BUCKET + 3)
        self._used = self._unused.read()

    def square(self) -> Tensor:
        """This rank's part of the sum of all squares of the gradients: summed over the world it is the model's."""
        return self._norm.square()

    @torch.no_grad()
    def step(self, scale: float = 1.0) -> None:
        """Multiply the gradients (one over the tokens of the whole batch, and what clipping asks for) and update."""
        self.exchange.settle()
        scale_all([bucket.local for bucket in self._trained if bucket.local is not None], scale)
        for bucket in self._trained:
            if bucket not in self._updated_in_backward and bucket.local is None:
                bucket.scale(scale)
        self._updates.step(self._used, done=self._updated_in_backward)

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """Those of this rank, one for each share that has something here."""
        return self._updates.optimizers

    @property
    def number_bytes(self) -> Mapping[Optimizer, Callable[[], float]]:
        """The optimizers of this rank, and what tells the bytes that each keeps for a number."""
        return self._updates.number_bytes

    def keep_states(self, states: HostStates, find_scale: Callable[[], float | None] | None) -> None:
        """Have the state of these optimizers on the host.

        With `find_scale`, which says while a step goes on what its gradients will be multiplied with, weights are
        updated as soon as theirs are final. Without it their norm is wanted first.
        """
        self._updates.states = states
        states.followers = [bucket.weights for bucket in self._trained if bucket.is_renewed_late]
        if find_scale is None:
            self._norm.measure_on_the_way()
        else:
            self._in_backward = OptimizerInBackward(states, find_scale)
            for bucket in self._trained:
                bucket.hands_over = hands_over(bucket)

    def held(self) -> Held:
        """What this rank holds now."""
        return measure(self.buckets, self._updates.optimizers, self._updates.owned)

    # --- state by names, which replicas ask for alike ----------------------------------------------------------------

    def whole(self, name: str) -> Tensor:
        """A parameter of a stage of this rank, from the shards of all replicas."""
        return self._wholes.weight(name)

    def keep_gradients(self) -> None:
        """Have those of every step until the next one begins, also of weights that are updated in the backward."""
        if self._in_backward is not None:
            self._in_backward.keeps_gradients = True

    def whole_gradient(self, name: str) -> Tensor | None:
        """The gradient of a parameter in the last step, as it was given to the optimizer."""
        if self._in_backward is not None and not self._in_backward.keeps_gradients:
            refuse_gone(self._in_backward.done, name)
        return self._wholes.gradient(name, self._used)

    def whole_kept(self, name: str) -> Tensor:
        """A parameter as optimizers have it, in their precision."""
        return self._wholes.kept(name)

    def pieces(self) -> Iterator[tuple[str, torch.Size, int, Tensor]]:
        """What this rank updates: name, shape of the whole, where the piece begins in it, and its numbers."""
        return self._wholes.pieces()

    @property
    def updated(self) -> Sequence[Updated]:
        """What the optimizers of this rank have: pieces of parameters, or whole ones of which it is the owner."""
        return self._updates.updated

    def is_offloaded(self, name: str) -> bool:
        """Whether a parameter lives on the host."""
        return self._wholes.is_offloaded(name)

    def is_always_here(self, name: str) -> bool:
        """Whether a parameter is by itself, and its own tensor always has its newest numbers."""
        return self.sharing.local and not self._wholes.is_offloaded(name)

    def shape_of(self, name: str) -> torch.Size:
        """The shape of a parameter as tensor and expert parallel ranks have it, from all of its replicas' pieces."""
        return self._wholes.shape_of(name)

    @torch.no_grad()
    def load(self, values: Mapping[str, Tensor]) -> None:
        """Take over whole parameters, by name."""
        self.exchange.settle()
        if self._updates.states is not None:
            self._updates.states.take_home()
        self._wholes.load(values)
        self._updates.refresh()
        for bucket in self.buckets:
            if bucket.gradients is None:
                bucket.weights.expire()

    def close(self) -> None:
        """Let go of the parameters' hooks, of groups and of the thread."""
        self._reducer.close()
        self._unused.close()
        self.exchange.close()

    # ---------------------------------------------------------------------------------------------------------------

    @property
    def _updated_in_backward(self) -> Collection[Bucket]:
        return () if self._in_backward is None else self._in_backward.done

    @torch.no_grad()
    def _started(self, bucket: Bucket, is_last: bool) -> None:
        """The gradients of a bucket are on their way: its unit's backward is done."""
        if bucket.home.unit is not None:
            bucket.weights.let_go(bucket.home.unit)
        if is_last and self._in_backward is not None:
            self._in_backward.begun(bucket)
        self._backward.started(bucket)

    def _is_final(self, bucket: Bucket) -> bool:
        """Whether gradients whose sum has begun are gone from here: a later one would be lost, or added to too much."""
        has_gone = bucket.home.replicas.count > 1 or bucket.is_offloaded
        return has_gone or bucket in self._updated_in_backward


def _device_of(parameters: Mapping[int, Mapping[str, nn.Parameter]]) -> torch.device:
    """Where a rank's parameters are; without any, its part in sums is of no numbers."""
    every = (each.device for held in parameters.values() for each in held.values())
    return next((each for each in every if each.type != "cpu"), torch.device("cpu"))


def _num_numbers(shape: Sequence[int]) -> int:
    return int(torch.Size(shape).numel())
