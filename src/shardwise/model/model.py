"""The model: blocks in order, each a list of operations and parameters. A description; it holds no tensors.

    Model ── blocks ──┬─ Block "embedding"      operations, parameters
                      ├─ Block "layer"    ┐
                      ├─ Block "layer"    │ one object, as often as the model has such layers
                      ├─ ...              ┘
                      └─ Block "head"

Equal blocks are one object. `Model.kinds` gives each kind once with its count, so that a model is priced by kind and
multiplied. The methods of a block that count its costs take a `Share`: how much of the block one rank computes. The
same counts for single operations are in `flops.py`, `traffic.py` and `activations.py`.
"""

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from math import prod
from typing import Any, Literal

from shardwise.model.activations import held_for_weights_bytes, saved_bytes
from shardwise.model.flops import Passes, add_passes, rerun_flops, sum_flops, width_on
from shardwise.model.operations import Matmul, Operation, Width
from shardwise.model.share import Count, Share, divided, total
from shardwise.model.traffic import Traffic, sum_traffic
from shardwise.units import format_bytes, format_flops


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter tensor, with its name in the module (in a repeated block: relative to the block's name).

    Tensor parallelism cuts dimension `tp_dim` (None: each rank has the whole tensor). `pieces` are the parts along
    this dimension, each of which is cut separately: the heads of queries, keys and values. Expert parallelism cuts
    dimension `ep_dim`. A tensor with an `ep_dim` belongs to experts; `Share.expert_tp` cuts it instead of `Share.tp`.
    """

    name: str
    shape: tuple[int, ...]
    role: Literal["weight", "bias", "norm", "embedding", "router", "other"] = "weight"
    tp_dim: int | None = None
    pieces: tuple[Width, ...] = ()
    ep_dim: int | None = None
    trains: bool = True

    @property
    def count(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def is_expert(self) -> bool:
        return self.ep_dim is not None

    def count_on(self, share: Share) -> Count:
        """Return the number of elements on one rank."""
        count: Count = self.count
        if self.ep_dim is not None:
            experts = self.shape[self.ep_dim]
            count = count // experts * divided(experts, share.ep)
        if self.tp_dim is not None:
            along = self.pieces or (Width(self.shape[self.tp_dim]),)
            ranks = share.expert_tp if self.is_expert else share.tp
            count = count // self.shape[self.tp_dim] * total(width_on(width, ranks) for width in along)
        return count


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """The state of past positions that one block keeps while decoding.

    `elements` are kept for each position, cut over tp in `units` (None: not cut, as with multi-head latent attention),
    for at most `window` positions. `state_elements` are kept once for each sample, whatever its length.
    """

    elements: int
    units: int | None = None
    window: int | None = None
    state_elements: int = 0

    def elements_on(self, share: Share) -> Count:
        """Return the elements of one position on one rank."""
        return self.elements if self.units is None else self.elements // self.units * divided(self.units, share.tp)


@dataclass(frozen=True, eq=False, kw_only=True)
class Block:
    """A piece of the model that a pipeline does not cut: an embedding, a layer, the head.

    `kind` names it: two blocks of a model with the same kind are one object. `stack` is the module's list of layers
    that contains the block (`model.layers`); its parameters' names are then relative to `model.layers.7`. A block that
    occurs once has no stack. Each row has `input_elements` from the previous block and `output_elements` for the next.
    A sample has `rows` rows (None: the positions of the sequence). `num_reductions` counts the reductions over tp ranks
    in a forward: two in a usual layer, one if attention and MLP run in parallel. `cache` is the state of decoding.
    """

    kind: str
    operations: tuple[Operation, ...]
    parameters: tuple[Parameter, ...]
    input_elements: int
    output_elements: int
    rows: int | None = None
    stack: str = ""
    num_reductions: int = 0
    cache: Cache | None = None

    @cached_property
    def num_parameters(self) -> int:
        """Number of parameters, including tied ones."""
        return sum(parameter.count for parameter in self.parameters)

    @cached_property
    def num_idle_parameters(self) -> int:
        """Number of parameters of the experts that do not receive a given token."""
        experts = {each.num_experts: each.top_k for each in self.operations if isinstance(each, Matmul)}
        idle = 0
        for parameter in self.parameters:
            if parameter.ep_dim is not None:
                num_experts = parameter.shape[parameter.ep_dim]
                idle += parameter.count // num_experts * (num_experts - experts[num_experts])
        return idle

    def num_parameters_on(self, share: Share, *, trained: bool = False) -> Count:
        """Return the number of parameters on one rank; with `trained`, only of those that train."""
        return total(each.count_on(share) for each in self.parameters if each.trains or not trained)

    def num_expert_parameters_on(self, share: Share, *, trained: bool = False) -> Count:
        """Return the same for parameters of experts only: their gradients are summed over fewer ranks."""
        return total(
            each.count_on(share) for each in self.parameters if each.is_expert and (each.trains or not trained)
        )

    def flops(self, share: Share) -> Passes:
        """Return the FLOPs of one microbatch on one rank: forward, input gradient, weight gradient."""
        return sum_flops(self.operations, share)

    def rerun_flops(self, share: Share, recompute: str | Collection[str]) -> Count:
        """Return the FLOPs that recomputation adds to the backward."""
        return rerun_flops(self.operations, share, recompute)

    def traffic(self, share: Share) -> Traffic:
        """Return the bytes that the block's kernels read and write for one microbatch on one rank."""
        return sum_traffic(self.operations, share)

    def input_bytes(self, share: Share) -> Count:
        """Return the bytes of the block's input, which full recomputation saves."""
        return divided(share.num_rows(self.rows) * self.input_elements, share.outside) * share.width

    def output_bytes(self, share: Share) -> Count:
        """Return the bytes of the block's output, which a pipeline sends."""
        return divided(share.num_rows(self.rows) * self.output_elements, share.outside) * share.width

    def saved_bytes(self, share: Share, recompute: str | Collection[str] = "none") -> Count:
        """Return the bytes saved for the backward. `recompute`: `none`, `selective`, `full`, or the names of parts."""
        if recompute == "full":
            return self.input_bytes(share)
        return saved_bytes(self.operations, share, recompute)

    def held_for_weights_bytes(self, share: Share) -> Count:
        """Return the bytes held between input gradient and weight gradient if a schedule separates the two."""
        return held_for_weights_bytes(self.operations, share)

    def cache_bytes(self, share: Share) -> Count:
        """Return the bytes of the KV cache for one position on one rank."""
        return 0 if self.cache is None else self.cache.elements_on(share) * share.width


@dataclass(frozen=True, eq=False, kw_only=True)
class Model:
    """The computation, as blocks in order.

    `ties` are groups of parameters, by full name, that are one tensor; the first name of a group owns it. `hidden` is
    the width between layers. `max_sequence` is the longest sequence that position embeddings allow (None: any).
    `sequence` is the only length for which the numbers hold (a traced module, an image model's patches), or None.
    """

    name: str
    family: str
    blocks: tuple[Block, ...]
    ties: tuple[tuple[str, ...], ...] = ()
    hidden: int
    vocabulary: int = 0
    max_sequence: int | None = None
    sequence: int | None = None

    @cached_property
    def kinds(self) -> tuple[tuple[Block, int], ...]:
        """Each distinct block with its number of occurrences, in order of first occurrence."""
        counts = Counter(block.kind for block in self.blocks)
        first = {block.kind: block for block in reversed(self.blocks)}
        return tuple((first[kind], count) for kind, count in counts.items())

    @cached_property
    def num_layers(self) -> int:
        """Number of blocks that belong to a stack."""
        return sum(bool(block.stack) for block in self.blocks)

    @cached_property
    def layer_order(self) -> tuple[int, ...]:
        """The kind of each layer, from first to last, as an index among the kinds of layers."""
        numbers = {block.kind: number for number, (block, _) in enumerate(each for each in self.kinds if each[0].stack)}
        return tuple(numbers[block.kind] for block in self.blocks if block.stack)

    @cached_property
    def block_names(self) -> tuple[str, ...]:
        """The path of each block in the module: `model.layers.7`, or the kind of a block without a stack."""
        seen: Counter[str] = Counter()
        names = []
        for block in self.blocks:
            names.append(f"{block.stack}.{seen[block.stack]}" if block.stack else block.kind)
            seen[block.stack] += 1
        return tuple(names)

    def parameters(self) -> Iterator[tuple[int, str, Parameter]]:
        """Yield every parameter with its block's index and its full name. A tied one is yielded for each use."""
        for index, (block, name) in enumerate(zip(self.blocks, self.block_names, strict=True)):
            prefix = f"{name}." if block.stack else ""
            for parameter in block.parameters:
                yield index, prefix + parameter.name, parameter

    @cached_property
    def num_parameters(self) -> int:
        """Number of parameters, with tied ones counted once."""
        again = {name for tie in self.ties for name in tie[1:]}
        tied = sum(parameter.count for _, name, parameter in self.parameters() if name in again) if again else 0
        return sum(block.num_parameters * count for block, count in self.kinds) - tied

    @cached_property
    def is_partly_frozen(self) -> bool:
        """Whether some of its parameters have no gradients and no optimizer state."""
        return any(not each.trains for block, _ in self.kinds for each in block.parameters)

    @cached_property
    def num_active_parameters(self) -> int:
        """Number of parameters that one token uses: of the experts, only those that receive it."""
        return self.num_parameters - sum(block.num_idle_parameters * count for block, count in self.kinds)

    def flops(self, share: Share) -> Passes:
        """Return the FLOPs of all blocks, without recomputation: forward, input gradient, weight gradient."""
        return add_passes(sum_flops(block.operations, share).times(count) for block, count in self.kinds)

    def cache_bytes(self, share: Share) -> Count:
        """Return the bytes of the KV cache for one position, in all blocks."""
        return total(block.cache_bytes(share) * count for block, count in self.kinds)

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    def to_dict(self) -> dict[str, Any]:
        """Return plain data: the model's facts, and each kind of block with its count, parameters and operations."""
        facts = ("name", "family", "hidden", "vocabulary", "max_sequence", "sequence", "num_layers")
        return {
            **{fact: getattr(self, fact) for fact in facts},
            "num_parameters": self.num_parameters,
            "num_active_parameters": self.num_active_parameters,
            "ties": [list(tie) for tie in self.ties],
            "blocks": [_block_data(block, count) for block, count in self.kinds],
        }


def _block_data(block: Block, count: int) -> dict[str, Any]:
    return {
        "kind": block.kind,
        "count": count,
        "stack": block.stack,
        "num_parameters": block.num_parameters,
        "parameters": [asdict(parameter) for parameter in block.parameters],
        "operations": [{"type": type(each).__name__.lower(), **asdict(each)} for each in block.operations],
    }


def _lines(model: Model) -> Iterator[str]:
    """Yield the lines of a table: each kind of block, and its costs for one sequence."""
    share = Share(sequence=model.sequence or min(model.max_sequence or 2048, 2048))
    active = model.num_active_parameters
    some = f", {active / 1e9:.3f} B active" if active != model.num_parameters else ""
    yield f"{model.name}: {model.num_parameters:,} parameters{some}; at sequence {share.sequence}, one sequence:"
    yield f"{'block':24} {'count':>5} {'parameters':>16} {'forward':>12} {'backward':>12} {'saved':>10}"
    for block, count in model.kinds:
        flops = block.flops(share)
        forward, backward = format_flops(int(flops.forward)), format_flops(int(flops.backward))
        saved = format_bytes(int(block.saved_bytes(share)))
        yield f"{block.kind:24} {count:>5} {block.num_parameters:>16,} {forward:>12} {backward:>12} {saved:>10}"
