"""A Slurm job as a script for `sbatch`: `srun` starts one `torchrun` on each node.

#SBATCH            the request: nodes, devices, time, switches
begin, report      the first node chooses a port; all nodes must see one folder and have the same versions, or it ends
srun ... &         the ranks; after a failure they are started again, a limited number of times
trap tell USR1     sent before the time limit: ranks save and end, and the job is requeued
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardwise.launch.layout import Layout
from shardwise.launch.torchrun import module_words, torchrun_options
from shardwise.launch.work import Work, as_comment


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmJob:
    """The request to Slurm besides nodes and devices. `options` are passed to sbatch unchanged.

    `switches` is the most leaf switches that the nodes may span, and how long to wait for that; `sweep` has for each
    task of an array its changes of the recipe.
    """

    python: str
    num_minutes: int | None = None
    save_seconds: int = 120
    num_restarts: int = 3
    port: int | None = None
    switches: int | None = None
    cpus_per_task: int | None = None
    options: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    sweep: tuple[tuple[str, ...], ...] = ()


#: How long Slurm may wait for nodes on few switches before it takes others.
_SWITCH_WAIT = "12:00:00"


def slurm_script(work: Work, layout: Layout, job: SlurmJob) -> str:
    """Return the whole script."""
    lines = ["#!/bin/bash", f"# {as_comment(work)}", f"# on {layout}. Written by shardwise launch."]
    lines += [f"#SBATCH {option}" for option in _options(work, layout, job)]
    lines += ["set -uo pipefail", f"python={shlex.quote(job.python)}", *job.setup]
    lines += _folder_lines(work, job)
    lines += ["", f'exec srun "$python" {module_words(work)}'] if work.kind == "serve" else _training(work, layout, job)
    return "\n".join(lines) + "\n"


def task_works(work: Work, job: SlurmJob) -> list[Work]:
    """Return the work of each task of an array; without a sweep, the single run."""
    if not job.sweep:
        return [work]
    return [work.changed(changes, work.folder / _task_name(changes)) for changes in job.sweep]


def _task_name(changes: Sequence[str]) -> str:
    """Return a name such as `rate=1e-3,width=64`: keys without their table."""
    pairs = [change.partition("=") for change in changes]
    return ",".join(f"{key.rpartition('.')[2]}={value}" for key, _, value in pairs)


def _options(work: Work, layout: Layout, job: SlurmJob) -> list[str]:
    name = "slurm-%A_%a.out" if job.sweep else "slurm-%j.out"
    options = [
        f"--job-name={work.safe_name}",
        f"--nodes={layout.num_nodes}",
        "--ntasks-per-node=1",
        f"--output={shlex.quote(str(work.launch_folder / name))}",
        "--open-mode=append",
    ]
    if layout.has_gpus:
        options.append(f"--gpus-per-node={layout.devices_per_node}")
    options.append(f"--cpus-per-task={job.cpus_per_task or layout.devices_per_node}")
    if job.num_minutes is not None:
        options.append(f"--time={job.num_minutes}")
    if job.switches is not None:
        options.append(f"--switches={job.switches}@{_SWITCH_WAIT}")
    if job.sweep:
        options.append(f"--array=0-{len(job.sweep) - 1}")
    if work.kind == "train":
        options.append("--requeue")
        if job.num_minutes is not None:
            options.append(f"--signal=B:USR1@{job.save_seconds}")
    return [*options, *job.options]


def _folder_lines(work: Work, job: SlurmJob) -> list[str]:
    if not job.sweep:
        return [f"folder={shlex.quote(str(work.folder))}", "changes=()"]
    lines = ["case $SLURM_ARRAY_TASK_ID in"]
    for number, (task, changes) in enumerate(zip(task_works(work, job), job.sweep, strict=True)):
        sets = shlex.join([word for change in changes for word in ("--set", change)])
        lines.append(f"{number}) folder={shlex.quote(str(task.folder))} changes=({sets}) ;;")
    return [*lines, "esac"]


def _training(work: Work, layout: Layout, job: SlurmJob) -> list[str]:
    words = list(work.words)
    place = words.index("--folder")
    del words[place : place + 2]  # The script has it as a variable.
    return _TRAIN.format(
        port="" if job.port is None else f" --port {job.port}",
        options=torchrun_options(layout, address='"$address"', port='"$port"'),
        words=module_words(replace(work, words=tuple(words))),
        restarts=job.num_restarts,
    ).splitlines()


_TRAIN = r"""
# Addresses as Slurm knows them: names of nodes need not be known to anybody else.
address=$(scontrol --oneliner show node "$SLURMD_NODENAME" | sed 's/.* NodeAddr=\([^ ]*\).*/\1/')
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | tr '\n' ' ')
patience=$(($(scontrol show config | sed -n 's/^SlurmdTimeout *= \([0-9]*\).*/\1/p') + 60))
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
at_node() {{ "$python" -m shardwise.launch.at_node "$@" --folder "$folder"; }}

told= step=
tell() {{
    told=1
    # Again and again: ranks that were only just started do not listen yet. Those that do hear the first alone.
    while [ -n "$step" ] && kill -USR1 "$step" 2>/dev/null; do sleep 5; done &
}}
trap tell USR1

for restart in $(seq 0 {restarts}); do
    export SHARDWISE_ATTEMPT="slurm job $SLURM_JOB_ID, requeued ${{SLURM_RESTART_COUNT:-0}}, restarted $restart"
    begun=$(at_node begin --nodes "$nodes" --job "$SLURM_JOB_ID" \
        --restart "${{SLURM_RESTART_COUNT:-0}}"{port}) || exit 1
    read -r port mark <<<"$begun"
    # Ranks that failed may have lost their node. Slurm notices in a while, ends this job and queues it again.
    for _ in $(seq 0 10 "$patience"); do
        reports=$(srun --kill-on-bad-exit=1 "$python" -m shardwise.launch.at_node report \
            --folder "$folder" --mark "$mark")
        seen=$?
        [ "$seen" != 0 ] && [ "$restart" != 0 ] || break
        sleep 10
    done
    [ "$seen" = 0 ] && at_node judge <<<"$reports" || exit 1
    if [ -n "$told" ]; then status=0 next=requeue; break; fi
    # torchrun itself does not hear USR1: it would end its ranks.
    srun --kill-on-bad-exit=1 bash -c \
        'trap "" USR1; exec "$0" -m torch.distributed.run --node-rank "$SLURM_NODEID" "$@"' "$python" \
        {options} \
        {words} --folder "$folder" "${{changes[@]}}" &
    step=$!
    # A signal ends a wait, and not what is waited for.
    while :; do wait "$step"; status=$?; kill -0 "$step" 2>/dev/null || break; done
    step=
    next=$(at_node end --status "$status" --script "$0")
    [ "$next" = again ] && [ -z "$told" ] || break
done
if [ "$next" = requeue ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
"""
