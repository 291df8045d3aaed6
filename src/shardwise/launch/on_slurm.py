"""Start on Slurm: a script for `sbatch`, checked against what the site has."""

from dataclasses import dataclass, replace
from pathlib import Path

from shardwise.launch.layout import Layout
from shardwise.launch.slurm_script import SlurmJob, slurm_script, task_works
from shardwise.launch.slurm_site import (
    OVER,
    check_installed,
    check_partition,
    fewest_switches,
    find_job,
    read_partitions,
    submit,
)
from shardwise.launch.target import Submitted
from shardwise.launch.tools import try_asking
from shardwise.launch.work import Work
from shardwise.output import save_output


@dataclass(frozen=True, slots=True, kw_only=True)
class OnSlurm:
    """One job, or an array of them for a sweep."""

    work: Work
    layout: Layout
    job: SlurmJob
    partition: str | None = None
    on: str = "slurm"

    @property
    def path(self) -> Path:
        return self.work.launch_folder / "slurm.sh"

    def text(self) -> str:
        return slurm_script(self.work, self.layout, self.job)

    def check(self) -> None:
        check_installed()
        check_partition(read_partitions(), self.partition, self.layout, self.job.num_minutes)

    def submit(self) -> Submitted:
        """Write the script, with the site's switches, and submit it."""
        job = replace(self.job, switches=self.job.switches or fewest_switches(self.layout.num_nodes))
        save_output(self.path, slurm_script(self.work, self.layout, job))
        if job.sweep:
            for each in task_works(self.work, job):
                each.folder.mkdir(parents=True, exist_ok=True)
        number = submit(str(self.path))
        return Submitted(
            job=number,
            log=None if job.sweep else self.work.launch_folder / f"slurm-{number}.out",
            state=(lambda: _array_state(number)) if job.sweep else (lambda: job_state(number)),
            is_over=lambda state: state in OVER,
            is_good=lambda state: state == "COMPLETED",
            stop=f"scancel {number}",
        )


def job_state(number: str) -> str:
    """Return Slurm's state of a job; COMPLETED if Slurm has forgotten it."""
    found = find_job(number)
    return "COMPLETED" if found is None else found.get("JobState", "UNKNOWN")


def _array_state(number: str) -> str:
    """Return one state for all tasks: that of a task which has not ended; else the worst."""
    told = try_asking(["squeue", "--noheader", "--array", "--states=all", "--format=%T", "--jobs", number])
    states = set(told.stdout.split())
    going = sorted(states - set(OVER))
    return going[0] if going else next(iter(sorted(states - {"COMPLETED"})), "COMPLETED")
