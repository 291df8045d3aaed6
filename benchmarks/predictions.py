"""Predictions against published runs, beside no model at all and beside llm-analysis where it is installed.

    python benchmarks/predictions.py RUNS.csv

The null model divides a run's FLOPs by one constant for each GPU and precision, the median of its rows. Two random
halves of the rows are reported apart, to see whether the figures hang on a few of them.
"""

import sys
from collections import defaultdict
from statistics import median

import numpy as np
from published import runs_asked_for, timed
from record import record

from shardwise.model.share import Share
from shardwise.planner.runs import Run, SkippedError, layouts_of
from shardwise.planner.stated import balance_of, model_of, software_of
from shardwise.planner.validate import Prediction, summarise

TARGETS = {"mape": 0.08, "median": 0.05}
LLM_ANALYSIS_GPUS = {"a100-80g": "a100-sxm-80gb", "a100-40g": "a100-sxm-40gb", "h100-80g": "h100-sxm-80gb"}


def errors(pairs: list[tuple[float, float]]) -> dict[str, float | int]:
    """Errors of (predicted, measured)."""
    found = np.array([predicted / measured - 1 for predicted, measured in pairs])
    return {
        "rows": len(found),
        "mape": float(np.abs(found).mean()),
        "median": float(np.median(np.abs(found))),
        "bias": float(found.mean()),
    }


def flops_of(run: Run) -> float:
    """FLOPs of a step on one GPU, recomputation counted."""
    model = model_of(run)
    share = Share(sequence=run.count("sequence"), microbatch=1, flash=software_of(run).is_flash)
    work = model.flops(share)
    again = work.forward if run.text("recompute") == "full" else 0
    return float(work.total + again) * run.count("global_batch") / run.count("num_gpus")


def null_model(predictions: list[Prediction]) -> dict[str, float | int]:
    """One constant for each GPU and precision."""
    rates: dict[tuple[str, str], list[float]] = defaultdict(list)
    for each in predictions:
        rates[each.run.text("gpu"), each.run.text("precision")].append(_rate(each))
    constant = {key: median(values) for key, values in rates.items()}
    return errors(
        [(_rate(each) / constant[each.run.text("gpu"), each.run.text("precision")], 1.0) for each in predictions]
    )


def _rate(each: Prediction) -> float:
    return flops_of(each.run) / (each.run.step_seconds or 1.0)


def llm_analysis(predictions: list[Prediction]) -> dict[str, object] | None:
    """llm-analysis 0.2.2 with efficiency 0.5, as in its examples, on the rows that it can express; ours beside."""
    try:
        from llm_analysis import analysis, config  # type: ignore[import-not-found]
    except ImportError:
        return None
    theirs, ours = [], []
    for each in predictions:
        run = each.run
        if run.text("arch") == "moe" or run.text("gpu") not in LLM_ANALYSIS_GPUS or run.text("schedule"):
            continue
        try:
            seconds = _llm_analysis_seconds(analysis, config, run)
        except (AssertionError, ZeroDivisionError, SkippedError):
            continue
        measured = run.step_seconds or 1.0
        theirs.append((seconds, measured))
        ours.append((each.seconds, measured))
    return {"theirs": errors(theirs), "ours": errors(ours)}


def _llm_analysis_seconds(analysis: object, config: object, run: Run) -> float:
    layouts = layouts_of(run, balance=balance_of(run))
    hidden, ffn = run.count("hidden"), run.count("ffn_hidden")
    model = config.ModelConfig(  # type: ignore[attr-defined]
        name="run",
        num_layers=run.count("layers"),
        n_head=run.count("heads"),
        hidden_dim=hidden,
        vocab_size=run.count("vocab", 51200),
        max_seq_len=run.count("sequence"),
        num_key_value_heads=run.count("kv_heads"),
        ffn_embed_dim=ffn,
        expansion_ratio=ffn / hidden,
    )
    parallel = config.ParallelismConfig(  # type: ignore[attr-defined]
        tp_size=run.count("tp"), pp_size=run.count("pp"), dp_size=run.count("dp")
    )
    gpu = config.get_gpu_config_by_name(LLM_ANALYSIS_GPUS[run.text("gpu")])  # type: ignore[attr-defined]
    recompute = {"full": 2, "selective": 1}.get(run.text("recompute"), 0)
    tool = analysis.LLMAnalysis(  # type: ignore[attr-defined]
        model, gpu, parallelism_config=parallel, flops_efficiency=0.5, hbm_memory_efficiency=0.9
    )
    summary = tool.training(
        batch_size_per_gpu=run.count("microbatch"),
        gradient_accumulation_steps=int(layouts.num_microbatches[0]),
        seq_len=run.count("sequence"),
        activation_recomputation=analysis.ActivationRecomputation(recompute),  # type: ignore[attr-defined]
        ds_zero=analysis.DSZeRO(int(layouts.zero[0])),  # type: ignore[attr-defined]
        flash_attn=software_of(run).is_flash,
        mlp_gated_linear_units=ffn != 4 * hidden,
    )
    return float(summary["latency_per_iter"])


def halves(predictions: list[Prediction]) -> list[dict[str, float | int]]:
    """Errors of two random halves of the layouts."""
    chosen = np.random.default_rng(0).permutation(len(predictions)) % 2
    return [
        errors(
            [
                (each.seconds, each.run.step_seconds or 1.0)
                for each, part in zip(predictions, chosen, strict=True)
                if part == half
            ]
        )
        for half in (0, 1)
    ]


def main() -> int:
    runs = runs_asked_for()
    if not runs:
        return 0
    summary, predictions = summarise(runs), timed(runs)
    results = {
        "validate": summary,
        "halves": halves(predictions),
        "null_model": null_model(predictions),
        "llm_analysis": llm_analysis(predictions),
    }
    for name, found in results.items():
        print(
            name,
            {key: found[key] for key in ("time", "memory", "oom", "ranking", "inside_interval")}
            if name == "validate"
            else found,
        )
    record("predictions", results)
    time = summary["time"]
    assert isinstance(time, dict)
    return 0 if all(time[name] <= target for name, target in TARGETS.items()) else 1


if __name__ == "__main__":
    sys.exit(main())
