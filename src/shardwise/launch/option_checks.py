"""Refuse options that a site ignores, and values that no site accepts, before anything is written or submitted."""

import argparse
import re
import sys
from collections.abc import Sequence

from shardwise import environment
from shardwise.errors import ShardwiseError
from shardwise.launch.work import Work
from shardwise.units import parse_seconds

_HERE, _SLURM, _PODS = ("local", "hosts"), ("slurm",), ("kubernetes",)
#: Where an option has a meaning, if not everywhere; and its value if it is not given.
ONLY_ON: dict[str, tuple[tuple[str, ...], object]] = {
    "hosts": (("hosts",), None),
    "ssh": (("hosts",), "ssh"),
    "least_hosts": (("hosts",), None),
    "partition": (_SLURM, None),
    "time": (_SLURM, None),
    "switches": (_SLURM, None),
    "slurm": (_SLURM, []),
    "setup": (_SLURM, []),
    "sweep": (_SLURM, []),
    "image": (_PODS, None),
    "namespace": (_PODS, "default"),
    "claim": (_PODS, None),
    "rack": (_PODS, None),
    "queue": (_PODS, None),
    "made_as": (_PODS, "jobset"),
    "replicas": (_PODS, 1),
    "secret": (_PODS, None),
    "memory": (_PODS, None),
    "cpus": ((*_SLURM, *_PODS), None),
    "port": ((*_HERE, *_SLURM), None),
    "python": ((*_HERE, *_SLURM), sys.executable),
}
_QUANTITY = re.compile(r"\d+(\.\d+)?([KMGTP]i|[kMGTP])?")
#: What the API server accepts as the name of an object, and as the key of a label.
_OBJECT = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?")
_LABEL = re.compile(r"([a-z0-9]([a-z0-9.-]*[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def check_options(arguments: argparse.Namespace) -> None:
    """Refuse what the chosen site would ignore, and numbers that are out of range."""
    for name, (sites, default) in ONLY_ON.items():
        if arguments.on not in sites and getattr(arguments, name) != default:
            option = "--as" if name == "made_as" else f"--{name.replace('_', '-')}"
            raise ShardwiseError(
                f"{option} is for --on {' or '.join(sites)}, and this is --on {arguments.on}",
                remedy=f"leave {option} out, or --on {sites[0]}",
            )
    for name in ("cpus", "switches"):
        count = getattr(arguments, name)
        if count is not None and count < 1:
            raise ShardwiseError(f"--{name} {count}: it must be at least 1", remedy=f"leave --{name} out")
    if arguments.port is not None and not 0 < arguments.port < 1 << 16:
        raise ShardwiseError(f"--port {arguments.port}: ports are from 1 to 65535", remedy="leave --port out")
    for word in arguments.env:
        name = word.partition("=")[0]
        if not _VARIABLE.fullmatch(name):
            raise ShardwiseError(f"--env {word}: {name!r} is not the name of a variable", remedy="--env NAME=VALUE")


def check_pods(arguments: argparse.Namespace) -> None:
    """Refuse names and sizes that the API server would not accept."""
    for option in ("namespace", "claim", "queue", "secret"):
        name = getattr(arguments, option)
        if name is not None and not _OBJECT.fullmatch(name):
            raise ShardwiseError(
                f"--{option} {name}: names in Kubernetes have lowercase letters, digits, '-' and '.'",
                remedy=f"kubectl get {_KINDS.get(option, f'{option}s')} -A",
            )
    if arguments.rack is not None and not _LABEL.fullmatch(arguments.rack):
        raise ShardwiseError(
            f"--rack {arguments.rack} is not the key of a label", remedy="--rack topology.example/rack"
        )
    if arguments.memory is not None and not _QUANTITY.fullmatch(arguments.memory):
        raise ShardwiseError(f"--memory {arguments.memory} is not a quantity of Kubernetes", remedy="--memory 512Gi")


_KEY = "SHARDWISE_API_KEY"
_KINDS = {"claim": "persistentvolumeclaims", "queue": "localqueues"}


def check_key(arguments: argparse.Namespace, work: Work) -> None:
    """Refuse to submit a server that would refuse to start, as others could reach it and it has no key."""
    if work.kind != "serve" or arguments.on not in ("local", "slurm"):
        return
    host = work.words[work.words.index("--host") + 1]
    told = any(word.partition("=")[0] == _KEY for word in arguments.env) or environment.find_variable(_KEY)
    if host not in ("127.0.0.1", "localhost", "::1") and not told:
        raise ShardwiseError(
            f"the server listens on {host}, where other machines can reach it, and there is no API key",
            remedy=f"export {_KEY}=KEY",
        )


def check_hosts(hosts: Sequence[str]) -> None:
    """Refuse a host that is named twice: two nodes of one machine would share its devices and its port."""
    twice = next((host for place, host in enumerate(hosts) if host in hosts[:place]), None)
    if twice is not None:
        raise ShardwiseError(
            f"--hosts names {twice} twice, and each host is one node",
            remedy=f"--hosts {','.join(dict.fromkeys(hosts))}, with --devices-per-node for more ranks",
        )


def seconds_of(option: str, text: str, example: str) -> float:
    """Parse an option that is a duration."""
    try:
        return parse_seconds(text)
    except ShardwiseError as error:
        raise ShardwiseError(f"{option} {text}: {error.problem}", remedy=f"{option} {example}") from None
