"""The final output of a run: a sample, the manifest, the trace, and the report page."""

import json
from dataclasses import asdict, replace
from typing import Any

from shardwise.errors import ShardwiseError
from shardwise.explain.report_command import write_report
from shardwise.output import write_whole
from shardwise.training.folder import MANIFEST, manifest_of, save_step
from shardwise.training.job import Job
from shardwise.training.outcome import Outcome, Result
from shardwise.training.progress import Progress
from shardwise.training.sample import sample_of

REPORT = "report.html"


def finish(job: Job, outcome: Outcome, num_ranks: int, progress: Progress) -> Result:
    """Write the final output and return the complete result. Only the first rank calls this."""
    result, wanted = outcome.result, job.recipe.evaluation.sample
    if wanted and result.stopped_by is None:
        result = replace(result, sample=sample_of(outcome, wanted, job.recipe.seed))
    manifest = manifest_of(job, outcome.data, num_ranks)
    manifest |= {key: value for key, value in asdict(result).items() if value is not None}
    manifest |= outcome.cut
    try:
        report = _write(job, outcome, manifest)
    except (OSError, ShardwiseError) as error:
        # The training itself is saved: a page that cannot be written must not look like a failed run.
        why = error.problem if isinstance(error, ShardwiseError) else f"{error.filename}: {error.strerror}"
        progress.warn(f"the report of this run cannot be written: {why}")
        return result
    return replace(result, report=report)


def _write(job: Job, outcome: Outcome, manifest: dict[str, Any]) -> str | None:
    """Write manifest, trace and page. Return the path of the page."""
    if outcome.trace is None:
        # No step was left to do, or the run stopped before its first logged step: keep the existing files.
        if not (job.folder / MANIFEST).exists():
            write_whole(job.folder / MANIFEST, json.dumps(manifest, indent=2) + "\n")
        return None
    page = job.folder / REPORT
    write_report(save_step(job, outcome.trace, manifest), page)
    return str(page)
