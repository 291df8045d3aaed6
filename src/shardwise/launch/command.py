"""`shardwise launch`: start a training or a server where a site runs its jobs."""

import argparse
import sys
from pathlib import Path

from shardwise.answer import Answer, Canvas
from shardwise.errors import ShardwiseError, os_errors_as
from shardwise.launch.chosen import layout_of, placed, target_of
from shardwise.launch.layout import notes_on
from shardwise.launch.target import Submitted, Target, follow
from shardwise.launch.work import Work, command_line, read_work
from shardwise.trace.journal import note
from shardwise.working import step_aside

DESCRIPTION = """Start a training or a server where a site starts its jobs: on this machine, on hosts over ssh, on
Slurm, on Kubernetes. What is needed for that is written to the folder of the run, in launch/, and handed over; the
command ends then, and the run goes on. After the -- stands what is started, as one would type it without launch.
"""

EXAMPLE = """
shardwise launch --on local --devices-per-node 2 --show -- train tiny --folder runs/tiny
shardwise launch --on slurm --devices-per-node 8 --time 4h --show -- train tiny --plan dp=8,tp=2 --folder runs/tiny
shardwise launch --on hosts --hosts node1,node2 --show -- train tiny --plan dp=4 --folder runs/tiny
"""

PLACES = ("local", "hosts", "slurm", "kubernetes")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("work", nargs="*", metavar="-- train|serve ...", help="what is started")
    parser.add_argument("--on", required=True, choices=PLACES, help="where")
    parser.add_argument("--nodes", type=int, metavar="N", help="how many machines (as the plan needs)")
    parser.add_argument("--devices-per-node", type=int, metavar="N", help="ranks on each (as the plan needs)")
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu", help="what a rank computes on (gpu)")
    parser.add_argument("--cluster", metavar="C", help="a name like 2x8xh100 or a cluster.toml, instead of these")
    parser.add_argument("--python", default=sys.executable, metavar="P", help="the Python of the machines (this one)")
    parser.add_argument("--port", type=int, metavar="N", help="where ranks meet (a free one; on hosts 29500)")
    parser.add_argument(
        "--restarts", type=int, default=3, metavar="N", help="how often failed ranks are started again (3)"
    )
    parser.add_argument(
        "--save-before", default="2min", metavar="T", help="how long it has to save, before a limit or an end (2min)"
    )
    parser.add_argument("--cpus", type=int, metavar="N", help="cores of a node (Slurm: one for each device; pods: 8)")
    parser.add_argument("--env", action="append", default=[], metavar="NAME[=VALUE]", help="a variable for the ranks")
    parser.add_argument("--folder", metavar="FOLDER", help="of a server: where its script and log go")
    hosts = parser.add_argument_group("on hosts")
    hosts.add_argument("--hosts", metavar="A,B", help="machines that ssh reaches, first to last")
    hosts.add_argument("--ssh", default="ssh", metavar="S", help="with its options (ssh)")
    hosts.add_argument(
        "--least-hosts", type=int, metavar="N", help="with how many a run goes on if others are lost or slow (1)"
    )
    slurm = parser.add_argument_group("on slurm")
    slurm.add_argument("--partition", metavar="P", help="the queue (the site's default)")
    slurm.add_argument(
        "--time", metavar="T", help="a limit like 4h; when it is near the run saves, and is queued again"
    )
    slurm.add_argument(
        "--switches", type=int, metavar="N", help="how many switches nodes may hang on (as few as can be)"
    )
    slurm.add_argument("--slurm", action="append", default=[], metavar="OPTION", help="of sbatch, such as --account=A")
    slurm.add_argument(
        "--setup", action="append", default=[], metavar="LINE", help="of shell, such as 'module load cuda'"
    )
    slurm.add_argument(
        "--sweep", action="append", default=[], metavar="KEY=A,B", help="one run for each value of a key"
    )
    pods = parser.add_argument_group("on kubernetes")
    pods.add_argument("--image", metavar="I", help="by its digest: REPOSITORY@sha256:...")
    pods.add_argument("--namespace", default="default", metavar="NS", help="where (default)")
    pods.add_argument("--claim", metavar="C", help="a PersistentVolumeClaim that nodes share; runs lie there, in /runs")
    pods.add_argument("--rack", metavar="LABEL", help="of nodes, that says their rack: neighbours are put in one")
    pods.add_argument("--queue", metavar="Q", help="of Kueue")
    pods.add_argument(
        "--as", dest="made_as", choices=("jobset", "trainjob"), default="jobset", help="what trains (jobset)"
    )
    pods.add_argument("--replicas", type=int, default=1, metavar="N", help="of a server (1)")
    pods.add_argument("--secret", metavar="S", help="with a server's API key under `key`")
    pods.add_argument("--memory", metavar="M", help="of a pod, such as 512Gi")
    parser.add_argument("--show", action="store_true", help="show what would be handed over, and start nothing")
    parser.add_argument("--follow", action="store_true", help="print what it prints, until it is over")


def run(arguments: argparse.Namespace) -> Answer:
    work = read_work(arguments.work, arguments.folder)
    layout = layout_of(arguments, work)
    work = placed(arguments, work, layout)
    target = target_of(arguments, work, layout)
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
    target.check()
    with os_errors_as(f"the folder {work.launch_folder} cannot be written to", remedy="another --folder"):
        work.launch_folder.mkdir(parents=True, exist_ok=True)
    submitted = target.submit()
    note(work.folder, "submitted", on=target.on, job=submitted.job, command=command_line(work), layout=str(layout))
    data = {**data, "job": submitted.job, "log": None if submitted.log is None else str(submitted.log)}
    if not arguments.follow:
        return Answer(data=data, render=lambda canvas: _draw_submitted(canvas, target, submitted, work, notes))
    return _followed(arguments, submitted, data)


def _followed(arguments: argparse.Namespace, submitted: Submitted, data: dict[str, object]) -> Answer:
    step_aside()
    try:
        # With --json, stdout has the answer only.
        state = follow(submitted, sys.stderr if arguments.json else sys.stdout)
    except KeyboardInterrupt:
        raise ShardwiseError(f"job {submitted.job} goes on", remedy=submitted.stop) from None
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
