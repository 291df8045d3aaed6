"""Find what an engine will launch before its weights are loaded, by rehearsing its runner on the meta device.

Steps of every kind are run there as requests would cause them (`kernels/launch.py`): prompts short and long, alone,
behind a long prefix, and beside single tokens of others; and single tokens for every graph size. The kernels that they
launch are compiled while weights are read.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Several
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace

import torch

from shardwise.kernels.compile_ahead import begin_to_compile
from shardwise.kernels.launch import Gpu, Launch, Rehearsal, gpu_of
from shardwise.nets.settings import Settings
from shardwise.nets.transformer import Transformer
from shardwise.serving.decode_graphs import SIZES
from shardwise.serving.device_layers import can_be_launched
from shardwise.serving.device_runner import DeviceRunner
from shardwise.serving.kv_cache import make_cache
from shardwise.serving.limits import Limits
from shardwise.serving.narrow_weights import narrow
from shardwise.serving.request import Request, Sampling
from shardwise.serving.sequence import Piece, Sequence

#: Pieces of prompts: how many of the prompt's tokens come before the piece, and how many it has. The first one is the
#: likeliest to come first.
_PIECES = ((0, 100), (0, 12), (0, 24), (0, 300), (1000, 12), (1000, 100), (1000, 300))
_SINGLE = (200, 1)
#: Longer than any of the pieces.
_LENGTH = 2048


def begin_warm_up(settings: Settings, dtype: torch.dtype, limits: Limits, device: torch.device) -> "Future[int]":
    """Compile what an engine of such a model will launch, in the background."""
    return begin_to_compile(lambda: find_launches(settings, dtype, limits, gpu_of(device)), device)


def find_launches(settings: Settings, dtype: torch.dtype, limits: Limits, gpu: Gpu) -> Iterator[Launch]:
    """Yield all launches of the engine's runner on a GPU as they are found, those needed first at the beginning."""
    meta, size, settings = torch.device("meta"), limits.block_size, _few_layers(settings)
    with meta:
        model = Transformer(settings)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    narrow(model, limits.weights, is_rehearsed=True)
    cache = make_cache(settings, settings.num_layers, 1, size, dtype, meta)
    if not can_be_launched(model, cache):
        return
    _, max_running = limits.of_device(torch.device("cuda"))
    rehearsal, num_told = Rehearsal(gpu), 0
    runner = DeviceRunner(model, cache, max_running=max_running, max_length=_LENGTH, uses_graphs=False)
    for asked, top_k in _steps(max_running):
        pieces = [_piece(*each, size, top_k) for each in asked]
        # Code that branches on tensor values raises here: the meta device has no values.
        with rehearsal, suppress(NotImplementedError):
            runner.launch(pieces)
        for piece in pieces:
            piece.sequence.is_gone = True
        yield from list(rehearsal.launches.values())[num_told:]
        num_told = len(rehearsal.launches)


def _few_layers(settings: Settings) -> Settings:
    """Return settings with just enough layers for one of each kind, and one behind the first."""
    kinds = [(settings.is_windowed(each), settings.is_mixture(each)) for each in range(settings.num_layers)]
    count = max(kinds.index(kind) + 1 for kind in kinds)
    return replace(settings, num_layers=min(max(count, 2), settings.num_layers))


def _steps(max_running: int) -> Iterator[tuple[Several[tuple[int, int]], int]]:
    """Yield the pieces of each step, and its top-k (0 where all tokens are sampled from)."""
    yield _PIECES[:1], 0
    yield [_SINGLE], 0
    for piece in _PIECES:
        yield [piece], 0
        yield [_SINGLE, piece], 0
    for count in (*(each for each in SIZES if each < max_running), max_running):
        yield count * [_SINGLE], 0
    yield [_SINGLE], 10


def _piece(start: int, count: int, block_size: int, top_k: int) -> Piece:
    """Make a piece of a sequence with this many tokens; all of its blocks are block 0."""
    num_tokens = start + count
    request = Request(id="", prompt=(0,), sampling=Sampling(max_tokens=1, temperature=0.6, top_k=top_k))
    sequence = Sequence(
        request=request, arrival=0, seed=0, root=b"", tokens=[0] * num_tokens,
        blocks=[0] * (num_tokens // block_size + 1),
    )  # fmt: skip
    return Piece(sequence=sequence, start=start, count=count)
