"""Many candidate layouts of a step at once: one array for each axis and choice, with one entry for each candidate."""

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.cost.numbers import Floats, Ints

RECOMPUTE = ("none", "selective", "full")
#: How context parallel attention communicates; and the order of the axes on the devices, outermost first.
CONTEXT = ("ring", "all-to-all")
ORDERS = ("pp-dp-cp-tp", "dp-pp-cp-tp")
#: How layers are distributed over stages. `even`: equal numbers. `ends`: embedding and head count as a layer each.
#: `weight`: by seconds. `ranks`: by seconds over ranks, whose chunks need not be equal. `slots`: whole layers, where
#: embedding, norm and head count as one each, and the first stages have one more if the number does not divide.
#: `front`: whole layers, as many as the fullest stage must have on every stage, and the rest on the last.
BALANCE = ("even", "ends", "weight", "ranks", "slots", "front")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layouts:
    """How each candidate distributes one step.

    It has `dp x tp x pp x cp` ranks. Experts are spread over `ep` of the `dp x cp x tp` ranks that share a stage. A
    microbatch has `microbatch` samples, and a step of one replica has `num_microbatches`. A rank has `chunks` stages.
    `zero` is the ZeRO stage, and `zero_group` the number of ranks over which states are sharded (0: all replicas).
    `recompute` is an index into `RECOMPUTE`, for `recompute_share` of the layers. `schedule` is an index into
    `pipeline.SCHEDULES`; `balance`, `context` and `order` are indices into `BALANCE`, `CONTEXT` and `ORDERS`.
    `offload_*` are shares on the host.
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
        """Make layouts from columns: numbers or sequences that broadcast. Defaults are those of one plain device."""
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
        """Number of ranks with the same dense weights."""
        return self.dp * self.cp

    @property
    def num_sharing(self) -> Ints:
        """Number of ranks over which ZeRO shards one copy of the states."""
        return np.where(self.zero_group > 0, self.zero_group, self.replicas)

    @property
    def batch(self) -> Ints:
        """Number of samples in a step."""
        return self.dp * self.microbatch * self.num_microbatches

    def distinct(self, names: tuple[str, ...]) -> tuple["Layouts", Ints]:
        """Return one candidate for each distinct combination of these columns, and the combination of every candidate.

        Values that depend on few columns are computed once for each combination.
        """
        codes = np.zeros(len(self), dtype=np.int64)
        for name in names:
            column = getattr(self, name)
            if (column == column[:1]).all():
                continue  # One value, as most columns of a small block have: to compare takes less than to sort.
            values, inverse = np.unique(column, return_inverse=True)
            codes = codes * len(values) + inverse
        _, chosen, kinds = np.unique(codes, return_index=True, return_inverse=True)
        return self.take(chosen), kinds

    def take(self, index: Any) -> "Layouts":
        """Return some of the candidates."""
        return Layouts(**{field.name: getattr(self, field.name)[index] for field in fields(Layouts)})
