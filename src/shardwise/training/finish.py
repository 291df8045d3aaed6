"""What a run leaves behind when its steps are done: a sample, the manifest, the trace, and the page."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from shardwise.errors import ShardwiseError
from shardwise.explain.report_command import write_report
from shardwise.nets.initialise import initialise
from shardwise.nets.transformer import Transformer
from shardwise.nets.weights import place
from shardwise.schedule.replay import predict
from shardwise.trace.run import Run, load_run, save_run
from shardwise.training.checkpoint.read import Reader
from shardwise.training.data.documents import STDLIB
from shardwise.training.data.tokenizer import get_tokenizer
from shardwise.training.folder import MANIFEST, manifest_of, write_manifest
from shardwise.training.loop import Outcome
from shardwise.training.model import make_module, settings_from
from shardwise.training.progress import Progress
from shardwise.training.sample import continued
from shardwise.training.setup import Job

#: Larger models are not put together on one processor for a sample.
_LARGEST_SAMPLED = 2_000_000_000
_PROMPT = "def "
REPORT = "report.html"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A run that is over, in plain values. `sample` has the prompt before what the model wrote."""

    run: str
    step: int
    loss: float | None
    held_out_loss: float | None
    seconds: float
    tokens_per_second: float
    num_parameters: int
    plan: str
    checkpoint: str | None
    expert_imbalance: float | None = None
    stopped_by: str | None = None
    sample: str | None = None
    report: str | None = None


def finish(job: Job, outcome: Outcome, num_ranks: int, progress: Progress) -> Result:
    """Write all that is left to write. The first rank alone calls this."""
    result = Result(
        run=str(job.folder),
        step=outcome.step,
        loss=outcome.loss,
        held_out_loss=outcome.held_out_loss,
        seconds=outcome.seconds,
        tokens_per_second=outcome.num_tokens / outcome.seconds,
        num_parameters=outcome.num_parameters,
        plan=str(job.plan),
        checkpoint=None if outcome.checkpoint is None else str(outcome.checkpoint),
        expert_imbalance=outcome.expert_imbalance,
        stopped_by=outcome.stopped_by,
    )
    wanted = job.recipe.evaluation.sample
    if wanted and outcome.stopped_by is None and outcome.checkpoint is not None:
        result = replace(result, sample=_sample(outcome, wanted, job.recipe.seed))
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


def load_transformer(folder: Path) -> tuple[Transformer, Reader]:
    """The model of a checkpoint, whole, on the CPU, and the checkpoint."""
    reader = Reader(folder)
    model = make_module(settings_from(reader.index.extra.get("model", {}), origin=folder))
    initialise(model, 0, device="cpu")
    with torch.no_grad():
        for name in reader.weights:
            place(model, name).copy_(reader.whole(name))
    return model.eval(), reader


def _sample(outcome: Outcome, num_tokens: int, seed: int) -> str | None:
    """A text by the model of the last checkpoint, if it is small, a transformer of ours, and its tokens can be read."""
    word = outcome.data["tokenizer"]
    is_ours = "family" in outcome.model
    if not is_ours or outcome.num_parameters > _LARGEST_SAMPLED or outcome.checkpoint is None:
        return None
    try:
        tokenizer = get_tokenizer(word)
    except ShardwiseError:  # It is no longer where it was, or cannot be read here: the run is whole without a sample.
        return None
    model, _ = load_transformer(outcome.checkpoint)
    prompt = _PROMPT if outcome.data["source"] == STDLIB else "The "
    tokens = list(tokenizer.encode(prompt.encode()))
    if not tokens:  # A tokenizer may have no word for the prompt.
        prompt, tokens = "", [0]
    if model.positions is not None:
        num_tokens = min(num_tokens, model.settings.length - len(tokens))
    return prompt + tokenizer.decode(continued(model, tokens, num_tokens, seed))
