"""Query Slurm about the site and a job, and submit a job."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.errors import ShardwiseError, unknown
from shardwise.launch.layout import Layout
from shardwise.launch.tools import ask, need, try_asking
from shardwise.units import counted

_ASK_SITE = "sinfo, which says what there is"
#: States in which a job will not run again without intervention.
OVER = (
    "COMPLETED",
    "FAILED",
    "CANCELLED",
    "TIMEOUT",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "BOOT_FAIL",
    "DEADLINE",
    "PREEMPTED",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """A partition: its nodes, the most GPUs of a node, and the time limit of a job (None: unlimited)."""

    name: str
    is_default: bool
    is_up: bool
    num_nodes: int
    gpus_per_node: int
    most_minutes: int | None


def check_installed() -> None:
    """Refuse if Slurm is not installed."""
    for program in ("sbatch", "sinfo", "scontrol"):
        need(
            program,
            problem="there is no Slurm here",
            remedy="a login node of the cluster; --show prints the script alone",
        )


def read_partitions() -> list[Partition]:
    """Return the partitions of this site. Raises if the controller does not answer."""
    text = ask(
        ["sinfo", "--noheader", "--format", "%P|%a|%l|%D|%G"], remedy="scontrol ping, which says whether it is up"
    )
    found: dict[str, Partition] = {}
    for line in text.splitlines():
        name, state, limit, nodes, gres = line.strip().split("|")
        before = found.get(name.rstrip("*"))
        gpus = sum(int(count) for count in re.findall(r"gpu(?::[^:,()]+)?:(\d+)", gres))
        found[name.rstrip("*")] = Partition(
            name=name.rstrip("*"),
            is_default=name.endswith("*"),
            is_up=state == "up",
            num_nodes=int(nodes) + (before.num_nodes if before else 0),
            gpus_per_node=max(gpus, before.gpus_per_node if before else 0),
            most_minutes=minutes_of(limit),
        )
    return list(found.values())


def check_partition(partitions: list[Partition], name: str | None, layout: Layout, num_minutes: int | None) -> None:
    """Refuse what the partition cannot provide."""
    if name is None:
        chosen = next((each for each in partitions if each.is_default), None)
        if chosen is None:
            raise ShardwiseError(
                "this site has no default partition", remedy=f"--partition {partitions[0].name}" if partitions else None
            )
    else:
        by_name = {each.name: each for each in partitions}
        if name not in by_name:
            error = unknown("partition", name, by_name)
            raise ShardwiseError(error.problem, remedy=f"--partition {error.remedy or next(iter(by_name), 'NAME')}")
        chosen = by_name[name]
    if not chosen.is_up:
        raise ShardwiseError(f"the partition {chosen.name} takes no jobs now", remedy=_ASK_SITE)
    if layout.num_nodes > chosen.num_nodes:
        raise ShardwiseError(
            f"{layout} are requested, and the partition {chosen.name} has {counted(chosen.num_nodes, 'node')}",
            remedy=f"a plan for at most {chosen.num_nodes * layout.devices_per_node} devices, or another --partition",
        )
    if layout.has_gpus and layout.devices_per_node > chosen.gpus_per_node:
        raise ShardwiseError(
            f"{layout} are requested, and nodes of the partition {chosen.name} have "
            f"{counted(chosen.gpus_per_node, 'GPU')}",
            remedy=f"--devices-per-node {chosen.gpus_per_node}" if chosen.gpus_per_node else "--device cpu",
        )
    if num_minutes is not None and chosen.most_minutes is not None and num_minutes > chosen.most_minutes:
        raise ShardwiseError(
            f"{num_minutes} min are requested, and the partition {chosen.name} gives {chosen.most_minutes} min",
            remedy=f"--time {chosen.most_minutes}min: the job is requeued, and continues from its checkpoint",
        )


def fewest_switches(num_nodes: int) -> int | None:
    """Return the fewest leaf switches that this many nodes can span; None without a topology, or for one node."""
    told = try_asking(["scontrol", "--oneliner", "show", "topology"])
    leaves = re.findall(r"Level=0 .*?Nodes=(\S+)", told.stdout) if told.returncode == 0 else []
    sizes = sorted((_num_nodes_in(each) for each in leaves), reverse=True)
    if num_nodes < 2 or len(sizes) < 2:
        return None
    count, held = 0, 0
    for size in sizes:
        count, held = count + 1, held + size
        if held >= num_nodes:
            return count
    return None


def submit(path: str) -> str:
    """Submit a script, after Slurm's own check of it. Returns the job's number."""
    remedy = "what it names, by --partition, --time, --nodes or --slurm OPTION"
    ask(["sbatch", "--test-only", path], remedy=remedy)
    return ask(["sbatch", "--parsable", path], remedy=remedy).strip().partition(";")[0]


def find_job(job: str) -> Mapping[str, str] | None:
    """Return what Slurm knows of a job, in its own words; None when it has forgotten it."""
    told = try_asking(["scontrol", "--oneliner", "show", "job", job])
    lines = told.stdout.strip().splitlines()
    if told.returncode != 0 or not lines:
        return None
    return dict(re.findall(r"(\w+)=(\S*)", lines[0]))


def minutes_of(limit: str) -> int | None:
    """Parse `1-02:30:00`, `30:00`, `infinite`."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", limit)
    if match is None:
        return None
    days, hours, minutes, _ = (int(each or 0) for each in match.groups())
    return (days * 24 + hours) * 60 + minutes


def _num_nodes_in(names: str) -> int:
    """Count nodes: `node[1-3,7],head` are five."""
    count = 0
    for name in re.findall(r"[^,\[]+(?:\[[^\]]*\])?", names):
        inside = re.search(r"\[(.*)\]", name)
        for part in inside[1].split(",") if inside else ["1"]:
            first, dash, last = part.partition("-")
            count += int(last) - int(first) + 1 if dash else 1
    return count
