"""Published runs: a table of measured steps with their layouts, turned into inputs of the cost model."""

import csv
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from shardwise.cluster.cluster import Pool, make_pool
from shardwise.cost.layouts import BALANCE, RECOMPUTE, Layouts
from shardwise.cost.pipeline import SCHEDULES
from shardwise.errors import ShardwiseError, nearest

#: Required columns. Others may be absent or empty.
NEEDED = (
    "id", "model", "layers", "hidden", "heads", "sequence", "gpu", "num_gpus", "gpus_per_node", "dp", "tp", "pp",
    "microbatch", "global_batch", "precision", "outcome", "step_seconds",
)  # fmt: skip

_SCHEDULES = {"1F1B": "1f1b", "1F1B-I": "interleaved", "ZB-1p": "zb-h1", "ZB-2p": "zb-h2", "ZB-V": "zb-v"}
_SCHEDULES |= {"Interleaved1F1B": "interleaved"}


# An undescribed network is seldom the vendor's reference: half of its NICs are assumed (one for two devices), as in
# runs that describe theirs.
_UNDESCRIBED = 0.5


# No published number is near this limit. Sizes are multiplied, and must not overflow.
_ABSURD = 1e9


class SkippedError(Exception):
    """A row without enough information for a prediction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One row of the table, by its cells."""

    cells: Mapping[str, str]

    def text(self, column: str) -> str:
        return self.cells.get(column, "") or ""

    def number(self, column: str) -> float | None:
        """Return a positive number, or None if the cell is empty. Any other cell raises `SkippedError`."""
        text = self.text(column).strip()
        if not text:
            return None
        try:
            found = float(text)
        except ValueError:
            raise SkippedError(f"{column} is {text!r}, which is no number") from None
        if not 0 < found < _ABSURD:
            raise SkippedError(f"{column} is {text}, and no number of anything here")
        return found

    def count(self, column: str, usual: int | None = None) -> int:
        """Return an integer, or `usual` if the cell is empty. Without either, raise `SkippedError`."""
        found = self.number(column)
        if found is None and usual is None:
            raise SkippedError(f"{column} is not published")
        if found is None:
            return usual or 0
        if found != int(found):
            raise SkippedError(f"{column} is {self.text(column)}, which is no whole number")
        return int(found)

    def choice(self, column: str, known: Collection[str], usual: str) -> str:
        """Return one of the known words, or `usual` if the cell is empty."""
        word = self.text(column).strip() or usual
        if word not in known:
            raise SkippedError(f"{column} is {word!r}, which is none of {', '.join(known)}")
        return word

    @property
    def name(self) -> str:
        return self.text("id")

    @property
    def source(self) -> str:
        """The publisher: the part of the name before the number."""
        return self.name.rpartition("-")[0] or self.name

    @property
    def quality(self) -> str:
        return self.text("quality")

    @property
    def is_out_of_memory(self) -> bool:
        return self.text("outcome") == "oom"

    @property
    def step_seconds(self) -> float | None:
        return self.number("step_seconds")

    @property
    def peak_gib(self) -> float | None:
        return self.number("peak_gib")


def read_runs(path: Path) -> list[Run]:
    """Read a table of runs."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
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
    """Return the devices of a run, with the network that it names, or the usual one."""
    num, per_node = run.count("num_gpus"), run.count("gpus_per_node")
    pool = make_pool(run.text("gpu"), num_nodes=-(-num // per_node), devices_per_node=min(num, per_node))
    text, fabric = run.text("internode"), pool.node.fabric
    gigabits = _node_gigabits(text)
    if gigabits:
        rate = gigabits * 1e9 / 8 / pool.node.devices_per_node
    elif text.startswith("unknown"):
        rate = fabric.bytes_per_second * _UNDESCRIBED
    else:
        rate = fabric.bytes_per_second
    fabric = replace(fabric, name=text or fabric.name, bytes_per_second=rate)
    return replace(pool, node=replace(pool.node, fabric=fabric))


def _node_gigabits(text: str) -> float | None:
    """Return the Gb/s of a node, from `8x200Gb HDR IB`, `4x OmniPath 100Gb per node` or `1600Gbps RoCE`."""
    several = re.search(r"(\d+)\s*x\s*(?:[A-Za-z]+\s+)?(\d+)\s*Gb", text)
    if several is not None:
        return float(several[1]) * float(several[2])
    one = re.search(r"(\d+)\s*Gbps", text)
    return float(one[1]) if one is not None else None


def layouts_of(run: Run, *, balance: str, recompute: str | None = None, ep: int | None = None) -> Layouts:
    """Return the layout of a run as one candidate. `balance` is one of `BALANCE`, `recompute` one of `RECOMPUTE`.

    `recompute` and `ep` replace the row's own, if given.
    """
    dp, tp, pp, cp = (*(run.count(axis) for axis in ("dp", "tp", "pp")), run.count("cp", 1))
    if dp * tp * pp * cp != run.count("num_gpus"):
        raise SkippedError(f"dp x tp x pp x cp is {dp * tp * pp * cp}, not {run.count('num_gpus')}")
    layers, microbatch, batch = run.count("layers", 0), _microbatch_of(run), run.count("global_batch")
    num_microbatches = batch / (dp * microbatch)
    if num_microbatches != int(num_microbatches) or num_microbatches < 1:
        raise SkippedError(f"a batch of {batch} is no whole number of microbatches of {microbatch} on {dp} replicas")
    schedule = _schedule_of(run)
    per_rank = (layers + 2 * (balance == "ends")) // pp
    chunks = per_rank if "layer" in run.text("chunks") else run.count("chunks", 1)
    if schedule == "interleaved" and not run.text("chunks"):
        chunks = 2  # The default of torch's pipelining.
    if chunks > 1 and schedule == "1f1b":
        schedule = "interleaved"
    within = re.search(r"within (\d+)", run.text("data_parallel"))
    return Layouts.of(
        dp=dp, tp=tp, pp=pp, cp=cp, ep=ep or run.count("ep", 1), chunks=max(chunks, 1), microbatch=microbatch,
        num_microbatches=int(num_microbatches), zero=_zero_of(run),
        zero_group=int(within[1]) if within else 0, schedule=SCHEDULES.index(schedule), balance=BALANCE.index(balance),
        recompute=RECOMPUTE.index(recompute or run.choice("recompute", RECOMPUTE, "none")),
        sequence_parallel=run.text("sequence_parallel").strip().lower() == "true",
    )  # fmt: skip


def _microbatch_of(run: Run) -> int:
    """Return the samples of a microbatch. By default, torchtitan has as many microbatches as stages (NOTES.md)."""
    if run.text("microbatch") or "torchtitan" not in run.text("source"):
        return run.count("microbatch")
    return max(run.count("global_batch") // (run.count("dp") * run.count("pp")), 1)


def _schedule_of(run: Run) -> str:
    """Return the row's schedule, from its paper's name or from ours; 1F1B if it names none."""
    word = run.text("schedule").strip()
    schedule = _SCHEDULES.get(word, word.lower() or "1f1b")
    if schedule not in SCHEDULES:
        raise SkippedError(f"schedule is {word!r}, which is none of {', '.join((*_SCHEDULES, *SCHEDULES))}")
    return schedule


def _zero_of(run: Run) -> int:
    """Return the ZeRO stage. If a row does not state it: 0 for `ddp`, else 1."""
    text = run.text("data_parallel").strip()
    said = re.match(r"zero(\d+)", text)
    if said is None:
        return 0 if text == "ddp" else 1
    if int(said[1]) > 3:
        raise SkippedError(f"data_parallel is {text!r}, and ZeRO has stages 0 to 3")
    return int(said[1])
