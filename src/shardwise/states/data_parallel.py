"""Data parallelism and ZeRO, as the instructions of a schedule see it.

    zero    weights          gradients                            optimizer
    0       whole            whole, summed to all                 whole
    1       whole            whole, each rank sums its shard      shard
    2       whole            summed to shards in each backward    shard
    3       shard            summed to shards in each backward    shard

A rank of a pipeline has one of these beside its executor. GATHER and RELEASE bring weights in and let them go, REDUCE
says that a stage's gradients of a step are complete; `begin` and `end` stand around every computation. Whatever moves
is only started there, and runs beside the instructions that follow.
"""

import itertools
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.ranks.exchange import Exchange, Ticket
from shardwise.ranks.faults import Watch
from shardwise.ranks.host_exchange import make_exchange
from shardwise.ranks.replicas import Replicas
from shardwise.schedule.instruction import Instruction, Kind
from shardwise.schedule.schedule import Schedule
from shardwise.stages.stage import Stage, Wrappable
from shardwise.states.buckets.bucket import Bucket
from shardwise.states.buckets.early_buckets import EarlyBuckets
from shardwise.states.buckets.gradient_norm import Norm
from shardwise.states.buckets.local_gradients import scale_all
from shardwise.states.buckets.make import CHANNELS_OF_A_BUCKET, Sharing, Surroundings, make_buckets
from shardwise.states.buckets.offloaded_buckets import LodgedBuckets
from shardwise.states.buckets.offloaded_weights import LodgedWhole
from shardwise.states.buckets.reducer import Launches
from shardwise.states.buckets.state_bytes import Held, measure
from shardwise.states.buckets.tensor_interface import Joining, Tensorwise, counted_places, sum_partial
from shardwise.states.buckets.tie_groups import Tie
from shardwise.states.buckets.unused_parameters import Usage
from shardwise.states.buckets.weights import Weights
from shardwise.states.optimizers.updates import Updated, Updates
from shardwise.states.parameter_group import MakeOptimizer, Share, shares_of
from shardwise.states.tiers.host_states import HostStates
from shardwise.states.unit_prefetch import Layers, find_users

# Channels of ties: these are numbered alike on ranks whose buckets are not.
_TIES, _BUCKETS_OF_A_TIE = 20_000, 64
_HALVES_OF_BACKWARD = (Kind.I, Kind.W)
_MAKES_GRADIENTS = (Kind.B, Kind.W)
#: Of buckets that live on the host, how many sums may be under way before the oldest goes there.
_SUMS_ON_THE_DEVICE = 1


class DataParallel:
    """The replicas' side of one rank of a pipeline.

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
        sharing: Sharing,
        replicas_of: Callable[[str], Replicas],
        optimizer: MakeOptimizer | Sequence[Share],
        ties: Sequence[Tie] = (),
        tensor: Tensorwise | None = None,
        joining: Joining | None = None,
        apart: Collection[str] = (),
        module: nn.Module | None = None,
        parameter_of: Callable[[str, int], nn.Parameter] | None = None,
        exchange: Exchange | None = None,
        watch: Watch | None = None,
    ) -> None:
        self.sharing, self._ties, self._tensor, self._joining = sharing, ties, tensor, joining or tensor
        layers = _make_layers(stages, sharing, module)
        #: Of stages whose weights come unit by unit, or are waited for so.
        self._layers = {} if sharing.zero == 3 and not sharing.layerwise else layers
        users = {} if module is None else find_users(layers.values(), module)
        parameters = {number: stage.parameters for number, stage in stages.items()}
        self._parameters = {name: each for held in parameters.values() for name, each in held.items()}
        self.exchange = exchange or make_exchange(_device_of(parameters), watch)
        surroundings = Surroundings(
            replicas_of=replicas_of, ties=ties, partial=tensor.partial if tensor else frozenset(), users=users
        )
        self.buckets = make_buckets(parameters, sharing, surroundings, self.exchange, parameter_of)
        self._trained = [bucket for bucket in self.buckets if bucket.gradients is not None]
        self._of_stage = {
            number: [bucket for bucket in self.buckets if number in bucket.home.stages] for number in stages
        }
        self._places = {slot.name: (bucket, slot) for bucket in self.buckets for slot in bucket.layout.slots}
        #: What is not waited for by a unit is waited for by its stage.
        self._loose = {
            number: [each for each in mine if number not in self._layers or not _units_of(each, users)]
            for number, mine in self._of_stage.items()
        }
        for number, mine in self._layers.items():
            mine.attach(_by_unit(mine, self._of_stage[number], users))
        #: What lives on the host, and whose sums have been begun.
        self.lodged = LodgedBuckets(self.buckets)
        self._summed: deque[Bucket] = deque()
        #: Of these, the first of each stage in a backward, and what comes after each.
        turns = [each for each in self._trained if each.is_lodged]
        self._first = {stage: each for each in reversed(turns) for stage in each.home.stages}
        self._next = {one: after for one, after in itertools.pairwise(turns) if one.home.stages == after.home.stages}
        self._launches = Launches(
            [each for each in self._trained if each.local is None], schedule, ranks, scatters=sharing.scatters,
            listens=parameter_of is None, on_start=self._started, on_pass=self._passed,
        )  # fmt: skip
        #: Whether computations have to be told of: where weights come for them, or gradients leave.
        self.is_beside = not sharing.local
        self._updates = Updates(
            shares_of(optimizer),
            self._trained,
            are_cut=sharing.zero > 0 or tensor is not None,
            cost_of=self._cost_of,
            joining=self._joining,
            apart=apart,
        )
        self.lodged.owners = self._updates.lodged
        self._norm = Norm(
            self._trained, is_counted=self._is_counted, counted=lambda name, shape: counted_places(tensor, name, shape)
        )
        self._usage = Usage(self._trained, ties, self.exchange)
        self._used: Mapping[Bucket, list[bool]] = {}
        self._early: EarlyBuckets | None = None

    # --- what the executor calls -------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Forget the gradients of the last step."""
        for bucket in self._trained:
            bucket.trained.begin()
        self._launches.begin_step()
        self._summed.clear()
        if self._early is not None:
            self._early.begin_step()

    def gather(self, instruction: Instruction) -> None:
        """GATHER: a stage's weights begin to come in."""
        for bucket in self._of_stage[instruction.stage]:
            bucket.weights.claim(instruction.stage)

    def release(self, instruction: Instruction) -> None:
        """RELEASE: and go again."""
        for bucket in self._of_stage[instruction.stage]:
            bucket.weights.let_go(instruction.stage)

    def reduce(self, instruction: Instruction) -> None:
        """REDUCE: a stage's gradients of a step are complete.

        Ties are summed at the end, shard by shard; with one replica alone, now.
        """
        if instruction.peer is None:
            self._launches.reduce(instruction)
        elif instruction.peer < len(self._ties):
            self._start_tie(instruction.peer, instruction.microbatch)

    def begin(self, instruction: Instruction) -> None:
        """Something is about to be computed on a stage."""
        for bucket in self._loose[instruction.stage]:
            bucket.weights.wait()
        if self.lodged.buckets and instruction.kind in _HALVES_OF_BACKWARD and instruction.stage in self._layers:
            # A half of a backward goes through units in an order of its own.
            self._layers[instruction.stage].enter_all()
        if instruction.kind in _MAKES_GRADIENTS:
            self._fetch(self._first.get(instruction.stage))
        self._launches.begin(instruction)
        if self._early is not None:
            self._early.look()

    def end(self, instruction: Instruction) -> None:
        """It has been computed."""
        self._launches.end(instruction)
        if instruction.stage in self._layers:
            self._layers[instruction.stage].leave_all()
            for bucket in self._loose[instruction.stage]:
                bucket.weights.let_go(instruction.stage)

    # --- what the engine calls ---------------------------------------------------------------------------------------

    @torch.no_grad()
    def finish(self, step: int = 0) -> None:
        """Wait until this rank's gradients of a step are the sums over all replicas, and over tied stages."""
        self._finish_local(step)
        self._usage.start()
        for bucket in self._trained:
            if bucket not in self._updated_early and bucket.local is None:
                bucket.trained.finish(step)
        self._sum_ties()
        partial = [bucket for bucket in self._trained if bucket.home.is_partial]
        if self._tensor is not None and partial:
            numbers = {bucket: number for number, bucket in enumerate(self.buckets)}
            sum_partial(self._tensor, partial, self.exchange, lambda bucket: numbers[bucket] * CHANNELS_OF_A_BUCKET + 3)
        self._used = self._usage.read()

    def square(self) -> Tensor:
        """This rank's part of the sum of all squares of the gradients: summed over the world it is the model's."""
        return self._norm.square()

    @torch.no_grad()
    def step(self, scale: float = 1.0) -> None:
        """Multiply the gradients (one over the tokens of the whole batch, and what clipping asks for) and update."""
        self.exchange.settle()
        scale_all([bucket.local for bucket in self._trained if bucket.local is not None], scale)
        for bucket in self._trained:
            if bucket not in self._updated_early and bucket.local is None:
                bucket.scale(scale)
        self._updates.step(self._used, done=self._updated_early)

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
        self._early = None if find_scale is None else EarlyBuckets(states, find_scale)
        if find_scale is None:
            self._norm.measure_on_the_way()

    def held(self) -> Held:
        """What this rank holds now."""
        return measure(self.buckets, self._updates.optimizers, self._updates.owned)

    @torch.no_grad()
    def whole(self, name: str) -> Tensor:
        """A parameter of a stage of this rank, from the shards of all replicas. They call this alike."""
        if name not in self._places:
            return self._parameters[name].detach().clone()
        bucket, slot = self._places[name]
        bucket.weights.hold("whole")
        numbers = bucket.weights.whole[slot.start : slot.stop].view(slot.shape).clone()
        bucket.weights.let_go("whole")
        return numbers

    @torch.no_grad()
    def whole_gradient(self, name: str) -> Tensor | None:
        """The gradient of a parameter in the last step, as it was given to the optimizer. Replicas call this alike."""
        bucket, slot = self._places[name]
        number = bucket.layout.slots.index(slot)
        if bucket.gradients is None or not self._used or not self._used[bucket][number]:
            return None
        if bucket.local is not None:
            found = bucket.local.find(number)
            return None if found is None else found.clone()
        return self._gathered(bucket, bucket.given)[slot.start : slot.stop].view(slot.shape).clone()

    @torch.no_grad()
    def whole_kept(self, name: str) -> Tensor:
        """A parameter as optimizers have it, in their precision. Replicas call this alike."""
        if name not in self._places:
            return self._parameters[name].detach().clone()
        bucket, slot = self._places[name]
        self.exchange.settle()
        return self._gathered(bucket, bucket.kept)[slot.start : slot.stop].view(slot.shape).clone()

    def _gathered(self, bucket: Bucket, own: Tensor) -> Tensor:
        """All numbers of a bucket, from those of which each replica updates some."""
        own = own.to(bucket.home.device)
        if bucket.updates_whole:
            return own
        whole = own.new_empty(bucket.layout.length)
        channel = self.buckets.index(bucket) * CHANNELS_OF_A_BUCKET + 3
        self.exchange.gather(whole, own.clone(), bucket.sharing, channel).wait()
        return whole

    def pieces(self) -> Iterator[tuple[str, torch.Size, int, Tensor]]:
        """What this rank updates: name, shape of the whole, where the piece begins in it, and its numbers."""
        for bucket in self.buckets:
            for span in bucket.updated(bucket.sharing.rank):
                yield span.slot.name, span.slot.shape, span.start, bucket.kept[span.at : span.at + span.length]

    @property
    def updated(self) -> Sequence[Updated]:
        """What the optimizers of this rank have: pieces of parameters, or whole ones of which it is the owner."""
        return self._updates.updated

    def is_lodged(self, name: str) -> bool:
        """Whether a parameter lives on the host."""
        return name in self._places and self._places[name][0].is_lodged

    def is_always_here(self, name: str) -> bool:
        """Whether a parameter is by itself, and its own tensor always has its newest numbers."""
        bucket, _ = self._places[name]
        return self.sharing.local and not bucket.is_lodged

    def shape_of(self, name: str) -> torch.Size:
        """The shape of a parameter as tensor and expert parallel ranks have it, from all of its replicas' pieces."""
        return self._places[name][1].shape

    @torch.no_grad()
    def load(self, values: Mapping[str, Tensor]) -> None:
        """Take over whole parameters, by name. Replicas call this alike."""
        self.exchange.settle()
        if self._updates.states is not None:
            self._updates.states.take_home()
        for name, whole in values.items():
            bucket, slot = self._places[name]
            bucket.load(slot, whole)
        self._updates.refresh()
        for bucket in self.buckets:
            if bucket.gradients is None:
                bucket.weights.expire()

    def close(self) -> None:
        """Let go of the parameters' hooks and of the thread."""
        self._launches.close()
        self.exchange.close()

    # ---------------------------------------------------------------------------------------------------------------

    @property
    def _updated_early(self) -> Collection[Bucket]:
        return () if self._early is None else self._early.done

    @torch.no_grad()
    def _started(self, bucket: Bucket, is_last: bool) -> None:
        """The gradients of a bucket are on their way: its unit's backward is done."""
        if bucket.home.unit is not None:
            bucket.weights.let_go(bucket.home.unit)
        if bucket.is_lodged:
            self._leave(bucket)
            self._fetch(self._next.get(bucket))
            self._summed.append(bucket)
            while len(self._summed) > _SUMS_ON_THE_DEVICE:
                self._summed.popleft().trained.settle()
        if is_last and self._early is not None:
            self._early.begun(bucket)

    @torch.no_grad()
    def _passed(self, bucket: Bucket) -> None:
        """A backward has added to a bucket that is not summed yet."""
        bucket.trained.has_passed()
        self._leave(bucket)
        self._fetch(self._next.get(bucket))

    def _fetch(self, bucket: Bucket | None) -> None:
        """Have come what the gradients of a bucket are added to, whose turn is next in a backward."""
        if bucket is not None:
            bucket.trained.fetch()

    def _leave(self, bucket: Bucket) -> None:
        """A unit's backward is done with what lives on the host, unless it is there for a whole stage."""
        if isinstance(bucket.weights, LodgedWhole):
            bucket.weights.leave()

    def _cost_of(self, name: str) -> int:
        if self._joining is not None:
            return int(torch.Size(self._joining.of(name).shape).numel())
        return self._places[name][1].shape.numel()

    def _is_counted(self, bucket: Bucket) -> bool:
        return bucket.home.tie is None or self._ties[bucket.home.tie].is_counted_here

    def _start_tie(self, number: int, step: int) -> None:
        """Begin to sum what one replica alone has of a tie: the other stages may come to it much later."""
        tie = self._ties[number]
        for bucket in self._trained:
            if tie.group.size > 1 and bucket.home.tie == number and bucket.local is not None:
                bucket.local.start_sum(tie.group, step)

    def _finish_local(self, step: int) -> None:
        """Let gradients that stay where they are be those of a step."""
        for number in range(len(self._ties)):
            self._start_tie(number, step)
        for bucket in self._trained:
            if bucket.local is not None:
                bucket.local.start(step)
                bucket.local.finish(step)

    def _sum_ties(self) -> None:
        """Over the stages of each tie, in the order of the ties on every rank."""
        under_way: list[Ticket] = []
        for number, tie in enumerate(self._ties):
            mine = [bucket for bucket in self._trained if bucket.home.tie == number and bucket.local is None]
            assert len(mine) <= _BUCKETS_OF_A_TIE, f"tie {number} has {len(mine)} buckets"
            for place, bucket in enumerate(mine):
                channel = _TIES + number * _BUCKETS_OF_A_TIE + place
                under_way.append(self.exchange.sum_to_all(bucket.result, tie.group, channel))
        for ticket in under_way:
            ticket.wait()


def _device_of(parameters: Mapping[int, Mapping[str, nn.Parameter]]) -> torch.device:
    """Where a rank's parameters are; without any, its part in sums is of no numbers."""
    every = (each.device for held in parameters.values() for each in held.values())
    return next((each for each in every if each.type != "cpu"), torch.device("cpu"))


def _make_layers(stages: Mapping[int, Stage], sharing: Sharing, module: nn.Module | None) -> dict[int, Layers]:
    """Where weights come unit by unit or may live on the host, and stages have units."""
    comes = sharing.zero > 0 and (sharing.zero < 3 or sharing.layerwise)
    if module is None or not (comes or sharing.lodged):
        return {}
    return {number: Layers(stage) for number, stage in stages.items() if isinstance(stage, Wrappable)}


def _units_of(bucket: Bucket, users: Mapping[int, Sequence[str]]) -> set[str]:
    """The units that a bucket comes for, or that wait for it; none if it comes for its stage."""
    every = [users.get(id(each), ()) for each in bucket.weights.parameters]
    # What several units use is gathered once for their stage, and comes from the host for each of them.
    can_come = isinstance(bucket.weights, LodgedWhole)
    if all(len(each) == 1 or (each and can_come) for each in every):
        return {unit for each in every for unit in each}
    return set()


def _by_unit(layers: Layers, buckets: Sequence[Bucket], users: Mapping[int, Sequence[str]]) -> dict[str, list[Weights]]:
    """The weights of the buckets that come for each unit, or that it waits for."""
    found: dict[str, list[Weights]] = {unit: [] for unit in layers.units}
    for bucket in buckets:
        for unit in _units_of(bucket, users) & found.keys():
            found[unit].append(bucket.weights)
    return found
