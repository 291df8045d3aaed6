"""A probe from beginning to end, with ranks started as processes of this machine or by `torchrun`."""

import socket
import sys
from collections import Counter
from collections.abc import Sequence
from time import perf_counter

import torch.distributed as dist

from shardwise import environment
from shardwise.cluster.curve import COLLECTIVES, Curve
from shardwise.cluster.pairs import Pairs, neighbours
from shardwise.cluster.probe import Probe
from shardwise.errors import ShardwiseError
from shardwise.probing import collectives, devices, kernels, links
from shardwise.ranks.gpus import Gpus, check_one_each, find_gpus
from shardwise.ranks.rank_error import RankError
from shardwise.ranks.shared_gpus import network_namespace
from shardwise.ranks.spawn import Ranks
from shardwise.training.world import World
from shardwise.units import counted, format_seconds

#: What can be measured.
SUBJECTS = ("devices", "links", "collectives")


def probe(subjects: Sequence[str], num_devices: int, gpus: Gpus = "own") -> Probe | None:
    """Run the probe. Under `torchrun`, returns None on all ranks but the first."""
    if environment.place_under_torchrun() is not None:
        if gpus == "shared":
            environment.ask_for_shared_gpus()
        return probe_rank(tuple(subjects))
    if gpus == "own":
        check_one_each(find_gpus(), num_devices)
    if num_devices == 1:
        return probe_rank(tuple(subjects))
    with Ranks(num_devices, gpus=gpus) as ranks:
        try:
            found: Probe = ranks.run(probe_rank, tuple(subjects))[0]
        except RankError as error:
            if error.remedy is None:
                raise
            raise ShardwiseError(error.problem.partition("\n    Traceback")[0], remedy=error.remedy) from None
    return found


def probe_rank(subjects: Sequence[str]) -> Probe | None:
    """Measure on one rank. Only the first returns the result."""
    world = World()
    with world.telling():
        begun = perf_counter()
        hosts, names = _everyone(world)
        if world.is_first:
            _announce(subjects, hosts, on_gpus=world.device.type == "cuda")
        if "devices" in subjects or world.size == 1:
            sharing = Counter(hosts)[hosts[world.rank]]
            world.wait()
            mine = devices.measure_device(world.device, hosts[world.rank], names[world.rank], sharing, world)
        else:
            mine = devices.name_device(world.device, hosts[world.rank], names[world.rank])
        figures = tuple(world.gather(mine))
        pairs, curves = None, tuple[Curve, ...]()
        if world.size > 1 and "links" in subjects:
            world.wait()
            group = world.guarded(dist.new_group())
            pairs = links.measure_pairs(world, group, hosts, names)
        if world.size > 1 and "collectives" in subjects:
            world.wait()
            curves = collectives.measure_collectives(world, collectives.groupings_of(_domains(hosts, pairs)))
        world.wait()
        world.close()
    if not world.is_first:
        return None
    return Probe(
        backend=_backend(world),
        devices=figures,
        pairs=pairs,
        curves=curves,
        seconds=perf_counter() - begun,
        versions=environment.versions_of(["torch", "shardwise"]),
    )


def most_seconds(subjects: Sequence[str], hosts: Sequence[str], *, on_gpus: bool) -> float:
    """Return the most seconds on an idle machine without slow links: each measurement has a limit, or ends early."""
    total = 0.0
    if "devices" in subjects:
        total += devices.NUM_FIGURES * devices.LIMIT_SECONDS
        total += 0.0 if on_gpus else kernels.NUM_FIGURES * kernels.LIMIT_SECONDS
    if len(hosts) > 1 and "links" in subjects:
        total += 2 * links.LIMIT_SECONDS * len(links.rounds_of(hosts))
    if len(hosts) > 1 and "collectives" in subjects:
        kinds = len(collectives.groupings_of(_domains(hosts, None)))
        total += collectives.LIMIT_SECONDS * kinds * len(COLLECTIVES) * len(collectives.SIZES)
    return total


def _announce(subjects: Sequence[str], hosts: Sequence[str], *, on_gpus: bool) -> None:
    on = "" if len(set(hosts)) == 1 else f" on {counted(len(set(hosts)), 'host')}"
    print(
        f"measuring {', '.join(subjects)} of {counted(len(hosts), 'device')}{on}: at most about"
        f" {format_seconds(most_seconds(subjects, hosts, on_gpus=on_gpus))} on a quiet machine, less where numbers are"
        " soon stable",
        file=sys.stderr,
        flush=True,
    )


def _backend(world: World) -> str:
    if world.size == 1:
        return "none"
    return "nccl" if world.device.type == "cuda" else "gloo"


def _everyone(world: World) -> tuple[list[str], list[str]]:
    """Return the names of every rank's host, and of its device there.

    Two network namespaces of one machine, such as containers, count as two hosts: a network connects them.
    """
    told = world.gather((socket.gethostname(), network_namespace(), str(world.device)))
    spaces: dict[str, list[int]] = {}
    for host, space, _ in told:
        if space not in spaces.setdefault(host, []):
            spaces[host].append(space)
    hosts = [host if len(spaces[host]) == 1 else f"{host}/{spaces[host].index(space)}" for host, space, _ in told]
    seen: Counter[tuple[str, str]] = Counter()
    shared = Counter((host, device) for host, (_, _, device) in zip(hosts, told, strict=True))
    names = []
    for host, (_, _, device) in zip(hosts, told, strict=True):
        # Processes on one CPU, or on a shared GPU, are distinguished by number.
        is_one = shared[host, device] == 1 and device != "cpu"
        mark = ":" if device == "cpu" else "#"
        names.append(device if is_one else f"{device}{mark}{seen[host, device]}")
        seen[host, device] += 1
    return hosts, names


def _domains(hosts: Sequence[str], pairs: Pairs | None) -> list[list[int]]:
    """Return groups of devices with fast links: the neighbours found, if groups are of equal size; else hosts."""
    groups = [] if pairs is None else [list(group) for group in neighbours(pairs)]
    if len({len(group) for group in groups}) == 1:
        return groups
    found: dict[str, list[int]] = {}
    for number, host in enumerate(hosts):
        found.setdefault(host, []).append(number)
    return list(found.values())
