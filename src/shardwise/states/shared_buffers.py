"""Buffers that a forward writes to: counters, running means, codebooks.

Replicas see different rows, so their buffers may diverge. They are compared at the end of every step that wrote to
some. If all are the same (a counter, a schedule), nothing is to be done. If they differ, the user must say what one
device would have had:

    how        every replica has from then on
    None       refused
    "mean"     the mean of all: that of one device for a running mean that no forward of the step has read
    "first"    those of the first: what DDP broadcasts
Statistics of batch norms are combined in `batch_norm.py`, and need no argument.

A forward may also replace a buffer by another tensor (`self.ema = ...`). At the end of a step the tensor that the
engine knows is restored, with the new values.
"""

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import ShardwiseError
from shardwise.nets.router import Router
from shardwise.states.batch_norm import SharedStatistics, is_batch_norm
from shardwise.torch_private import buffer_slots, version_of

#: Returns the objects of all ranks, in their order.
Gather = Callable[[Any], list[Any]]
#: The dictionary that holds a buffer, and its key.
Slot = tuple[dict[str, Any], str]
#: A digest of each buffer after the run of the example, by name; None for one without values.
Written = Mapping[str, bytes | None]

WAYS = ("mean", "first")


def digest_of(buffer: Tensor) -> bytes | None:
    """Return a digest that is equal for equal values."""
    if buffer.is_meta:
        return None
    plain = buffer.detach().cpu().contiguous()
    return hashlib.blake2b(plain.reshape(-1).view(torch.uint8).numpy().tobytes(), digest_size=16).digest()


class WriteWatch:
    """Records which buffers of a module are written to from its creation until `found` is called.

    Values are compared too: writes through `buffer.data`, or by NumPy, do not change the version counter. A buffer that
    a forward registers counts as written.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before = [
            (slots, key, name, each, version_of(each), each.detach().clone())
            for slots, key, name, each in own_buffers(module)
        ]

    def found(self) -> Written:
        """Return the buffers that were written to or replaced."""
        now = [(name, slots[key], each, version, value) for slots, key, name, each, version, value in self._before]
        known = {name for name, *_ in now}
        late = {name: digest_of(each) for _, _, name, each in own_buffers(self._module) if name not in known}
        return late | {
            name: digest_of(here)
            for name, here, each, version, value in now
            if isinstance(here, Tensor) and (here is not each or version_of(here) != version or _differ(here, value))
        }


def _differ(here: Tensor, before: Tensor) -> bool:
    return not here.is_meta and (here.shape != before.shape or not torch.equal(here, before))


def own_buffers(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, str, Tensor]]:
    """Yield buffers except those of batch norms, whose statistics are known, and of our routers, whose counts are
    summed."""
    for prefix, owner in module.named_modules():
        if is_batch_norm(owner):
            continue
        for key, each in buffer_slots(owner).items():
            if isinstance(each, Tensor) and not (isinstance(owner, Router) and key == "load"):
                yield buffer_slots(owner), key, f"{prefix}.{key}" if prefix else key, each


def check_owners(written: Collection[str], units: Sequence[Sequence[str]]) -> None:
    """Refuse buffers that several stages of a pipeline would each write on their own; `units` are those of each."""
    for name in written if len(units) > 1 else ():
        stages = _stages_with(name, units)
        if len(stages) != 1:
            where = f"stages {', '.join(map(str, stages))} call its module" if stages else "no unit has it"
            raise ShardwiseError(
                f"the forward writes to the buffer {name}, and {where}: each of {len(units)} stages would have another",
                remedy="write it in the forward of the submodule that has it, called once; or a plan without pp",
            )


def check_norms(module: nn.Module, units: Sequence[Sequence[str]]) -> None:
    """Refuse batch norms that several stages of a pipeline call: each stage would have statistics of its own calls."""
    for name, each in module.named_modules() if len(units) > 1 else ():
        if is_batch_norm(each) and each.training and each.track_running_stats:
            stages = _stages_with(f"{name}.running_mean", units)
            if len(stages) > 1:
                raise ShardwiseError(
                    f"stages {', '.join(map(str, stages))} call the batch norm {name}: each of them would have"
                    " statistics of its own calls, and none those of all",
                    remedy="call it once (on torch.cat of its inputs), or on one stage; a norm without statistics of"
                    " batches; or a plan without pp",
                )


def _stages_with(buffer: str, units: Sequence[Sequence[str]]) -> list[int]:
    names = [{unit.partition("#")[0] for unit in of_stage} for of_stage in units]
    return [at for at, mine in enumerate(names) if any(buffer.startswith(f"{unit}.") for unit in mine)]


class SharedBuffers:
    """The buffers of this rank that forwards write to: `written` in the run of the example, and others later.

    `buffers` are all of its buffers, `units` those of each stage, and `stages` those here. `gather` gathers from the
    ranks with other rows of the same layers; without it there are none. All ranks call it alike.
    """

    def __init__(
        self,
        module: nn.Module,
        buffers: Collection[str],
        written: Written,
        *,
        units: Sequence[Sequence[str]],
        stages: Collection[int],
        gather: Gather | None,
        how: str | None,
    ) -> None:
        self._gather, self._how, self._units = gather, how, units
        self._places: dict[str, Slot] = {
            name: (slots, key) for slots, key, name, _ in own_buffers(module) if name in buffers
        }
        #: Buffers that a forward registers, which may not exist yet.
        late = [name for name in written if name not in dict(module.named_buffers())]
        self._late = {name for name in late if len(units) == 1 or set(_stages_with(name, units)) & set(stages)}
        for name in self._late:
            owner, _, key = name.rpartition(".")
            self._places[name] = buffer_slots(module.get_submodule(owner)), key
        self._written = {name for name in written if name in self._places}
        #: The slots of buffers that forwards write to.
        self.slots = [self._places[name] for name in self._written]
        self._statistics = None if gather is None else SharedStatistics(module, buffers, gather)
        self._has_statistics = self._statistics is not None and self._statistics.are_there
        # With `how` given, buffers are expected to be written, if not in the example.
        self._agrees = gather is not None and any(gather(bool(self._written or (how and self._places))))
        if gather is not None and self._agrees and how is None:
            self._differing(gather({name: written[name] for name in self._written}))

    @property
    def are_there(self) -> bool:
        """Whether copies of a layer tell each other something, at the end of each step."""
        return self._has_statistics or self._agrees

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Wrap a step: at its end every copy has the agreed values."""
        there = [(name, slots[key]) for name, (slots, key) in self._places.items() if name not in self._late]
        before = {name: (each, version_of(each)) for name, each in there}
        if self._has_statistics and self._statistics is not None:
            with self._statistics.shared():
                yield
        else:
            yield
        for name, (home, version) in before.items():
            slots, key = self._places[name]
            if slots[key] is not home or version_of(home) != version:
                self._note(name)
                self._bring_home(name, home)
        if self._agrees:
            self._agree()

    def _note(self, name: str) -> None:
        """Record that a forward has written to a buffer, perhaps for the first time."""
        if name in self._written:
            return
        check_owners([name], self._units)
        if self._gather is not None and self._how is None:
            raise ShardwiseError(
                f"the forward writes to the buffer {name}, and did not when the example was run: whether replicas have"
                " the same is not looked at",
                remedy='write to it in every forward of training; or buffers="mean", or buffers="first"',
            )
        self._written.add(name)
        self.slots.append(self._places[name])

    @torch.no_grad()
    def _bring_home(self, name: str, home: Tensor) -> None:
        """Restore the original tensor in its slot, with the newest values."""
        slots, key = self._places[name]
        here = slots[key]
        if here is home:
            return
        if not isinstance(here, Tensor) or here.shape != home.shape or here.dtype != home.dtype:
            raise ShardwiseError(
                f"the forward has put something else in the place of the buffer {name}: it was {_kind(home)}, and is"
                f" {_kind(here)}",
                remedy="a buffer of one shape and type, whatever the batch",
            )
        home.copy_(here)
        slots[key] = home

    @property
    def _values(self) -> dict[str, Tensor]:
        places = {name: self._places[name] for name in self._written}
        return {name: slots[key] for name, (slots, key) in places.items() if isinstance(slots.get(key), Tensor)}

    @torch.no_grad()
    def _agree(self) -> None:
        assert self._gather is not None, "there are others"
        mine = self._values
        differing = self._differing(self._gather({name: digest_of(each) for name, each in mine.items()}))
        if not differing:
            return
        told = self._gather({name: mine[name].cpu() for name in differing if name in mine})
        for name in differing & mine.keys():
            copies = [part[name] for part in told if name in part]
            is_mean = self._how == "mean" and mine[name].is_floating_point()
            mine[name].copy_(torch.stack(copies).mean(0) if is_mean else copies[0])

    def _differing(self, told: Sequence[Written]) -> set[str]:
        """Return the buffers of any rank that differ between the ranks that have them."""
        seen: dict[str, list[bytes | None]] = {}
        for part in told:
            for name, digest in part.items():
                seen.setdefault(name, []).append(digest)
        found = {name for name, digests in seen.items() if len(set(digests)) > 1}
        if found and self._how is None:
            name = min(found)
            raise ShardwiseError(
                f"the forward writes to the buffer {name}, and {len(seen[name])} replicas have {len(set(seen[name]))}"
                " different ones: each has seen its own rows of the batch",
                remedy='buffers="mean", the mean of all replicas after each step, which is right for running means;'
                ' or buffers="first", those of the first, as DDP broadcasts them',
            )
        return found


def _kind(value: Any) -> str:
    return f"{list(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
