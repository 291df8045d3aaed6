"""What ranks run in the tests of processes. Apart from the tests, so that a rank imports no more than this."""

import os
import signal
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from shardwise.engine.parallelize import parallelize
from shardwise.errors import ShardwiseError
from shardwise.planner.plan import Plan
from shardwise.ranks.faults import Watch
from shardwise.ranks.links import make_groups, make_links
from shardwise.ranks.message_layout import Key
from shardwise.ranks.outbox import Sent, WaitingOutbox
from shardwise.ranks.rank_error import RankError
from shardwise.ranks.transport import ProcessTransport
from shardwise.ranks.wires import make_wires
from shardwise.schedule.instruction import forward


def greet(word: str) -> tuple[int, int, str, int, float]:
    """Who a rank is, and the sum of all ranks' numbers."""
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), word, torch.get_num_threads(), float(total)


def tensors() -> dict[str, torch.Tensor]:
    return {"rank": torch.full((2, 3), float(dist.get_rank()), requires_grad=True)}


def variable(name: str) -> str | None:
    return os.environ.get(name)


def write_id(folder: Path) -> None:
    """Leave the numbers of this process and of one that it starts."""
    child = os.posix_spawn(sys.executable, [sys.executable, "-c", "import time; time.sleep(60)"], os.environ)
    path = folder / f"rank{dist.get_rank()}"
    path.with_suffix(".new").write_text(f"{os.getpid()} {child}")
    path.with_suffix(".new").replace(path)


def raise_on(culprit: int, folder: Path) -> None:
    """One rank raises while the others wait for a word from it, or from each other."""
    write_id(folder)
    dist.barrier()
    if dist.get_rank() == culprit:
        raise ValueError(f"boom on {culprit}")
    dist.recv(torch.zeros(1), src=(dist.get_rank() + 1) % dist.get_world_size())


def end_on(culprit: int, how: str, folder: Path) -> None:
    """One rank ends without a word."""
    write_id(folder)
    dist.barrier()
    if dist.get_rank() == culprit:
        if how == "exit":
            os._exit(3)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.recv(torch.zeros(1), src=culprit)


def sleep(seconds: float, folder: Path) -> None:
    write_id(folder)
    time.sleep(seconds)


def lock() -> Any:
    import threading

    return threading.Lock()


def talk(shares_memory: bool) -> dict[str, Any]:
    """Everything that a transport must get right between two processes, in one go: what came of each part."""
    return {
        name: part(ProcessTransport(make_groups([[0, 1]]), shares_memory=shares_memory), dist.get_rank())
        for name, part in _TALKS.items()
    }


def talk_over_links() -> dict[str, Any]:
    """The same over a group for each direction, as between GPUs, but on CPUs and over gloo."""
    cpu, me = torch.device("cpu"), dist.get_rank()
    parts = ("lengths", "headers", "many", "writes", "change")
    links = [(1, 0), (0, 1)]
    return {
        name: _TALKS[name](
            ProcessTransport(make_groups([[0, 1]]), links=make_links(links, [[0, 1]], device=cpu, backend="gloo")), me
        )
        for name in parts
    }


def make_links_of_two_pipelines() -> tuple[list[tuple[int, int]], dict[tuple[int, int], list[int]]]:
    """The links of this rank, of two pipelines of two: their order, and the ranks of each in the world."""
    made = make_links([(1, 0), (0, 1), (1, 0)], [[0, 2], [1, 3]], device=torch.device("cpu"), backend="gloo")
    return list(made), {link: dist.get_process_group_ranks(group) for link, group in made.items()}


def _key(source: int, microbatch: int, kind: str = "F") -> Key:
    return Key(source, 1 - source, kind, source, 1 - source, microbatch)


def _mixed(scale: int, length: int) -> list[torch.Tensor]:
    """Types of several widths, a scalar, an empty one, one that is not in one piece."""
    return [
        torch.full((2, length), float(scale), requires_grad=True),
        torch.arange(length) % 3 == 0,
        torch.tensor(scale),
        torch.empty(0, 4),
        torch.full((length, 3), float(scale), dtype=torch.bfloat16).T,
    ]


def _same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(
        torch.equal(one, other) and one.dtype == other.dtype and one.requires_grad == other.requires_grad
        for one, other in zip(ours, theirs, strict=True)
    )


def _talk_of_lengths(transport: ProcessTransport, me: int) -> list[bool]:
    """Both ways at once, lengths 8, 12 and 8 again, and unequal microbatches within a step."""
    right = []
    for length in (8, 12, 8):
        transport.begin_step(length)
        for microbatch in range(3):
            transport.post_receive(_key(1 - me, microbatch))
        for microbatch in range(3):
            transport.send(_key(me, microbatch), _mixed(10 * me + microbatch, length + microbatch))
        for microbatch in (1, 0, 2):  # Not in the order of sending.
            got = transport.receive(_key(1 - me, microbatch))
            right.append(_same(got, _mixed(10 * (1 - me) + microbatch, length + microbatch)))
        transport.finish()
    transport.close()
    return right


def _talk_of_headers(transport: ProcessTransport, me: int) -> list[int]:
    """How many messages each step took: headers only where a signature or a kind of message is new, or for None."""
    counted: list[int] = []
    send = transport._send
    sent: list[int] = []

    def counting(tensor: torch.Tensor, key: Key, tag: int) -> Any:
        sent.append(tag)
        return send(tensor, key, tag)

    transport._send = counting  # type: ignore[method-assign]
    for signature, kinds in (("a", "F"), ("a", "F"), ("a", "FB"), ("a", "FB"), ("b", "F"), ("a", "F"), (None, "F")):
        transport.begin_step(signature)
        for kind in kinds:
            transport.send(_key(me, 0, kind), [torch.ones(3)])
            transport.receive(_key(1 - me, 0, kind))
        transport.finish()
        counted.append(len(sent))
        sent.clear()
    transport.close()
    return counted


def _talk_of_many(transport: ProcessTransport, me: int) -> bool:
    """More tensors than one header describes, then one message of none at all, and a large one."""
    many = [torch.full((1, 2, 3), float(index)) for index in range(60)]
    large = [torch.arange(3_000_000)]
    transport.begin_step("many")
    for microbatch, message in enumerate((many, [], large)):
        transport.post_receive(_key(1 - me, microbatch))
        transport.send(_key(me, microbatch), message)
    right = all(
        _same(transport.receive(_key(1 - me, index)), message) for index, message in enumerate((many, [], large))
    )
    transport.finish()
    transport.close()
    return right


def _talk_of_writes(transport: ProcessTransport, me: int) -> str:
    """Received beside each other, and one of them written to: autograd must not mind for the other."""
    transport.begin_step("writes")
    transport.send(_key(me, 0), [torch.ones(4, requires_grad=True), torch.ones(4)])
    leaf, other = transport.receive(_key(1 - me, 0))
    transport.finish()
    transport.close()
    result = (leaf * other.clone() * leaf).sum()
    other.zero_()
    torch.autograd.backward(result)
    return str(leaf.grad)


def _talk_of_change(transport: ProcessTransport, me: int) -> str:
    """A shape that changes though the signature says that it does not."""
    for length in (3, 4):
        transport.begin_step("same")
        try:
            transport.send(_key(me, 5), [torch.ones(length)])
        except ShardwiseError as error:
            return str(error)
        transport.receive(_key(1 - me, 5))
        transport.finish()
    return "nothing was said"


def _talk_of_memory(transport: ProcessTransport, me: int) -> tuple[int, bool]:
    """With room for two messages in the outbox, how many of six are let go before the step ends; all arrive."""
    transport._outbox = WaitingOutbox(None, held_bytes=2 * 4000)
    transport.begin_step("memory")
    sent = [torch.full((2, 500), float(index)).T for index in range(6)]
    copies: list[weakref.ref[torch.Tensor]] = []
    put = transport._outbox.put

    def watching(each: Sent) -> None:
        if each.tensor.dtype == torch.float32:
            copies.append(weakref.ref(each.tensor))
        put(each)

    transport._outbox.put = watching  # type: ignore[method-assign, assignment]
    for index in range(6):
        transport.post_receive(_key(1 - me, index))
    for index, tensor in enumerate(sent):
        transport.send(_key(me, index), [tensor])
    right = all(_same(transport.receive(_key(1 - me, index)), [sent[index]]) for index in range(6))
    deadline = time.monotonic() + 60
    # Through shared memory nothing is held.
    while copies and sum(copy() is None for copy in copies) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    let_go = sum(copy() is None for copy in copies)
    transport.finish()
    transport.close()
    return let_go, right


def _talk_of_the_end(transport: ProcessTransport, me: int) -> bool:
    """Rank 0 sends more than there is room for, ends its step, and writes over what it has sent."""
    transport.begin_step("end")
    numbers = [float(1 + index) for index in range(5)]
    if me == 0:
        sent = [torch.full((15 * 2**18,), number) for number in numbers]
        for index, tensor in enumerate(sent):
            transport.send(_key(0, index), [tensor])
        transport.finish()
        for tensor in sent:
            tensor.zero_()
        return True
    found = [transport.receive(_key(0, index))[0] for index in range(len(numbers))]
    transport.finish()
    return all(bool((each == number).all()) for each, number in zip(found, numbers, strict=True))


def _talk_of_plenty(transport: ProcessTransport, me: int) -> tuple[int, bool]:
    """More than there is room for before anything is read, in bytes and in messages; how much was left behind."""
    transport.begin_step("plenty")
    large = [torch.full((15 * 2**18,), float(index)) for index in range(5)]
    small = [torch.full((3,), float(index)) for index in range(700)]
    for index, tensor in enumerate((*large, *small)):
        transport.send(_key(me, index), [tensor])
    left = sum(len(pair.pending) for pair in transport._near.values())
    right = all(
        _same(transport.receive(_key(1 - me, index)), [tensor]) for index, tensor in enumerate((*large, *small))
    )
    transport.finish()
    transport.close()
    return left, right


_TALKS: dict[str, Callable[[ProcessTransport, int], Any]] = {
    "lengths": _talk_of_lengths,
    "headers": _talk_of_headers,
    "many": _talk_of_many,
    "writes": _talk_of_writes,
    "change": _talk_of_change,
    "memory": _talk_of_memory,
    "end": _talk_of_the_end,
    "plenty": _talk_of_plenty,
}


def relay(fault: str, limit_seconds: float, folder: Path) -> None:
    """Activations go from rank 0 over 1 to 2, and gradients back; in the middle of it something happens to rank 2.

    Each of the others leaves what it raised.
    """
    write_id(folder)
    me = dist.get_rank()
    watch = Watch(me, 3, limit_seconds=limit_seconds, name=fault)
    transport = ProcessTransport(make_groups([[0, 1, 2]]), watch=watch)
    try:
        _relay(me, fault, watch, transport)
    except BaseException as error:
        watch.fail(error)
        (folder / f"told{me}").write_text(f"{type(error).__name__}\n{error}")
        raise
    transport.close()
    watch.close()


def _relay(me: int, fault: str, watch: Watch, transport: ProcessTransport) -> None:
    for step in range(2):
        transport.begin_step("step")
        for microbatch in range(3):
            if me > 0:
                transport.receive(Key(me - 1, me, "F", me - 1, me, microbatch))
            watch.at(forward(me, microbatch))
            if me == 2 and (step, microbatch) == (1, 1):
                _happen(fault)
            if me < 2:
                transport.send(Key(me, me + 1, "F", me, me + 1, microbatch), [torch.ones(2)])
                transport.receive(Key(me + 1, me, "B", me + 1, me, microbatch))
            if me > 0:
                transport.send(Key(me, me - 1, "B", me, me - 1, microbatch), [torch.ones(2)])
        transport.finish()


def _happen(fault: str) -> None:
    if fault == "raise":
        raise ValueError("boom")
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "sleep":
        time.sleep(60)
    if fault == "slow":
        time.sleep(1)


def wait_for_each_other(limit_seconds: float) -> str:
    """Each of two ranks receives what the other never sends."""
    me = dist.get_rank()
    watch = Watch(me, 2, limit_seconds=limit_seconds, name="circle")
    transport = ProcessTransport(make_groups([[0, 1]]), watch=watch)
    transport.begin_step("circle")
    try:
        transport.receive(_key(1 - me, 0))
    except RankError as error:
        return str(error)
    return "nothing was said"


def sum_without(missing: int, limit_seconds: float, folder: Path, *, raises: bool = False) -> None:
    """All ranks but one come to a collective of the default group. The one stays away, or raises, beside any step."""
    write_id(folder)
    me = dist.get_rank()
    watch = Watch(me, 3, limit_seconds=limit_seconds, name="sum")
    watch.guard(dist.distributed_c10d._get_default_group())
    try:
        if me == missing and raises:
            raise ValueError("boom")
        if me == missing:
            watch.at(forward(me, 1))
            time.sleep(60)
        work = dist.all_reduce(torch.ones(1), async_op=True)
        assert work is not None
        watch.wait(work, "the loss")
    except RankError as error:
        (folder / f"told{me}").write_text(f"{type(error).__name__}\n{error}")
        raise


def train_without(missing: int, step: int, limit_seconds: float, folder: Path) -> None:
    """One of three replicas does not come to a step of the engine. The others leave what they raised."""
    write_id(folder)
    me = dist.get_rank()
    plan, batch = Plan(dp=3), {"input": torch.arange(12.0).reshape(6, 2), "y": torch.ones(6, 1)}
    engine = parallelize(
        nn.Sequential(nn.Linear(2, 1)), plan, loss=lambda output, batch: functional.mse_loss(output, batch["y"]),
        optimizer=lambda given: torch.optim.SGD(given, lr=0.1), example=batch,
        wires=make_wires(plan, limit_seconds=limit_seconds),
    )  # fmt: skip
    try:
        for number in range(step + 1):
            if (me, number) == (missing, step):
                time.sleep(60)
            engine.train_step(batch)
    except RankError as error:
        (folder / f"told{me}").write_text(f"{type(error).__name__}\n{error}")
        raise


def evaluate_on_one(folder: Path) -> None:
    """What scripts do where they mean to print: an evaluation behind `if rank == 0:`. In the third step ranks gather
    objects, to compare it with one process; so they do in an evaluation."""
    write_id(folder)
    plan, batch = Plan(dp=3), {"input": torch.arange(12.0).reshape(6, 2), "y": torch.ones(6, 1)}
    engine = parallelize(
        nn.Sequential(nn.Linear(2, 1)), plan, loss=lambda output, batch: functional.mse_loss(output, batch["y"]),
        optimizer=lambda given: torch.optim.SGD(given, lr=0.1), example=batch,
    )  # fmt: skip
    for _ in range(2):
        engine.train_step(batch)
    if dist.get_rank() == 0:
        engine.evaluate(batch)
    engine.train_step(batch)


def fail_and_begin_again() -> tuple[str, str]:
    """One rank fails, all of them catch what it says, and then they begin anew."""
    me = dist.get_rank()
    watch = Watch(me, 3, name="again", beat_seconds=0.05)
    told = ""
    try:
        if me == 1:
            watch.fail(ValueError("caught"))
        while True:
            watch.check()
            time.sleep(0.01)
    except RankError as error:
        told = str(error)
    watch.close()
    dist.barrier()
    watch = Watch(me, 3, name="again", beat_seconds=0.05)
    time.sleep(0.2)
    watch.at("here")
    watch.close()
    return told, "fine"
