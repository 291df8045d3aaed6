"""Layouts of a step, many at once: one array for each axis and choice, one entry for each candidate."""

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.cost.numbers import Floats, Ints

RECOMPUTE = ("none", "selective", "full")
#: How attention reaches the rest of a sequence, and which axis is outermost on the devices.
CONTEXT = ("ring", "all-to-all")
ORDERS = ("pp-dp-cp-tp", "dp-pp-cp-tp")
#: Layers over stages: as many on each; embedding and head counted as a layer each; by the seconds that each takes; and
#: the same over ranks, whose chunks need not be equal; whole layers, with embedding, norm and head as one each and one
#: more on the first stages where it does not divide; and whole layers, as many as the fullest must have from the first
#: stage on.
BALANCE = ("even", "ends", "weight", "ranks", "slots", "front")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layouts:
    """How each candidate spreads one step.

    `dp x tp x pp x cp` ranks; experts are spread over `ep` of the `dp x cp x tp` ranks that share a stage. `microbatch`
    samples make a microbatch, `num_microbatches` of them a step of one replica. `chunks` are stages on a rank.
    `zero` is the ZeRO stage and `zero_group` the ranks that one copy of the states is spread over (0: all replicas).
    `recompute` counts as in `RECOMPUTE`, for `recompute_share` of the layers. `schedule` is an index into
    `pipeline.SCHEDULES`. `balance` says how layers are dealt out, as in `BALANCE`, `context` and `order` count as in
    `CONTEXT` and `ORDERS`. `offload_*` are shares that live on the host.
    """

    dp: Ints
    tp: Ints
    pp: Ints
    cp: Ints
    ep: Ints
    chunks: Ints
    microbatch: Ints
    num_microbatches: Ints
    zero: Ints
    zero_group: Ints
    recompute: Ints
    sequence_parallel: NDArray[np.bool_]
    schedule: Ints
    balance: Ints
    context: Ints
    order: Ints
    recompute_share: Floats
    offload_optimizer: Floats
    offload_parameters: Floats
    offload_activations: Floats

    @staticmethod
    def of(**columns: Any) -> "Layouts":
        """Layouts from columns: numbers or sequences that broadcast. What is not given is as on one plain device."""
        usual: dict[str, Any] = {
            **dict.fromkeys(("dp", "tp", "pp", "cp", "ep", "chunks", "microbatch", "num_microbatches"), np.int64(1)),
            **dict.fromkeys(("zero", "zero_group", "recompute", "schedule", "balance"), np.int64(0)),
            **dict.fromkeys(("context", "order"), np.int64(0)),
            "recompute_share": np.float64(1),
            **dict.fromkeys(("sequence_parallel",), np.bool_(False)),
            **dict.fromkeys(("offload_optimizer", "offload_parameters", "offload_activations"), np.float64(0)),
        }
        strangers = set(columns) - set(usual)
        assert not strangers, f"layouts have no column {strangers}"
        names = [field.name for field in fields(Layouts)]
        arrays = [np.asarray(columns.get(name, usual[name]), dtype=usual[name].dtype) for name in names]
        return Layouts(**dict(zip(names, np.broadcast_arrays(*map(np.atleast_1d, arrays)), strict=True)))

    def __len__(self) -> int:
        return len(self.dp)

    @property
    def num_ranks(self) -> Ints:
        return self.dp * self.tp * self.pp * self.cp

    @property
    def replicas(self) -> Ints:
        """Ranks with the same dense weights."""
        return self.dp * self.cp

    @property
    def num_sharing(self) -> Ints:
        """Ranks that one copy of the states is spread over, where ZeRO does."""
        return np.where(self.zero_group > 0, self.zero_group, self.replicas)

    @property
    def batch(self) -> Ints:
        """Samples of a step."""
        return self.dp * self.microbatch * self.num_microbatches

    def distinct(self, names: tuple[str, ...]) -> tuple["Layouts", Ints]:
        """One candidate of each kind that differs in these columns, and of every candidate which kind it is.

        What depends on few columns is computed once for each kind.
        """
        codes = np.zeros(len(self), dtype=np.int64)
        for name in names:
            values, inverse = np.unique(getattr(self, name), return_inverse=True)
            codes = codes * len(values) + inverse
        _, chosen, kinds = np.unique(codes, return_index=True, return_inverse=True)
        return self.take(chosen), kinds

    def take(self, index: Any) -> "Layouts":
        """Some of the candidates."""
        return Layouts(**{field.name: getattr(self, field.name)[index] for field in fields(Layouts)})
