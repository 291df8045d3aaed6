"""A model on one GPU: steps are launched without waiting, and tokens are sampled where the logits are.

one token each         a CUDA graph of the whole step, from the packed inputs to the sampled tokens
prompts beside them    graphs between attentions, up to a number of tokens; above it, the same kernels one by one
"""

from collections.abc import Sequence as Several
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shardwise.kernels.sampling import sample
from shardwise.nets.transformer import Transformer
from shardwise.serving.decode_graphs import DecodeGraphs
from shardwise.serving.device_layers import can_be_launched, make_layers
from shardwise.serving.kv_cache import Inputs, KVCache
from shardwise.serving.packing import Tables, Whole, has_cuts, pack_singles, packed_sampling_of, token_at
from shardwise.serving.runner import LocalRunner, Runner, wanted_of
from shardwise.serving.sequence import Piece


def make_runner(model: Transformer, cache: KVCache, *, max_running: int, max_length: int) -> Runner:
    """Make the runner for the cache's device: on a GPU one that does not wait, if the layers allow it."""
    device = model.embed.weight.device
    if device.type == "cuda" and can_be_launched(model, cache):
        return DeviceRunner(model, cache, max_running=max_running, max_length=max_length)
    return LocalRunner(model, cache)


@dataclass(frozen=True, slots=True)
class _Copied:
    """Tokens in transit to the host."""

    tokens: Tensor
    event: torch.cuda.Event | None

    def wait(self) -> list[int]:
        if self.event is not None:
            self.event.synchronize()
        found: list[int] = self.tokens.tolist()
        return found


class DeviceRunner:
    """The asynchronous runner of a GPU. `uses_graphs=False` and `kernels=False` are for comparison."""

    def __init__(
        self,
        model: Transformer,
        cache: KVCache,
        *,
        max_running: int,
        max_length: int,
        uses_graphs: bool = True,
        kernels: bool = True,
    ) -> None:
        self.device = model.embed.weight.device
        self._kernels = kernels
        self._layers = make_layers(
            model.eval(), cache, max_running=max_running, max_length=max_length, kernels=kernels,
            uses_graphs=uses_graphs and self.device.type == "cuda",
        )  # fmt: skip
        self._block_size = self._layers.block_size
        width = -(-max_length // self._block_size)
        self._tables = Tables(2 * max_running, width)
        self._drawn = torch.zeros(max_running, dtype=torch.int64, device=self.device)
        self._graphs = DecodeGraphs(
            self._layers.decode, self._drawn, num_rows=max_running, width=width, block_size=self._block_size,
            uses_graphs=uses_graphs, kernels=kernels,
        )  # fmt: skip

    @torch.inference_mode()
    def launch(self, pieces: Several[Piece]) -> _Copied:
        last = [piece.sequence for piece in pieces if piece.is_last]
        if len(last) == len(pieces) and all(piece.count == 1 for piece in pieces):
            self._graphs.run(self._to_device(self._pack(pieces)), len(pieces), has_cuts=has_cuts(last))
        elif last:
            logits = self._mixed(pieces)
            told = np.array([(*packed_sampling_of(each), len(each.tokens)) for each in last], np.int32)
            keys, floats = self._to_device(told), self._to_device(told[:, [2, 4, 5]]).view(torch.float32)
            tokens, _ = sample(
                logits, floats[:, 0], keys[:, 3], floats[:, 1], floats[:, 2], keys[:, :2], keys[:, 6],
                has_cuts=has_cuts(last), kernels=self._kernels,
            )  # fmt: skip
            self._drawn[: len(last)].copy_(tokens)
        else:
            self._mixed(pieces)
        return self._copy(len(last))

    @torch.inference_mode()
    def logits(self, pieces: Several[Piece]) -> Tensor:
        if all(piece.count == 1 and len(wanted_of(piece)) == 1 for piece in pieces):
            return self._graphs.run(self._to_device(self._pack(pieces)), len(pieces), has_cuts=False)
        return self._mixed(pieces)

    @torch.inference_mode()
    def run(self, inputs: Inputs) -> Tensor:
        """Run prepared inputs, one kernel after another."""
        return self._layers.mixed(inputs, in_pieces=False)

    def check(self) -> None: ...

    def recover(self) -> None: ...

    def close(self) -> None:
        """Release weights, cache and graphs, so that their memory is free even if the engine is still referenced."""
        for name in ("_layers", "_graphs"):
            vars(self).pop(name, None)

    def _pack(self, pieces: Several[Piece]) -> Whole:
        return pack_singles(pieces, self._tables, self._block_size)

    def _mixed(self, pieces: Several[Piece]) -> Tensor:
        """Compute any number of tokens of each sequence, those with a single token first."""
        size, starts, lengths = self._block_size, [0], []
        tokens: list[int] = []
        wanted: list[int] = []
        for piece in pieces:
            end = piece.start + piece.count
            tokens += piece.sequence.tokens[piece.start : end]
            if tokens[-1] < 0:
                tokens[-1] = token_at(piece.sequence, end - 1)
            wanted += wanted_of(piece, starts[-1])
            starts.append(len(tokens))
            lengths.append(end)
        positions = np.concatenate([np.arange(piece.start, piece.start + piece.count) for piece in pieces])
        width = max(lengths) // size + 1
        rows = self._tables.rows[[self._tables.row_of(piece.sequence) for piece in pieces]][:, :width]
        of_token = np.repeat(np.arange(len(pieces)), np.diff(starts))
        slots = rows[of_token, positions // size] * size + positions % size
        given = self._to_device(np.concatenate([tokens, positions, slots, wanted, rows.ravel()]).astype(np.int32))
        count, num_wanted = len(tokens), len(wanted)
        on_device, places, where = given[: 3 * count].view(3, count)
        chosen = given[3 * count : 3 * count + num_wanted]
        tables = given[3 * count + num_wanted :].view(rows.shape)
        known = torch.where(on_device < 0, self._drawn[(-1 - on_device).clamp(min=0)].int(), on_device)
        inputs = Inputs(
            tokens=known, positions=places, slots=where, tables=tables, lengths=lengths, starts=starts, wanted=chosen
        )
        return self._layers.mixed(inputs, in_pieces=True)

    def _to_device(self, numbers: Whole) -> Tensor:
        given = torch.from_numpy(np.ascontiguousarray(numbers))
        if self.device.type != "cuda":
            return given.to(self.device)
        # The pool of pinned memory does not reuse a buffer before its copy is over.
        return given.pin_memory().to(self.device, non_blocking=True)

    def _copy(self, count: int) -> _Copied:
        if self.device.type != "cuda":
            return _Copied(self._drawn[:count].clone(), None)
        tokens = torch.empty(count, dtype=torch.int64, device="cpu", pin_memory=True)
        tokens.copy_(self._drawn[:count], non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return _Copied(tokens, event)
