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

    #: Whether its memory is freed between steps, although every rank has all of it.
    leaves = False

    def __init__(self, spec: BucketSpec, *, is_sharded: bool) -> None:
        self.layout, self.parameters, self.is_sharded = spec.layout, spec.parameters, is_sharded
        self._group, self._exchange, self._channel = spec.replicas.shard, spec.exchange, spec.channel
        layout, group, only = spec.layout, self._group, spec.parameters[0].data
        # A single parameter is contiguous already, if it has its whole storage. Not if that is freed between steps:
        # another tensor may be a view of it.
        stays = not is_sharded and not self.leaves
        is_own = (
            stays and only.is_contiguous() and only.untyped_storage().nbytes() == layout.length * only.element_size()
        )
        if len(self.parameters) == 1 and is_own:
            #: All of them, while they are here.
            self.whole = only.view(-1)
        else:
            self.whole = only.new_zeros(layout.length)
            for slot, parameter in zip(layout.slots, self.parameters, strict=True):
                place = self.whole[slot.start : slot.stop].view(slot.shape)
                place.copy_(parameter.data)
                # Through `data`: writes to the bucket must not count as writes to the parameter. Autograd may have
                # saved it, and finds the same values there later.
                parameter.data = place
        own = self.whole.view(group.size, -1)[group.rank]
        #: What this rank keeps, and its optimizer writes to.
        self.shard: Tensor = own.clone() if is_sharded else own
        self.presence = Presence.HERE
        self._ticket: Ticket | None = None
        self._holders: set[object] = set()
        self.release()

    @property
    def num_bytes(self) -> int:
        """The bytes that they take now."""
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
        """Mark gathered weights as outdated: the shards were updated."""
        self._holders.clear()
        self.arrive()
        self.presence = Presence.AWAY
        self.release()
        if not self.is_sharded:
            self.start()

    def renew(self, update: Ticket) -> None:
        """Record an update in progress that writes all of them: users wait for it."""
        self.wait()
        self._ticket, self.presence = update, Presence.COMING

    def fetch(self) -> None:
        """Bring the shard to the device; it is here."""

    def start(self) -> None:
        """Start to gather them, if they are not here or in transit."""
        if self.presence is Presence.AWAY:
            self._ticket = self._bring()
            self.presence = Presence.COMING

    def _bring(self) -> Ticket:
        """Start to gather."""
        if self.is_sharded:
            self.whole.untyped_storage().resize_(self.whole_bytes)
        return self._exchange.gather(self.whole, self.shard, self._group, self._channel)

    def claim(self, holder: object) -> None:
        """Start to gather, for `holder`, until it releases them."""
        self._holders.add(holder)
        self.start()

    def hold(self, holder: object) -> None:
        """Gather the whole, until `holder` releases it."""
        self._holders.add(holder)
        self.wait()

    def wait(self) -> None:
        """Gather the whole, and wait for it."""
        self.start()
        if self._ticket is not None:
            ticket, self._ticket = self._ticket, None
            ticket.wait()
            self.presence = Presence.HERE
            self._has_come()

    def arrive(self) -> None:
        """Wait for what is in transit."""
        if self.presence is Presence.COMING:
            self.wait()

    def show(self) -> None:
        """Gather the whole for code outside the engine: nothing is in transit to other ranks either."""
        self.wait()
        self._exchange.settle()

    def is_moved(self, number: int) -> bool:
        """Whether a parameter was given memory of another's."""
        slot, parameter = self.layout.slots[number], self.parameters[number]
        place = self.whole.data_ptr() + slot.start * self.whole.element_size()
        return parameter.data_ptr() != place and parameter.numel() > 0

    def bring_back(self) -> list[bool]:
        """Make parameters with other memory point into the bucket again, with their values; return which they were.

        All of them get new memory then: a script that kept the old one (`backup = p.data; p.data = average`) finds its
        old values there.
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
        """Mark them as here."""

    def let_go(self, holder: object) -> None:
        """Release them for this holder."""
        self._holders.discard(holder)
        if not self._holders:
            self.release()

    def release(self) -> None:
        """Free the memory of other ranks' shards."""
        if not self.is_sharded:
            return
        self.arrive()
        self.whole.untyped_storage().resize_(0)
        self.presence = Presence.AWAY
