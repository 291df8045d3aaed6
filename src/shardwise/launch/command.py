"""`shardwise launch`: start a training run or a server through a site's job system."""

import argparse
import sys
from pathlib import Path

from shardwise.answer import Answer, Canvas
from shardwise.errors import ShardwiseError, os_errors_as
from shardwise.launch.chosen import layout_of, placed, target_of
from shardwise.launch.layout import notes_on
from shardwise.launch.on_slurm import OnSlurm
from shardwise.launch.option_checks import check_key
from shardwise.launch.slurm_script import task_works
from shardwise.launch.target import Submitted, Target, follow
from shardwise.launch.work import Work, command_line, read_work
from shardwise.trace.journal import note
from shardwise.working import step_aside

DESCRIPTION = """
Start train or serve on this machine, on hosts over ssh, on Slurm or on
Kubernetes. Write the command to start after the --, with the options that it
has without launch.

The script or manifest is written to launch/ in the folder of the run, checked
and submitted. Then this command ends, and the run continues.
"""

EXAMPLE = """
shardwise launch --on local --devices-per-node 2 --show -- train tiny --folder runs/tiny
shardwise launch --on slurm --devices-per-node 8 --time 4h --show -- train tiny --plan dp=8,tp=2 --folder runs/tiny
shardwise launch --on hosts --hosts node1,node2 --show -- train tiny --plan dp=4 --folder runs/tiny
"""

PLACES = ("local", "hosts", "slurm", "kubernetes")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("work", nargs="*", metavar="-- train|serve ...", help="the command to start")
    parser.add_argument("--on", required=True, choices=PLACES, help="where to start it")
    parser.add_argument("--nodes", type=int, metavar="N", help="number of machines (default: as the plan needs)")
    parser.add_argument(
        "--devices-per-node", type=int, metavar="N", help="ranks per machine (default: as the plan needs)"
    )
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu", help="where a rank computes (default: gpu)")
    parser.add_argument("--cluster", metavar="C", help="a name or a cluster.toml, instead of the numbers")
    parser.add_argument(
        "--python", default=sys.executable, metavar="P", help="Python on the machines (default: this one)"
    )
    parser.add_argument(
        "--port", type=int, metavar="N", help="port where ranks meet (default: a free one; hosts: 29500)"
    )
    parser.add_argument(
        "--restarts", type=int, default=3, metavar="N", help="restart failed ranks up to N times (default: 3)"
    )
    parser.add_argument(
        "--save-before", default="2min", metavar="T", help="time to save before a limit or a stop (default: 2min)"
    )
    parser.add_argument("--cpus", type=int, metavar="N", help="cores per node (default: Slurm 1 per device, pods 8)")
    parser.add_argument(
        "--env", action="append", default=[], metavar="NAME[=VALUE]", help="pass a variable to the ranks"
    )
    parser.add_argument("--folder", metavar="FOLDER", help="serve: folder for its script and log")
    hosts = parser.add_argument_group("on hosts")
    hosts.add_argument("--hosts", metavar="A,B", help="machines to reach by ssh, in the order of ranks")
    hosts.add_argument("--ssh", default="ssh", metavar="S", help="ssh command with its options (default: ssh)")
    hosts.add_argument(
        "--least-hosts",
        type=int,
        metavar="N",
        help="continue with at least N hosts if others are lost or slow (default: 1)",
    )
    slurm = parser.add_argument_group("on slurm")
    slurm.add_argument("--partition", metavar="P", help="partition (default: the site's)")
    slurm.add_argument("--time", metavar="T", help="time limit such as 4h; the run saves before it, and is requeued")
    slurm.add_argument(
        "--switches", type=int, metavar="N", help="most leaf switches for the nodes (default: as few as possible)"
    )
    slurm.add_argument(
        "--slurm", action="append", default=[], metavar="OPTION", help="pass an option to sbatch, such as --account=A"
    )
    slurm.add_argument(
        "--setup", action="append", default=[], metavar="LINE", help="add a line of shell, such as 'module load cuda'"
    )
    slurm.add_argument(
        "--sweep", action="append", default=[], metavar="KEY=A,B", help="start one run for each value of a recipe key"
    )
    pods = parser.add_argument_group("on kubernetes")
    pods.add_argument("--image", metavar="I", help="image, by digest: REPOSITORY@sha256:...")
    pods.add_argument("--namespace", default="default", metavar="NS", help="namespace (default: default)")
    pods.add_argument("--claim", metavar="C", help="PersistentVolumeClaim that nodes share, mounted at /runs")
    pods.add_argument("--rack", metavar="LABEL", help="node label that names the rack; pods prefer one rack")
    pods.add_argument("--queue", metavar="Q", help="queue of Kueue")
    pods.add_argument(
        "--as",
        dest="made_as",
        choices=("jobset", "trainjob"),
        default="jobset",
        help="kind of object that trains (default: jobset)",
    )
    pods.add_argument("--replicas", type=int, default=1, metavar="N", help="serve: number of replicas (default: 1)")
    pods.add_argument("--secret", metavar="S", help="serve: secret with the API key under `key`")
    pods.add_argument("--memory", metavar="M", help="memory per pod, such as 512Gi")
    parser.add_argument("--show", action="store_true", help="print what would be submitted, and start nothing")
    parser.add_argument("--follow", action="store_true", help="print the output of the job until it ends")


def run(arguments: argparse.Namespace) -> Answer:
    work = read_work(arguments.work, arguments.folder, is_local=arguments.on == "local")
    layout = layout_of(arguments, work)
    work = placed(arguments, work, layout)
    target = target_of(arguments, work, layout)
    _check_plan(work, target)
    notes = notes_on(work, layout)
    data = {
        "on": target.on,
        "command": command_line(work),
        "folder": str(work.folder),
        "num_nodes": layout.num_nodes,
        "devices_per_node": layout.devices_per_node,
        "path": str(target.path),
        "notes": notes,
    }
    if arguments.show:
        text = target.text()
        return Answer(data={**data, "text": text}, render=lambda canvas: _draw_text(canvas, target.path, text, notes))
    check_key(arguments, work)
    target.check()
    with os_errors_as(f"the folder {work.launch_folder} cannot be written to", remedy="another --folder"):
        work.launch_folder.mkdir(parents=True, exist_ok=True)
    submitted = target.submit()
    note(work.folder, "submitted", on=target.on, job=submitted.job, command=command_line(work), layout=str(layout))
    data = {**data, "job": submitted.job, "log": None if submitted.log is None else str(submitted.log)}
    if not arguments.follow:
        return Answer(data=data, render=lambda canvas: _draw_submitted(canvas, target, submitted, work, notes))
    return _followed(arguments, submitted, data)


def _check_plan(work: Work, target: Target) -> None:
    """Refuse a plan that the model cannot have, in any of the runs of a sweep."""
    from shardwise.launch.plan_check import check_work  # Loads torch.

    for each in task_works(work, target.job) if isinstance(target, OnSlurm) else [work]:
        check_work(each)


def _followed(arguments: argparse.Namespace, submitted: Submitted, data: dict[str, object]) -> Answer:
    step_aside()
    try:
        # With --json, stdout has the answer only.
        state = follow(submitted, sys.stderr if arguments.json else sys.stdout)
    except KeyboardInterrupt:
        raise ShardwiseError(f"job {submitted.job} continues", remedy=submitted.stop) from None
    status = 0 if submitted.is_good(state) else 1
    return Answer(data={**data, "state": state}, render=lambda canvas: canvas.print(state.lower()), status=status)


def _draw_text(canvas: Canvas, path: Path, text: str, notes: list[str]) -> None:
    canvas.print(canvas.paint(f"# {path}", "bold"))
    canvas.print(text.rstrip())
    for each in notes:
        canvas.print(f"{canvas.paint('note:', 'bold')} {each}")


def _draw_submitted(canvas: Canvas, target: Target, submitted: Submitted, work: Work, notes: list[str]) -> None:
    canvas.print(f"{canvas.paint(f'{target.on} job {submitted.job}', 'bold')}, written to {target.path}")
    for each in notes:
        canvas.print(f"{canvas.paint('note:', 'bold')} {each}")
    if submitted.log is not None:
        canvas.print(f"it prints to {submitted.log}")
    canvas.print(f"how it stands: shardwise status {work.folder}")
    canvas.print(f"to end it: {submitted.stop}")
