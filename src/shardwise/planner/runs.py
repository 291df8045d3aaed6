"""Published runs: a table of measured steps with their layouts, read into what the cost model is asked."""

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from shardwise.cluster.cluster import Pool, make_pool
from shardwise.cost.layouts import BALANCE, RECOMPUTE, Layouts
from shardwise.cost.pipeline import SCHEDULES
from shardwise.errors import ShardwiseError, nearest

#: Columns without which a row says nothing; the others may be absent or empty.
NEEDED = (
    "id", "model", "layers", "hidden", "heads", "sequence", "gpu", "num_gpus", "gpus_per_node", "dp", "tp", "pp",
    "microbatch", "global_batch", "precision", "outcome", "step_seconds",
)  # fmt: skip

_SCHEDULES = {"1F1B": "1f1b", "1F1B-I": "interleaved", "ZB-1p": "zb-h1", "ZB-2p": "zb-h2", "ZB-V": "zb-v"}


# A network that nobody describes is seldom the reference of its maker: half of its NICs (one for two devices), as in
# the runs that do describe theirs.
_UNDESCRIBED = 0.5


class SkippedError(Exception):
    """A row that does not say enough to be predicted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One row of the table, by its cells."""

    cells: Mapping[str, str]

    def text(self, column: str) -> str:
        return self.cells.get(column, "") or ""

    def count(self, column: str, usual: int | None = None) -> int:
        """A whole number; without one the usual, and without that the row is skipped."""
        text = self.text(column)
        if not text:
            if usual is None:
                raise SkippedError(f"{column} is not published")
            return usual
        try:
            return int(float(text))
        except ValueError:
            raise SkippedError(f"{column} is {text!r}, which is no number") from None

    @property
    def name(self) -> str:
        return self.text("id")

    @property
    def source(self) -> str:
        """Who published it: the name before the number."""
        return self.name.rpartition("-")[0] or self.name

    @property
    def quality(self) -> str:
        return self.text("quality")

    @property
    def is_out_of_memory(self) -> bool:
        return self.text("outcome") == "oom"

    @property
    def step_seconds(self) -> float | None:
        return float(self.text("step_seconds")) if self.text("step_seconds") else None

    @property
    def peak_gib(self) -> float | None:
        return float(self.text("peak_gib")) if self.text("peak_gib") else None


def read_runs(path: Path) -> list[Run]:
    """Read a table of runs."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            columns = list(reader.fieldnames or ())
            rows = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise ShardwiseError(
            f"the table of runs {path} cannot be read: {why}", remedy="a CSV file, like runs.csv"
        ) from None
    missing = [name for name in NEEDED if name not in columns]
    if missing:
        meant = [f"{near} to {name}" for name in missing if (near := nearest(name, columns))]
        renamed = (
            f"rename {', '.join(meant)}" if meant else f"add {'it' if len(missing) == 1 else 'them'} to the header"
        )
        raise ShardwiseError(
            f"{path.name} has no column {', '.join(missing)}; a table of runs has at least {', '.join(NEEDED)}",
            remedy=renamed,
        )
    if not rows:
        raise ShardwiseError(f"{path.name} has a header and no run", remedy="one line for each run")
    return [Run(cells=row) for row in rows]


def pool_of(run: Run) -> Pool:
    """The devices of a run, on the network that it names; on the usual one if it names none."""
    num, per_node = run.count("num_gpus"), run.count("gpus_per_node")
    pool = make_pool(run.text("gpu"), num_nodes=-(-num // per_node), devices_per_node=min(num, per_node))
    text, fabric = run.text("internode"), pool.node.fabric
    gigabits = _node_gigabits(text)
    if gigabits is not None:
        rate = gigabits * 1e9 / 8 / pool.node.devices_per_node
    elif text.startswith("unknown"):
        rate = fabric.bytes_per_second * _UNDESCRIBED
    else:
        rate = fabric.bytes_per_second
    fabric = replace(fabric, name=text or fabric.name, bytes_per_second=rate)
    return replace(pool, node=replace(pool.node, fabric=fabric))


def _node_gigabits(text: str) -> float | None:
    """Gb/s of a node from `8x200Gb HDR IB`, `4x OmniPath 100Gb per node` or `1600Gbps RoCE`."""
    several = re.search(r"(\d+)\s*x\s*(?:[A-Za-z]+\s+)?(\d+)\s*Gb", text)
    if several is not None:
        return float(several[1]) * float(several[2])
    one = re.search(r"(\d+)\s*Gbps", text)
    return float(one[1]) if one is not None else None


def layouts_of(run: Run, *, balance: str, recompute: str | None = None) -> Layouts:
    """The layout of a run, as one candidate; `balance` as in `BALANCE`, `recompute` (the row's) as in `RECOMPUTE`."""
    dp, tp, pp, cp = (run.count(axis) for axis in ("dp", "tp", "pp", "cp"))
    if dp * tp * pp * cp != run.count("num_gpus"):
        raise SkippedError(f"dp x tp x pp x cp is {dp * tp * pp * cp}, not {run.count('num_gpus')}")
    layers, microbatch, batch = run.count("layers", 0), run.count("microbatch"), run.count("global_batch")
    num_microbatches = batch / (dp * microbatch)
    if num_microbatches != int(num_microbatches) or num_microbatches < 1:
        raise SkippedError(f"a batch of {batch} is no whole number of microbatches of {microbatch} on {dp} replicas")
    schedule = _SCHEDULES.get(run.text("schedule"), "1f1b")
    per_rank = (layers + 2 * (balance == "ends")) // pp
    chunks = per_rank if "layer" in run.text("chunks") else run.count("chunks", 1)
    if chunks > 1 and schedule == "1f1b":
        schedule = "interleaved"
    sharded = re.match(r"zero(\d)", run.text("data_parallel"))
    within = re.search(r"within (\d+)", run.text("data_parallel"))
    return Layouts.of(
        dp=dp, tp=tp, pp=pp, cp=cp, ep=run.count("ep", 1), chunks=max(chunks, 1), microbatch=microbatch,
        num_microbatches=int(num_microbatches), zero=int(sharded[1]) if sharded else _usual_zero(run),
        zero_group=int(within[1]) if within else 0, schedule=SCHEDULES.index(schedule), balance=BALANCE.index(balance),
        recompute=RECOMPUTE.index(recompute or run.text("recompute") or "none"),
        sequence_parallel=run.text("sequence_parallel") == "True",
    )  # fmt: skip


def _usual_zero(run: Run) -> int:
    """Where a row does not say how states are sharded: not at all for `ddp`, else by the optimizer (ZeRO-1)."""
    return 0 if run.text("data_parallel") == "ddp" else 1
