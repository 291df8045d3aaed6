"""Which layers are cut, and where: from the labels of one run to the channels that each rank holds.

A region begins with columns, whose outputs are sharded, and ends with rows, which read them:

    columns q, k, v ── attention ── row out             its parts are heads
    columns gate, up ── product ── row down             its parts are channels

Parts are assigned to ranks in order, as evenly as their number allows. If there are fewer parts than ranks because
queries share a key head, the queries of one part are split further, and each of its ranks has a copy of the key head.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np
from numpy.typing import NDArray
from torch import nn

from shardwise.errors import ShardwiseError
from shardwise.sharding.tensor.channel_groups import ChannelTrace
from shardwise.sharding.tensor.channel_labels import Labels
from shardwise.sharding.tensor.sharding import Runs, runs_of, starred

#: Which integers stored by a module with heads are scaled to one rank: those with known names; also any equal to the
#: number of heads; also any equal to the width of all heads; or none. A trial verifies each guess.
GUESSES = ("names", "heads", "widths", "none")

#: In a remedy, before the way of those who can name layers: recipes cannot.
OR_WHOLE = ", or the layer whole on every rank: "

#: Repeats the run with labels only for this many of the first channels of these layers.
Again = Callable[[Mapping[str, int]], ChannelTrace]


class _Owners:
    """The rank of each part."""

    def __init__(self, shares: Sequence[Labels]) -> None:
        """`shares` has the parts of each rank."""
        parts = np.concatenate(shares)
        order = np.argsort(parts)
        self._parts = parts[order]
        self._ranks = np.repeat(np.arange(len(shares)), [len(some) for some in shares])[order]

    def of(self, parts: Labels) -> Labels:
        """Return the rank of each part, -1 for those without one."""
        places = np.searchsorted(self._parts, parts).clip(max=len(self._parts) - 1)
        return np.where(self._parts[places] == parts, self._ranks[places], -1)


@dataclass(kw_only=True)
class Region:
    """Layers that are cut together, with the channels of each rank: outputs for columns, inputs for rows."""

    columns: dict[str, tuple[Runs, ...]]
    rows: dict[str, tuple[Runs, ...]]
    #: For each rank, as (count, total): its share of the fine pieces (queries, channels) and of parts (key heads).
    fine: tuple[tuple[int, int], ...]
    coarse: tuple[tuple[int, int], ...]
    #: Parameters used between columns and rows, whole on every rank: each rank's gradient is a partial sum.
    inside: set[str] = field(default_factory=set)
    #: Parameters used there that have elements for each part: the dim that is cut, and the indices of each rank.
    cut_inside: dict[str, tuple[int, tuple[Runs, ...]]] = field(default_factory=dict)
    #: The rank of each part, if each is on one rank.
    owners: _Owners | None = None
    draws: bool = False
    #: Which integers stored by a module are scaled to this rank's heads: an entry of `GUESSES`.
    guess: str = "names"

    @property
    def kind(self) -> str:
        """The names of its rows with stars for numbers, equal for the same region of all blocks."""
        return ", ".join(map(starred, self.rows))


@dataclass(kw_only=True)
class Found:
    """The regions of a module, its output heads, and why other layers stay whole."""

    regions: list[Region] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    whole: dict[str, str] = field(default_factory=dict)
    #: Whole layers that could not be cut for a reason of their own, rather than for lack of a row that reads them.
    kept: set[str] = field(default_factory=set)
    #: Modules whose parameters are experts' matrices, which are cut inside each expert.
    experts: list[str] = field(default_factory=list)

    def within(self, modules: Collection[str]) -> "Found":
        """Restrict this to a copy that has only these modules."""
        regions = [
            replace(
                region,
                columns={name: runs for name, runs in region.columns.items() if name in modules},
                rows={name: runs for name, runs in region.rows.items() if name in modules},
                inside={name for name in region.inside if name.rpartition(".")[0] in modules},
                cut_inside={key: each for key, each in region.cut_inside.items() if key.rpartition(".")[0] in modules},
            )
            for region in self.regions
        ]
        return replace(
            self,
            regions=[region for region in regions if region.columns and region.rows],
            experts=[name for name in self.experts if name in modules],
        )


class _Seen:
    """A run with the parts (joined labels) of every layer looked up once."""

    def __init__(self, trace: ChannelTrace) -> None:
        self.trace, self.layers = trace, trace.layers
        roots = trace.groups.roots
        self.outputs = {
            name: roots(np.arange(each.first, each.first + each.width)) for name, each in trace.layers.items()
        }
        self.reads = {name: roots(each.read[0]) for name, each in trace.layers.items() if each.read}
        self.returned = [roots(labels) for labels in trace.returned]
        self.makers = _Places(self.outputs)
        self.readers = _Places(self.reads)
        #: Parameters, and the parts that they are used on.
        self.used = _Places({name: roots(np.concatenate(each)) for name, each in trace.used_on.items()})


class _Places:
    """The names of what each part appears in."""

    def __init__(self, labels: Mapping[str, Labels]) -> None:
        self._names = list(labels)
        parts = [np.unique(each) for each in labels.values()]
        joined = np.concatenate([*parts, np.empty(0, dtype=np.int64)])
        order = np.argsort(joined, kind="stable")
        self._parts = joined[order]
        self._owners = np.repeat(np.arange(len(parts)), [len(each) for each in parts])[order]

    def of(self, parts: Labels) -> list[str]:
        """Return the names with any of these parts, in the order of the parts."""
        first, last = (np.searchsorted(self._parts, parts, side) for side in ("left", "right"))
        counts = last - first
        found = np.repeat(first - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
        return [self._names[each] for each in _in_order(self._owners[found]).tolist()]


@dataclass(kw_only=True)
class _Sketch:
    """A region before its parts are assigned to ranks. `parts` is in the order in which the first row reads them."""

    columns: list[str]
    rows: list[str]
    parts: NDArray[np.int64]


def find_regions(
    trace: ChannelTrace, again: Again, num_ranks: int, *, rows: Iterable[str] | None = None, heads: Iterable[str] = (),
    vocabularies: Collection[int] = (),
) -> Found:  # fmt: skip
    """Find the layers to cut. `rows`, if given, are the only layers that may be rows; `heads` are heads in any case.

    `vocabularies` are the sizes of embeddings that stay whole themselves.
    """
    seen = _Seen(trace)
    found = Found(heads=list(dict.fromkeys([*_heads(seen, vocabularies), *heads])))
    taken = {*found.heads, *_embeddings(seen, found.heads)}
    few: list[_Sketch] = []
    allowed = None if rows is None else set(rows)
    for name in seen.reads:
        sketch = None
        if name not in taken and (allowed is None or name in allowed):
            sketch = _sketch(seen, name, taken, found.whole)
        if sketch is not None and len(sketch.parts) >= num_ranks:
            found.regions.append(_spread(seen, sketch, num_ranks))
            taken |= {*sketch.columns, *sketch.rows}
        elif sketch is not None:
            few.append(sketch)
    _add_shared(seen, again, few, num_ranks, found, taken)
    for name, layer in seen.layers.items():
        if name not in taken and not isinstance(layer.module, nn.Embedding):
            found.whole.setdefault(name, _why_whole(seen, name))
    for region in found.regions:
        _note_inside(seen, region)
    found.whole = {name: why for name, why in found.whole.items() if name not in taken}
    return found


def _embeddings(seen: _Seen, heads: Iterable[str]) -> list[str]:
    """Return embeddings with as many words as an output head. They are sharded by words only."""
    words = {seen.layers[name].width for name in heads if name in seen.layers}
    embeddings = {name: each.module for name, each in seen.layers.items() if isinstance(each.module, nn.Embedding)}
    return [name for name, each in embeddings.items() if each.num_embeddings in words]


def _heads(seen: _Seen, others: Collection[int]) -> list[str]:
    """Return output heads: layers whose outputs the module returns unchanged, one for each row of an embedding."""
    vocabularies = {
        each.module.weight.shape[0] for each in seen.layers.values() if isinstance(each.module, nn.Embedding)
    } | set(others)
    return [
        name
        for name, layer in seen.layers.items()
        if isinstance(layer.module, nn.Linear)
        and layer.width in vocabularies
        and len(np.unique(seen.outputs[name])) == layer.width
        and any(np.array_equal(labels, seen.outputs[name]) for labels in seen.returned)
    ]


def _in_order(labels: Labels) -> Labels:
    """Return each label once, in order of first occurrence."""
    found, first = np.unique(labels, return_index=True)
    return found[np.argsort(first)]


def _sketch(seen: _Seen, name: str, taken: set[str], whole: dict[str, str]) -> _Sketch | None:
    """Return the region that ends with this row; None if there is none."""
    read = seen.reads[name]
    if (read < 0).any():
        return None  # Some input channel has no label: no layer that could be cut with this one produces it.
    parts = _in_order(read)
    columns, rows = seen.makers.of(parts), seen.readers.of(parts)
    if set(columns) & set(rows) or taken & {*columns, *rows} or not columns:
        return None
    # A group that is cut must be cut in all layers that produce or read it, and appear nowhere else.
    for each in rows:
        if not np.isin(seen.reads[each], parts).all():
            whole.setdefault(name, f"{each} reads what it reads, and something else")
            return None
    for each in columns:
        if not np.isin(seen.outputs[each], parts).all():
            whole.setdefault(each, f"some of its channels do not reach {name}")
            return None
    if any(np.isin(labels, parts).any() for labels in seen.returned):
        whole.setdefault(name, "what it reads is also returned by the module")
        return None
    return _Sketch(columns=columns, rows=rows, parts=parts)


def _spread(seen: _Seen, sketch: _Sketch, num_ranks: int) -> Region:
    """Assign parts to ranks, in order."""
    shares = np.array_split(sketch.parts, num_ranks)
    owners = _Owners(shares)
    held = tuple((len(some), len(sketch.parts)) for some in shares)
    return Region(
        columns={name: _runs(seen.outputs[name], owners, num_ranks) for name in sketch.columns},
        rows={name: _runs(seen.reads[name], owners, num_ranks) for name in sketch.rows},
        fine=held,
        coarse=held,
        owners=owners,
    )


def _runs(labels: Labels, owners: _Owners, num_ranks: int) -> tuple[Runs, ...]:
    of = owners.of(labels)
    return tuple(runs_of(np.flatnonzero(of == rank)) for rank in range(num_ranks))


def _add_shared(seen: _Seen, again: Again, few: list[_Sketch], num_ranks: int, found: Found, taken: set[str]) -> None:
    """Add regions with fewer parts than ranks, after another run with labels for queries only."""
    labelled: dict[str, int] = {}
    for sketch in few:
        width = len(seen.reads[sketch.rows[0]])
        labelled |= {name: width for name in sketch.columns if seen.layers[name].width >= width}
    finer = _Seen(again(labelled)) if labelled else seen
    for sketch in few:
        if taken & {*sketch.columns, *sketch.rows}:
            continue
        read = finer.reads.get(sketch.rows[0])
        count = 0 if read is None or (read < 0).any() else len(np.unique(read))
        region = None
        if read is not None and count >= num_ranks and len(sketch.rows) == 1:
            region = _spread_shared(seen, finer, sketch, num_ranks)
        if region is not None:
            found.regions.append(region)
            taken |= {*sketch.columns, *sketch.rows}
        elif max(count, len(sketch.parts)) > 1:
            most, row = max(count, len(sketch.parts)), sketch.rows[0]
            raise ShardwiseError(
                f"{', '.join(sketch.columns)} and {row} can be split into {most} pieces (heads or channels), fewer than"
                f" tp={num_ranks}",
                remedy=f'tp={most}{OR_WHOLE}tensor={{"{row}": "whole"}}',
            )
        else:
            for name in sketch.columns:
                found.whole.setdefault(name, f"its channels are mixed before {sketch.rows[0]} reads them")


def _spread_shared(seen: _Seen, finer: _Seen, sketch: _Sketch, num_ranks: int) -> Region | None:
    """Assign ranks to parts, and the fine pieces of each part to its ranks. A rank has pieces of one part only."""
    row = sketch.rows[0]
    read, coarse = finer.reads[row], seen.reads[row]
    shares: list[Labels] = []
    part_of: list[int] = []
    for part, ranks in zip(sketch.parts.tolist(), np.array_split(np.arange(num_ranks), len(sketch.parts)), strict=True):
        pieces = _in_order(read[coarse == part])
        if len(pieces) < len(ranks):
            return None
        shares += np.array_split(pieces, len(ranks))
        part_of += [part] * len(ranks)
    owners, columns = _Owners(shares), {}
    for name in sketch.columns:
        # A channel that belongs to no query goes to every rank of its part.
        of = owners.of(finer.outputs[name])
        columns[name] = tuple(
            runs_of(np.flatnonzero((of == rank) | ((of < 0) & (seen.outputs[name] == part_of[rank]))))
            for rank in range(num_ranks)
        )
    count = sum(len(some) for some in shares)
    return Region(
        columns=columns,
        rows={row: _runs(read, owners, num_ranks)},
        fine=tuple((len(some), count) for some in shares),
        coarse=((1, len(sketch.parts)),) * num_ranks,
    )


def _why_whole(seen: _Seen, name: str) -> str:
    drawn = np.concatenate([*seen.trace.drawn_for_all, np.empty(0, dtype=np.int64)])
    if np.isin(seen.outputs[name], seen.trace.groups.roots(drawn)).any():
        return "what is drawn at random is the same for all of its channels, as of a row or a token"
    return "no other layer reads its channels one by one"


def _note_inside(seen: _Seen, region: Region) -> None:
    """Record the parameters used, and whether random numbers are drawn, between the columns and the rows."""
    roots = seen.trace.groups.roots
    parts = np.unique(np.concatenate([seen.outputs[name] for name in region.columns]))
    region.inside = set(seen.used.of(parts))
    for name in region.inside:
        owners = _owners_of(seen, region, name)
        if owners is not None:
            region.cut_inside[name] = owners
    region.inside -= region.cut_inside.keys()
    region.draws = any(np.isin(roots(drawn), parts).any() for drawn in seen.trace.drawn_at)


def _owners_of(seen: _Seen, region: Region, name: str) -> tuple[int, tuple[Runs, ...]] | None:
    """Return the dim along which each index of a parameter belongs to one rank, and the indices of every rank."""
    shape = seen.trace.parameters.shapes[name]
    met = seen.trace.parameters.met.get(name, ())
    if region.owners is None or not met:
        return None
    places = np.concatenate([places for places, _ in met])
    owners = region.owners.of(seen.trace.groups.roots(np.concatenate([labels for _, labels in met])))
    ranks = np.full(prod(shape), -1)
    ranks[places] = owners
    if (ranks < 0).any() or (ranks[places] != owners).any():
        return None
    ranks, count = ranks.reshape(shape), len(region.fine)
    for dim in range(len(shape)):
        along = np.moveaxis(ranks, dim, 0).reshape(shape[dim], -1)
        if len(np.unique(ranks)) > 1 and (along == along[:, :1]).all():
            return dim, tuple(runs_of(np.flatnonzero(along[:, 0] == rank)) for rank in range(count))
    return None
