"""How values move between ranks.

The contract for an interpreter: `send` never waits, `post_receive` never waits, and `receive` waits for a message. On a
link, from one rank to another, messages arrive in the order of their sends, and are posted in that order.

Between processes, a message is one run of bytes: its tensors, one after the other. Their offsets, shapes and types are
its layout. The sender describes the layout in a small header message, once for each signature: the shapes of the batch
that a step begins with. While signatures repeat, only values move.

    step 1, signature A      describe, values
    step 2, signature A                values
    step 3, signature B      describe, values       longer sequences, say
    step 4, signature A                values
"""

from collections import OrderedDict, deque
from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.errors import ShardwiseError
from shardwise.ranks.faults import Watch
from shardwise.ranks.message_layout import HEADER_LENGTH, Description, Key, Layout, decode, describe, encode, length_of
from shardwise.ranks.outbox import Sent, StreamOutbox, StreamWork, WaitingOutbox
from shardwise.ranks.shared_memory import MOST_BYTES, Pair, meet
from shardwise.torch_private import cpu_backend

_PAYLOAD, _HEADER, _REST_OF_HEADER = 1, 2, 3  # Tags.
_MOST_SIGNATURES = 256
# The limit on receives posted before their instruction: enough to hide the fixed cost of small messages, with a
# negligible amount of memory.
_AHEAD_BYTES = 2**20


class ProcessTransport:
    """The transport between ranks in separate processes.

    `groups` carry nothing else: the first carries messages to higher ranks, the second those to lower ranks
    (`links.make_groups`). So a send never waits for the lock of a connection that is receiving a large message. Between
    ranks of one machine, only large messages use the groups; others go through shared memory (`shared_memory.py`).

        device   links   path of a value
        CPU      no      shared memory or gloo
        GPU      yes     NCCL, from device to device; the groups carry headers
        GPU      no      a copy to pinned memory of the host, shared memory or gloo, and a copy back

    `links` has one NCCL group of two for each direction between two ranks (`links.make_links`), because an operation
    in an NCCL group blocks those after it. Every rank of the groups makes one transport, at the same time.
    """

    def __init__(
        self,
        groups: tuple[dist.ProcessGroup, dist.ProcessGroup],
        *,
        device: torch.device | str = "cpu",
        links: Mapping[tuple[int, int], dist.ProcessGroup] | None = None,
        watch: Watch | None = None,
        shares_memory: bool = True,
    ) -> None:
        self._groups: tuple[dist.ProcessGroup, ...] = groups
        self._watch = watch
        #: Ranks here are places in the pipeline; the watch uses world ranks.
        self._in_world = dist.get_process_group_ranks(groups[0])
        # The groups' backends, called directly: the dispatch from a group took a third of a small message's time.
        self._backends = [cpu_backend(group) for group in self._groups]
        self._device = torch.device(device)
        self._links = links or {}
        # What groups and shared memory carry is in the host's memory.
        self._is_staged = self._device.type != "cpu" and not self._links
        #: Messages and bytes sent to each rank since this was last cleared.
        self.sent: dict[int, list[int]] = {}
        self._outbox = WaitingOutbox(watch)
        self._links_outbox = StreamOutbox()
        self._known: OrderedDict[Hashable, dict[Key, Layout]] = OrderedDict()
        self._layouts: dict[Key, Layout] = {}
        # Receives that wait for their payload; and, for each source, those whose layout is not known yet, with their
        # headers, followed by those that must keep their order behind them.
        self._posted: dict[Key, tuple[Layout, Tensor, Any]] = {}
        self._unknown: dict[int, deque[tuple[Key, Tensor | None, Any]]] = {}
        # Keeps the last work alive: dropping it at once would wait for gloo's thread to release it, which takes
        # milliseconds if that thread has lost its core.
        self._last_waited: Any = None
        if watch is not None:
            for group in (*set(self._groups), *self._links.values()):
                watch.guard(group)
        # The ranks of this machine, and what is shared with each.
        self._near: dict[int, Pair] = {}
        if shares_memory and not self._links:
            self._near = meet(self._groups[0])
        if watch is not None:
            for pair in self._near.values():
                watch.guard(pair)

    def begin_step(self, signature: Hashable | None) -> None:
        """Start a step. Every rank gives the same signature; steps with the same signature have the same layouts.

        A signature includes everything that shapes depend on, and whether gradients are required. None: layouts may
        change.
        """
        if signature is None:
            self._layouts = {}
            return
        self._layouts = self._known.setdefault(signature, {})
        self._known.move_to_end(signature)
        if len(self._known) > _MOST_SIGNATURES:  # The same one on every rank: all have seen the same signatures.
            self._known.popitem(last=False)

    def send(self, key: Key, tensors: list[Tensor]) -> None:
        """Send tensors. They must not be written to before `finish`."""
        layout = self._layouts.get(key)
        if layout is None:
            layout = self._layouts[key] = Layout(describe(tensors))
            self._send_header(key, layout.description)
        message = layout.pack(tensors)
        if message is None:
            before, now = _text_of(layout.description), _text_of(describe(tensors))
            if _without_gradients(layout.description) == _without_gradients(describe(tensors)):
                raise ShardwiseError(
                    f"{key.sending} sends {now}, and in an earlier step it was {before}: whether a stage computes with"
                    " gradients (no_grad, set_grad_enabled, requires_grad) has changed",
                    remedy="an optimizer group with lr=0.0 for as long as its layers are not to be trained, in place of"
                    " no_grad; or sw.parallelize again where it changes",
                )
            raise ShardwiseError(
                f"{key.sending} sends {now}; with this signature it was {before}, and that is expected",
                remedy="begin_step with all that shapes depend on in its signature, or with None if they depend on the"
                " data",
            )
        num_bytes = layout.num_bytes
        if num_bytes:
            sent = self.sent.get(key.target)
            if sent is None:
                sent = self.sent[key.target] = [0, 0]
            sent[0] += 1
            sent[1] += num_bytes
            with self._asking(key.target):
                self._send(_on_host(message) if self._is_staged else message, key, _PAYLOAD)

    def post_receive(self, key: Key) -> None:
        """Post a receive, so that the message can arrive during computation."""
        if key in self._posted:
            return
        layout = self._layouts.get(key)
        unknown = self._unknown.setdefault(key.source, deque())
        if layout is None:
            header = torch.empty(HEADER_LENGTH, dtype=torch.uint8)
            unknown.append((key, header, self._receive(header, key, _HEADER)))
        elif unknown:
            unknown.append((key, None, None))
        else:
            self._post_payload(key, layout)

    def post_ahead(self, keys: Sequence[Key]) -> None:
        """Announce later receives, in order: some of them are posted now, while the rank has nothing else to do."""
        if self._links:  # An operation in an NCCL group blocks those after it.
            return
        left = _AHEAD_BYTES - sum(layout.num_bytes for layout, _, _ in self._posted.values())
        for key in keys:
            layout = self._layouts.get(key)
            if layout is None or layout.num_bytes > left or self._unknown.get(key.source):
                return
            if key not in self._posted:
                left -= layout.num_bytes
                self._post_payload(key, layout)

    def receive(self, key: Key) -> list[Tensor]:
        """Wait for a message, posting its receive if necessary. Its tensors are leaves, with the `requires_grad` of
        the sender's tensors."""
        if key not in self._posted:
            unknown = self._unknown.setdefault(key.source, deque())
            if all(other != key for other, _, _ in unknown):
                self.post_receive(key)
            while key not in self._posted:
                self._learn(unknown)
        layout, message, work = self._posted.pop(key)
        if work is not None:
            # Over a link the device's stream waits for the value, not the host.
            self._wait_until(StreamWork(work) if self._links else work, key, key.source)
        # Pinned memory: the allocator does not reuse it before this copy has ended.
        return layout.unpack(message.to(self._device, non_blocking=True) if self._is_staged else message)

    def finish(self) -> None:
        """End a step: wait until all that was sent has arrived."""
        assert not self._posted, f"posted and never received: {', '.join(map(str, self._posted))}"
        for rank, pair in self._near.items():
            if pair.pending:
                self._wait_until(pair, "the end of the step", rank)
        self._outbox.drain()
        self._links_outbox.drain()

    def close(self) -> None:
        """Release held tensors and references to the groups. The groups are not destroyed."""
        self._outbox.close()
        self._links_outbox.close()
        for pair in self._near.values():
            pair.close()
        self._near = {}
        self._last_waited, self._groups, self._backends, self._links = None, (), [], {}

    def _post_payload(self, key: Key, layout: Layout) -> None:
        with self._asking(key.source):
            message = layout.allocate(torch.device("cpu") if self._is_staged else self._device, pinned=self._is_staged)
            self._posted[key] = (layout, message, self._receive(message, key, _PAYLOAD) if layout.num_bytes else None)

    def _learn(self, unknown: deque[tuple[Key, Tensor | None, Any]]) -> None:
        """Read the oldest header of a link, and post a receive for the payload that it describes."""
        key, header, work = unknown.popleft()
        if header is not None:
            self._wait_until(work, key, key.source)
            missing = length_of(header) - HEADER_LENGTH
            if missing > 0:
                rest = torch.empty(missing, dtype=torch.uint8)
                self._wait_until(self._receive(rest, key, _REST_OF_HEADER), key, key.source)
                header = torch.cat([header, rest])
            self._layouts[key] = Layout(decode(header))
        self._post_payload(key, self._layouts[key])

    def _send_header(self, key: Key, description: Description) -> None:
        header = encode(description)
        for tag, part in ((_HEADER, header[:HEADER_LENGTH]), (_REST_OF_HEADER, header[HEADER_LENGTH:])):
            if part.numel():
                self._send(part, key, tag)

    def _send(self, tensor: Tensor, key: Key, tag: int) -> None:
        pair = self._near.get(key.target)
        try:
            # The two ends of a message answer alike.
            if pair is not None and tensor.nbytes <= MOST_BYTES:
                pair.send(tensor, tag)
            else:
                group, peer = self._route(key, key.target, tag)
                alone = tensor.detach()
                outbox = self._links_outbox if self._links and tag == _PAYLOAD else self._outbox
                outbox.put(Sent(group.send([alone], peer, tag), alone, key, self._in_world[key.target]))
        except RuntimeError as error:
            if self._watch is None:
                raise
            self._watch.explain(error, self._in_world[key.target])

    def _receive(self, tensor: Tensor, key: Key, tag: int) -> Any:
        pair = self._near.get(key.source)
        if pair is not None and tensor.nbytes <= MOST_BYTES:
            return pair.want(tensor, tag)
        group, peer = self._route(key, key.source, tag)
        try:
            return group.recv([tensor], peer, tag)
        except RuntimeError as error:
            if self._watch is None:
                raise
            self._watch.explain(error, self._in_world[key.source])

    def _route(self, key: Key, peer: int, tag: int) -> tuple[Any, int]:
        if self._links and tag == _PAYLOAD:
            link = self._links[key.source, key.target]
            return link, 1 - link.rank()
        return self._backends[key.source > key.target], peer

    def _asking(self, peer: int) -> AbstractContextManager[None]:
        """Over a link nothing waits, but CUDA may: for memory, say, while a kernel waits for the other rank."""
        return self._watch.asking(self._in_world[peer]) if self._links and self._watch is not None else nullcontext()

    def _wait_until(self, work: Any, what: object, peer: int) -> None:
        if self._watch is None:
            work.wait()
        else:
            self._watch.wait(work, what, self._in_world[peer])
        self._last_waited = work


def _on_host(message: Tensor) -> Tensor:
    """Copy a message to pinned memory and wait for the copy: gloo's threads do not synchronize with streams."""
    copy = torch.empty(message.shape, dtype=message.dtype, pin_memory=True)
    return copy.copy_(message.detach())


def _without_gradients(description: Description) -> list[tuple[Any, ...]]:
    return [(dtype, tuple(shape)) for dtype, shape, _ in description]


def _text_of(description: Description) -> str:
    return (
        ", ".join(
            f"{str(dtype).removeprefix('torch.')}{list(shape)}{' with gradient' if wants_gradient else ''}"
            for dtype, shape, wants_gradient in description
        )
        or "nothing"
    )
