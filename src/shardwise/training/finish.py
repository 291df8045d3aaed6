"""What a run leaves behind when its steps are done: a sample, the manifest, the trace, and the page."""

from dataclasses import asdict, replace
from typing import Any

from shardwise.errors import ShardwiseError
from shardwise.explain.report_command import write_report
from shardwise.schedule.replay import predict
from shardwise.trace.run import Run, load_run, save_run
from shardwise.training.folder import MANIFEST, manifest_of, write_manifest
from shardwise.training.job import Job
from shardwise.training.outcome import Outcome, Result
from shardwise.training.progress import Progress
from shardwise.training.sample import sample_of

REPORT = "report.html"


def finish(job: Job, outcome: Outcome, num_ranks: int, progress: Progress) -> Result:
    """Write all that is left to write. The first rank alone calls this."""
    result, wanted = outcome.result, job.recipe.evaluation.sample
    if wanted and result.stopped_by is None:
        result = replace(result, sample=sample_of(outcome, wanted, job.recipe.seed))
    manifest: dict[str, Any] = manifest_of(
        job.recipe, job.plan, command=job.command, data=outcome.data, num_ranks=num_ranks
    )
    manifest |= {key: value for key, value in asdict(result).items() if value is not None}
    manifest["layers"] = outcome.layers
    try:
        report = _write(job, outcome, manifest)
    except (OSError, ShardwiseError) as error:
        # What was trained is safe: a page that cannot be written must not look like a run that failed.
        why = error.problem if isinstance(error, ShardwiseError) else f"{error.filename}: {error.strerror}"
        progress.warn(f"the report of this run cannot be written: {why}")
        return result
    return replace(result, report=report)


def _write(job: Job, outcome: Outcome, manifest: dict[str, Any]) -> str | None:
    """Manifest, trace and page. Returns where the page is."""
    if outcome.trace is None:
        # Nothing was left to do, or it was stopped before its first line: what is there stays.
        if not (job.folder / MANIFEST).exists():
            write_manifest(job.folder, manifest)
        return None
    run = Run(name=job.folder.name, trace=outcome.trace, predicted=predict(outcome.trace))
    save_run(run, job.folder, plan=job.plan.to_toml(), manifest=manifest)
    page = job.folder / REPORT
    write_report(load_run(job.folder), page)
    return str(page)
