"""Turn the options of `shardwise launch` into the layout, and the place where the run is started."""

import argparse
import math
import shlex
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from shardwise import environment
from shardwise.cluster.file import find_cluster
from shardwise.command_line import WrongCallError
from shardwise.errors import ShardwiseError
from shardwise.launch.kubernetes.pod import OfCluster
from shardwise.launch.layout import Layout, lay_out
from shardwise.launch.on_hosts import OnHosts
from shardwise.launch.on_kubernetes import OnKubernetes, check_cluster
from shardwise.launch.on_slurm import OnSlurm
from shardwise.launch.option_checks import check_hosts, check_options, check_pods, seconds_of
from shardwise.launch.slurm_script import SlurmJob, task_works
from shardwise.launch.target import Target
from shardwise.launch.work import Work, read_work


def placed(arguments: argparse.Namespace, work: Work, layout: Layout) -> Work:
    """Return the work with launch's cluster as its own, so that its ranks are placed by the placer.

    Not for pods, which do not see the file, nor for a server on some of the devices, which uses those it is given.
    """
    given = arguments.cluster or ""
    if arguments.on == "kubernetes" or not given.endswith(".toml"):
        return work
    if work.kind == "serve" and find_cluster(given).num_devices != layout.num_ranks:
        return work
    if any(word.partition("=")[0] == "--cluster" for word in work.words):
        return work
    return replace(work, words=(*work.words, "--cluster", given))


def layout_of(arguments: argparse.Namespace, work: Work) -> Layout:
    hosts = _hosts(arguments)
    if arguments.on == "local" and (arguments.nodes or 1) > 1:
        raise ShardwiseError(f"--nodes {arguments.nodes}: --on local is one machine", remedy="--on hosts --hosts A,B")
    if hosts and arguments.nodes not in (None, len(hosts)):
        raise ShardwiseError(f"--nodes {arguments.nodes}, and {len(hosts)} hosts are named", remedy="leave --nodes out")
    return lay_out(
        work,
        num_nodes=len(hosts) or (1 if arguments.on == "local" else arguments.nodes),
        devices_per_node=arguments.devices_per_node,
        cluster=None if arguments.cluster is None else find_cluster(arguments.cluster),
        has_gpus=arguments.device == "gpu",
    )


def target_of(arguments: argparse.Namespace, work: Work, layout: Layout) -> Target:
    if arguments.restarts < 0:
        raise ShardwiseError(f"--restarts {arguments.restarts}: it must be 0 or more", remedy="--restarts 0")
    if arguments.sweep and (arguments.on != "slurm" or work.kind != "train"):
        raise ShardwiseError("--sweep is an array of trainings on Slurm", remedy="--on slurm ... -- train")
    check_options(arguments)
    if arguments.on == "slurm":
        job = _slurm_job(arguments)
        _check_sweep(work, job)
        return OnSlurm(work=work, layout=layout, job=job, partition=arguments.partition)
    if arguments.on == "kubernetes":
        return _kubernetes(arguments, work, layout)
    hosts = _hosts(arguments)
    if arguments.on == "hosts" and not hosts:
        raise WrongCallError("no hosts are named", remedy="--hosts A,B")
    if hosts and work.kind == "serve":
        raise ShardwiseError("serve runs on one machine", remedy=f"ssh {hosts[0]} shardwise serve, or --on slurm")
    return OnHosts(
        work=work, layout=layout, python=arguments.python, hosts=hosts, ssh=arguments.ssh, port=arguments.port,
        restarts=arguments.restarts, variables=_variables(arguments.env), least=_least(arguments.least_hosts, hosts),
        save_seconds=_save_seconds(arguments),
    )  # fmt: skip


def _least(asked: int | None, hosts: tuple[str, ...]) -> int:
    if asked is not None and not 1 <= asked <= len(hosts):
        raise ShardwiseError(
            f"--least-hosts {asked}: it must be from 1 to {len(hosts)}, the number of hosts named",
            remedy=f"--least-hosts {len(hosts)}",
        )
    return asked or 1


def _kubernetes(arguments: argparse.Namespace, work: Work, layout: Layout) -> OnKubernetes:
    if arguments.image is None:
        raise WrongCallError("pods need an image", remedy="--image REPOSITORY@sha256:..., made by the Dockerfile")
    cluster = OfCluster(
        image=arguments.image, namespace=arguments.namespace, claim=arguments.claim, rack=arguments.rack,
        queue=arguments.queue, secret=arguments.secret, cpus=arguments.cpus, memory=arguments.memory,
        replicas=arguments.replicas, num_restarts=arguments.restarts, save_seconds=_save_seconds(arguments),
        variables=tuple(_variables(arguments.env).items()),
    )  # fmt: skip
    check_cluster(work, layout, cluster)
    check_pods(arguments)
    return OnKubernetes(work=work, layout=layout, cluster=cluster, made_as=arguments.made_as)


def _save_seconds(arguments: argparse.Namespace) -> int:
    save = round(seconds_of("--save-before", arguments.save_before, "2min"))
    if save < 1:
        raise ShardwiseError(
            f"--save-before {arguments.save_before}: ranks need time to save", remedy="--save-before 2min"
        )
    return save


def _slurm_job(arguments: argparse.Namespace) -> SlurmJob:
    minutes = None if arguments.time is None else math.ceil(seconds_of("--time", arguments.time, "4h") / 60)
    if minutes is not None and minutes < 1:
        raise ShardwiseError(f"--time {arguments.time}: the shortest limit of Slurm is 1 min", remedy="--time 4h")
    save = _save_seconds(arguments)
    if minutes is not None and save >= minutes * 60:
        raise ShardwiseError(
            f"--save-before {arguments.save_before} is not before the end of --time {arguments.time}",
            remedy=f"--save-before {minutes * 15}s",
        )
    options = list(arguments.slurm)
    if arguments.partition is not None:
        options.insert(0, f"--partition={arguments.partition}")
    wrong = [each for each in options if not each.startswith("-")]
    if wrong:
        raise ShardwiseError(f"--slurm {wrong[0]} is not an option of sbatch", remedy=f"--slurm=--{wrong[0]}")
    return SlurmJob(
        python=arguments.python, num_minutes=minutes, save_seconds=save, num_restarts=arguments.restarts,
        port=arguments.port, switches=arguments.switches, cpus_per_task=arguments.cpus, options=tuple(options),
        setup=(*arguments.setup, *(f"export {_exported(each)}" for each in arguments.env)),
        sweep=tuple(product(*map(_values, arguments.sweep))) if arguments.sweep else (),
    )  # fmt: skip


def _values(sweep: str) -> list[str]:
    """Parse `rate=1,2` into changes of a recipe."""
    key, equals, values = sweep.partition("=")
    if not equals or not all(values.split(",")):
        raise ShardwiseError(f"--sweep {sweep} names no values", remedy=f"--sweep {key}=1e-3,3e-3")
    return [f"{key}={value}" for value in values.split(",")]


def _check_sweep(work: Work, job: SlurmJob) -> None:
    """Refuse values that a recipe does not accept, and two runs in one folder: tasks of an array run at once."""
    if not job.sweep:
        return
    keys = [change.partition("=")[0] for change in job.sweep[0]]
    for key in keys:
        if keys.count(key) > 1:
            raise ShardwiseError(f"--sweep names {key} twice", remedy=f"--sweep {key}=A,B with all of its values")
    folders = set()
    for task, changes in zip(task_works(work, job), job.sweep, strict=True):
        try:
            read_work(["train", *task.words])
        except ShardwiseError as error:
            # A task has these changes as `--set`; the user wrote `--sweep`.
            problem = error.problem.replace("--set", "--sweep")
            raise ShardwiseError(f"--sweep {' '.join(changes)}: {problem}", remedy=error.remedy) from None
        if task.folder in folders:
            raise ShardwiseError(
                f"two runs of the sweep would share the folder {task.folder}", remedy="each value once"
            )
        folders.add(task.folder)


def _exported(word: str) -> str:
    ((name, value),) = _variables([word]).items()
    return f"{name}={shlex.quote(value)}"


def _variables(words: list[str]) -> dict[str, str]:
    """Parse `NAME=VALUE`, or `NAME` with the value that it has here."""
    found = {}
    for word in words:
        name, equals, value = word.partition("=")
        here = value if equals else environment.find_variable(name)
        if here is None:
            raise ShardwiseError(f"--env {name}: there is no such variable here", remedy=f"--env {name}=VALUE")
        found[name] = here
    return found


def _hosts(arguments: argparse.Namespace) -> tuple[str, ...]:
    if arguments.on != "hosts":
        return ()
    named = tuple(filter(None, (arguments.hosts or "").split(",")))
    check_hosts(named)
    cluster = None if arguments.cluster is None else find_cluster(arguments.cluster)
    return named if cluster is None or cluster.pairs is None else _as_measured(named, cluster.pairs.hosts)


def _as_measured(named: tuple[str, ...], measured: Sequence[str]) -> tuple[str, ...]:
    """Return hosts in the order in which a probe numbered their devices, if it knows all of them by name."""
    order = list(dict.fromkeys(measured))
    for short in (False, True):
        known = {_plain_name(host, short=short): host for host in named}
        found = list(dict.fromkeys(_plain_name(host, short=short) for host in order))
        if len(known) == len(named) and set(known) == set(found):
            return tuple(known[name] for name in found)
    return named


def _plain_name(host: str, *, short: bool) -> str:
    name = host.rpartition("@")[2]
    return name.partition(".")[0] if short else name
