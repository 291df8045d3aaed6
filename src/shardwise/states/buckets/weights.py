"""The parameters of a bucket in contiguous memory, and which rank has which part of it at which time.

              whole on every rank (zero 0 to 2)          in shards (zero 3)
    step      a rank writes its piece                    a rank writes its shard
    gather    the other pieces come in                   memory is taken, all pieces come in
    release   nothing                                    the memory is given back

    presence   the run has                                 left by
    AWAY       no memory, or old numbers                   start: COMING
    COMING     memory, in which numbers arrive             wait: HERE
    HERE       the newest numbers, for what is computed    release, expire: AWAY;  renew: COMING

The module's parameters stay the same objects, and so do the tensors that autograd has saved of them: they are views of
the memory that is taken and given back. So a backward finds its weights where its forward had them, once they have been
gathered again.
"""

from torch import Tensor

from shardwise.errors import ShardwiseError
from shardwise.ranks.exchange import Ticket
from shardwise.states.buckets.flat_layout import BucketSpec
from shardwise.states.tiers.swapped_storage import Presence


class Weights:
    """The parameters of one bucket, which are made to look into its memory."""

    #: Whether its memory is given back between steps, though every rank has all of it.
    leaves = False

    def __init__(self, spec: BucketSpec, *, is_sharded: bool) -> None:
        self.layout, self.parameters, self.is_sharded = spec.layout, spec.parameters, is_sharded
        self._group, self._exchange, self._channel = spec.replicas.shard, spec.exchange, spec.channel
        layout, group, only = spec.layout, self._group, spec.parameters[0].data
        # One alone is a run of memory already, if it has all of its own. Not if that is given back between steps:
        # somebody may have another tensor that looks into it.
        stays = not is_sharded and not self.leaves
        is_own = (
            stays and only.is_contiguous() and only.untyped_storage().nbytes() == layout.length * only.element_size()
        )
        if len(self.parameters) == 1 and is_own:
            #: All of them, where they are here.
            self.whole = only.view(-1)
        else:
            self.whole = only.new_zeros(layout.length)
            for slot, parameter in zip(layout.slots, self.parameters, strict=True):
                place = self.whole[slot.start : slot.stop].view(slot.shape)
                place.copy_(parameter.data)
                # Through `data`: what is written to the bucket must not count as written to the parameter, of which
                # autograd may have saved the old numbers, to find the same ones there later.
                parameter.data = place
        own = self.whole.view(group.size, -1)[group.rank]
        #: What this rank keeps, and its optimizer writes.
        self.shard: Tensor = own.clone() if is_sharded else own
        self.presence = Presence.HERE
        self._ticket: Ticket | None = None
        self._holders: set[object] = set()
        self.release()

    @property
    def num_bytes(self) -> int:
        """What they take now."""
        whole = self.whole.untyped_storage().nbytes()
        return whole + self.shard.untyped_storage().nbytes() if self.is_sharded else whole

    @property
    def kept(self) -> Tensor:
        """What this rank keeps: all of them, or its shard."""
        return self.shard if self.is_sharded else self.whole

    @property
    def whole_bytes(self) -> int:
        return self.layout.length * self.whole.element_size()

    def expire(self) -> None:
        """The shards have been written: what was gathered is no longer true."""
        self._holders.clear()
        self.arrive()
        self.presence = Presence.AWAY
        self.release()
        if not self.is_sharded:
            self.start()

    def renew(self, update: Ticket) -> None:
        """An update that writes all of them is under way, beside what is computed: whoever needs them waits for it."""
        self.wait()
        self._ticket, self.presence = update, Presence.COMING

    def fetch(self) -> None:
        """The shard is here."""

    def start(self) -> None:
        """Have them come, if they are not here or on their way."""
        if self.presence is Presence.AWAY:
            self._ticket = self._bring()
            self.presence = Presence.COMING

    def _bring(self) -> Ticket:
        """Begin to gather."""
        if self.is_sharded:
            self.whole.untyped_storage().resize_(self.whole_bytes)
        return self._exchange.gather(self.whole, self.shard, self._group, self._channel)

    def claim(self, holder: object) -> None:
        """Begin to gather, for `holder` and until it lets go."""
        self._holders.add(holder)
        self.start()

    def hold(self, holder: object) -> None:
        """Have the whole here until `holder` lets go."""
        self._holders.add(holder)
        self.wait()

    def wait(self) -> None:
        """Have the whole here."""
        self.start()
        if self._ticket is not None:
            ticket, self._ticket = self._ticket, None
            ticket.wait()
            self.presence = Presence.HERE
            self._has_come()

    def arrive(self) -> None:
        """Have here what is on its way."""
        if self.presence is Presence.COMING:
            self.wait()

    def show(self) -> None:
        """Have the whole here, for others than the engine: nothing of it is on its way to other ranks either."""
        self.wait()
        self._exchange.settle()

    def is_moved(self, number: int) -> bool:
        """Whether a parameter was given memory of another's."""
        slot, parameter = self.layout.slots[number], self.parameters[number]
        place = self.whole.data_ptr() + slot.start * self.whole.element_size()
        return parameter.data_ptr() != place and parameter.numel() > 0

    def bring_back(self) -> list[bool]:
        """Have parameters that were given memory of another's look in here again, with their numbers; which they were.

        All of them look into new memory then: whoever has taken the old one (`backup = p.data; p.data = average`) finds
        there what was in it.
        """
        moved = [self.is_moved(number) for number in range(len(self.parameters))]
        if not any(moved):
            return moved
        for number in (number for number, is_moved in enumerate(moved) if is_moved):
            self._check_moved(number)
        self.whole = self.whole.clone()
        for slot, parameter, is_moved in zip(self.layout.slots, self.parameters, moved, strict=True):
            place = self.whole[slot.start : slot.stop].view(slot.shape)
            if is_moved:
                place.copy_(parameter.data)
            parameter.data = place
        self.shard = self.whole.view(self._group.size, -1)[self._group.rank]
        return moved

    def _check_moved(self, number: int) -> None:
        slot, parameter, whole = self.layout.slots[number], self.parameters[number], self.whole
        if parameter.shape != slot.shape or parameter.dtype != whole.dtype or parameter.device != whole.device:
            raise ShardwiseError(
                f"{slot.name} was made {list(parameter.shape)} of {parameter.dtype} on {parameter.device} since the"
                f" engine has it, and is {list(slot.shape)} of {whole.dtype} on {whole.device} there",
                remedy="module.to(...) before sw.parallelize",
            )

    def _has_come(self) -> None:
        """They are here now."""

    def let_go(self, holder: object) -> None:
        """This holder needs it no longer."""
        self._holders.discard(holder)
        if not self._holders:
            self.release()

    def release(self) -> None:
        """Give back the memory of what other ranks keep."""
        if not self.is_sharded:
            return
        self.arrive()
        self.whole.untyped_storage().resize_(0)
        self.presence = Presence.AWAY
