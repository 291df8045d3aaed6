"""A model over many ranks: every step goes to all of them, and logits come back from the last stage.

    engine (no weights) --inputs--> rank 0 .. n-1, each with its shard of the model and of every KV block --> logits

With pipeline stages, the sequences of a step are split into as many batches as there are stages, to keep all busy:

    stage 0   a  b
    stage 1      a  b
"""

from collections.abc import Mapping
from collections.abc import Sequence as Several
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.errors import warn_plainly
from shardwise.nets.hf import load
from shardwise.nets.hf.entries import CONFIG
from shardwise.nets.initialise import initialise
from shardwise.nets.settings import Settings
from shardwise.nets.weights import place, shapes_of, weights_of
from shardwise.ranks.spawn import Ranks
from shardwise.serving.forecast import deal_layers
from shardwise.serving.kv_cache import Inputs, make_cache
from shardwise.serving.limits import free_bytes
from shardwise.serving.narrow_weights import narrow, num_parameters, weight_bytes
from shardwise.serving.runner import Part
from shardwise.serving.shards import Shard, connect, make_shard, shard_waits
from shardwise.serving.sources import read_source
from shardwise.serving.tier_store import TierBytes, make_store

#: How long the other ranks have to end after one has failed: clients are answered within 5 s.
_GRACE_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The model as ranks need it: where its weights are, and how they are sharded."""

    source: str
    random_weights: bool
    settings: Settings
    dtype: torch.dtype
    shard: Shard
    weights: str | None = None


def ranks_for(shard: Shard, variables: Mapping[str, str], num_replicas: int = 1) -> Ranks:
    """Start the processes of one replica."""
    return Ranks(shard.num_ranks, variables=variables, grace_seconds=_GRACE_SECONDS, num_groups=num_replicas)


def layers_by_speed(ranks: Ranks, settings: Settings, shard: Shard, dtype: torch.dtype) -> tuple[int, ...]:
    """Return the layers of each stage, by the read bandwidth of its slowest rank and the memory of its fullest."""
    measured, size = ranks.run(_measure), shard.tp * shard.ep
    stages = [measured[first : first + size] for first in range(0, shard.num_ranks, size)]
    every = [(name, shape) for name, shape in shapes_of(settings).items() if name.startswith("layers.")]
    layer_bytes = sum(prod(shape) for _, shape in every) * dtype.itemsize / settings.num_layers / size
    speeds = [min(speed for speed, _ in stage) for stage in stages]
    # At least a fifth is left for keys and values.
    rooms = [0.8 * min(room for _, room in stage) for stage in stages]
    return deal_layers(settings.num_layers, speeds, rooms, layer_bytes)


def _measure() -> tuple[float, float]:
    """Measure this rank's copy bandwidth in bytes/s, and its free bytes. Decoding is bound by reading weights."""
    device = _device()
    held = torch.ones(2**26 if device.type == "cuda" else 2**23, device=device)
    best = torch.inf
    for _ in range(4):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begun = perf_counter()
        held.mul_(1.0)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, perf_counter() - begun)
    return 2 * held.nbytes / best, float(free_bytes(device))


class RankedRunner:
    """The runner of many ranks."""

    device = torch.device("cpu")

    def __init__(self, model: Model, ranks: Ranks, *, is_owner: bool) -> None:
        self._model, self.ranks, self._is_owner = model, ranks, is_owner
        #: For each rank: bytes free for blocks, bytes of its weights, and number of its parameters.
        self.rooms: list[tuple[int, int, int]] = self.ranks.run(_load, model)
        self._blocks: tuple[int, int, Several[TierBytes]] | None = None
        #: Blocks that all ranks evict from their caches before the next step, with their names.
        self._evicted: list[tuple[int, bytes]] = []
        #: For each rank, the compute time of the last step, without waiting for other ranks. 0 on GPUs: not measured.
        self.rank_seconds: list[float] = []

    def allocate(self, num_blocks: int, block_size: int, tiers: Several[TierBytes] = ()) -> None:
        """Allocate each rank's part of the blocks, and the tiers below them."""
        self._blocks = num_blocks, block_size, tiers
        self.ranks.run(_allocate, *self._blocks)

    def evict(self, block: int, name: bytes) -> None:
        self._evicted.append((block, name))

    def ask_tiers(self, what: str, *given: Any) -> list[Any]:
        """Call a method of every rank's tiers, after the evictions so far."""
        return self.ranks.run(_ask_tiers, what, given, self._take_evicted())

    def _take_evicted(self) -> list[tuple[int, bytes]]:
        found, self._evicted = self._evicted, []
        return found

    def check(self) -> None:
        self.ranks.check()

    def recover(self) -> None:
        """Load weights and allocate blocks again, on new ranks: when one rank fails, all of them end."""
        assert self._blocks is not None, "ranks that have served have blocks"
        self._evicted.clear()
        self.ranks.run(_load, self._model)
        self.ranks.run(_allocate, *self._blocks)

    def run(self, inputs: Inputs) -> Tensor:
        found = self.ranks.run(_step, deal(inputs, self._model.shard.pp), self._take_evicted())
        self.rank_seconds = [seconds for _, seconds in found]
        logits = [each for each, _ in found if each is not None]
        assert len(logits) == 1, "one rank of the last stage gives logits back"
        return torch.from_numpy(logits[0])

    def close(self) -> None:
        if self._is_owner:
            self.ranks.close()
        else:
            self.ranks.run(_forget)


def deal(inputs: Inputs, count: int) -> list[Inputs]:
    """Split the sequences of a step, in order, into at most `count` batches with about equal numbers of tokens."""
    num_sequences, total = len(inputs.lengths), inputs.starts[-1]
    bounds = [0]
    for number in range(1, count):
        reached = next(each for each in range(num_sequences + 1) if inputs.starts[each] * count >= number * total)
        bounds.append(max(bounds[-1], reached))
    bounds.append(num_sequences)
    return [_some(inputs, begin, end) for begin, end in pairwise(bounds) if begin < end]


def _some(inputs: Inputs, begin: int, end: int) -> Inputs:
    """Return the inputs of the sequences from `begin` to `end`."""
    first, last = inputs.starts[begin], inputs.starts[end]
    wanted = inputs.wanted[(inputs.wanted >= first) & (inputs.wanted < last)] - first
    return Inputs(
        tokens=inputs.tokens[first:last],
        positions=inputs.positions[first:last],
        slots=inputs.slots[first:last],
        tables=inputs.tables[begin:end],
        lengths=inputs.lengths[begin:end],
        starts=[each - first for each in inputs.starts[begin : end + 1]],
        wanted=wanted,
    )


#: The state of this process as a rank: its model first, then its part of the model over its cache.
_HELD: dict[str, Any] = {}


def _load(model: Model) -> tuple[int, int, int]:
    warn_plainly()
    shard = replace(model.shard, rank=dist.get_rank())
    size = shard.tp * shard.ep
    group = None
    if 1 < size < shard.num_ranks:
        for first in range(0, shard.num_ranks, size):  # Every rank must create all groups, in the same order.
            made = dist.new_group(list(range(first, first + size)))
            group = made if first <= shard.rank < first + size else group
    device = _device()
    module, names = make_shard(model.settings, shard, model.dtype)
    if model.random_weights:
        initialise(module, 0, only=names, slices=shard.slices, device=device)
    elif _is_hugging_face(model.source):
        load(model.source, module, only=names, slices=shard.slices, device=device)
    else:
        whole, _ = read_source(model.source, random_weights=False, dtype=model.dtype, device=torch.device("cpu"))
        held = weights_of(whole)
        with torch.no_grad():
            for name in names:
                place(module, name, device=device).copy_(held[name][shard.slices(name, tuple(held[name].shape))])
        if module.rotary is not None:
            module.rotary.to(device)
    connect(module, shard, group)
    narrow(module, model.weights)
    _HELD.update(model=module.eval().requires_grad_(False), shard=shard, device=device, dtype=model.dtype)
    room = free_bytes(device) // (1 if device.type == "cuda" else shard.num_ranks)
    return room, weight_bytes(module), num_parameters(module)


def _allocate(num_blocks: int, block_size: int, tiers: Several[TierBytes] = ()) -> None:
    module, shard, device = _HELD["model"], _HELD["shard"], _HELD["device"]
    settings = module.settings
    layers = shard.layers(settings.num_layers)
    dtype = _HELD["dtype"]
    cache = make_cache(settings, len(layers), num_blocks, block_size, dtype, device, shard.tp)
    _HELD["part"] = Part(module, cache, layers)
    _HELD["tiers"] = make_store(cache.data, tiers[shard.rank]) if tiers else None


def _ask_tiers(what: str, given: tuple[Any, ...], evicted: Several[tuple[int, bytes]]) -> Any:
    _evict(evicted)
    found = getattr(_HELD["tiers"], what)
    return found(*given) if callable(found) else found


def _evict(evicted: Several[tuple[int, bytes]]) -> None:
    for block, name in evicted:
        _HELD["tiers"].put(block, name)
        _HELD["tiers"].let_go(block)


@torch.inference_mode()
def _step(batches: Several[Inputs], evicted: Several[tuple[int, bytes]] = ()) -> Any:
    _evict(evicted)
    if _HELD["tiers"] is not None:
        _HELD["tiers"].fence()
        _HELD["tiers"].begin()
    part, shard, device = _HELD["part"], _HELD["shard"], _HELD["device"]
    size, made, seconds = shard.tp * shard.ep, [], 0.0
    waited = shard_waits.seconds
    for batch in batches:
        inputs = _on(batch, device)
        hidden = None
        if not part.is_first:
            shape = 1, len(batch.tokens), part.model.settings.width
            hidden = torch.empty(shape, dtype=_HELD["dtype"], device=device)
            dist.recv(hidden, shard.rank - size)
        begun = perf_counter()
        output = part(inputs, hidden)
        seconds += perf_counter() - begun
        if part.is_last:
            made.append(output)
        else:
            dist.send(output.contiguous(), shard.rank + size)
    # Return a NumPy array: torch would send a tensor through shared memory, whose file would have to be kept open.
    seconds = 0.0 if device.type == "cuda" else seconds - (shard_waits.seconds - waited)
    return torch.cat(made).float().cpu().numpy() if part.is_last and shard.inner == 0 else None, seconds


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _forget() -> None:
    _HELD.clear()


def _on(inputs: Inputs, device: torch.device) -> Inputs:
    if device.type == "cpu":
        return inputs
    moved = {name: getattr(inputs, name).to(device) for name in ("tokens", "positions", "slots", "tables", "wanted")}
    return replace(inputs, **moved)


def _is_hugging_face(source: str) -> bool:
    return (Path(source) / CONFIG).is_file()
