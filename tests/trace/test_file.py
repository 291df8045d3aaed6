import json
import re
from pathlib import Path

import pytest

from shardwise.errors import ShardwiseError
from shardwise.explain.doctor.examine import examine
from shardwise.explain.report.page import make_page
from shardwise.trace.events import Event, Holding, Lane, Trace, Traffic
from shardwise.trace.file import load_trace, save_trace, to_document
from shardwise.trace.memory import held_by_owner, peak_by_owner
from shardwise.trace.run import Run, load_run, save_run
from tests.trace.devices import gpu_step
from tests.trace.played import played

MEASURED = Trace(
    name="1f1b",
    num_ranks=2,
    events=(
        Event("0F0", 0, Lane.COMPUTE, 0.0, 1.5, 0, 0, 1.0),
        Event("0SEND_F0>1", 0, Lane.SEND, 1.5, 1.75, 0, 0, after=0, peer=1),
    ),
    windows=((0.0, 2.0), (0.5, 2.0)),
    holdings=(Holding(0, "activations", 0.0, 100.0), Holding(0, "activations", 1.5, -100.0)),
    traffic=(Traffic(0, 1, "values", 1, 64.0),),
)


ON_GPUS = gpu_step(num_microbatches=1, num_kernels=2, exposed_sum=0.001, copy=0.001)


@pytest.mark.parametrize("trace", [MEASURED, played("zb-v", 2, 4, hop=0.1), played("dualpipe-v", 2, 4), ON_GPUS])
def test_a_trace_is_read_back_as_it_was_written(trace: Trace, tmp_path: Path) -> None:
    save_trace(trace, tmp_path / "trace.json")
    assert load_trace(tmp_path / "trace.json") == trace
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]


def test_a_trace_that_is_cut_short_is_told(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    save_trace(played("1f1b", 2, 4), path)
    text = path.read_text()
    for length in (len(text) - 1, len(text) // 2, 40):
        path.write_text(text[:length])
        with pytest.raises(ShardwiseError, match="is cut short at character") as caught:
            load_trace(path)
        assert "shardwise profile again" in str(caught.value)


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        ({"traceEvents": []}, "is not a trace of Shardwise"),
        ({"format": "shardwise trace", "version": 9}, "version 9, and this Shardwise reads 1"),
        ({"format": "shardwise trace", "version": 1, "num_ranks": 2}, "is a damaged trace"),
        ([], "is not a trace of Shardwise"),
    ],
)
def test_what_is_no_trace_is_refused(document: object, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(document))
    with pytest.raises(ShardwiseError, match=problem):
        load_trace(path)


def test_a_trace_from_before_streams_were_seen_has_none(tmp_path: Path) -> None:
    document = to_document(ON_GPUS)
    del document["activities"]
    (tmp_path / "trace.json").write_text(json.dumps(document))
    read = load_trace(tmp_path / "trace.json")
    assert read.activities == ()
    assert read.events == ON_GPUS.events
    assert "activities" not in to_document(MEASURED)


def changed_activities(**columns: object) -> dict[str, object]:
    document = to_document(ON_GPUS)
    given = document["activities"]
    return {**document, "activities": {**given, "columns": {**given["columns"], **columns}}}


def changed_events(**columns: object) -> dict[str, object]:
    document = to_document(MEASURED)
    return {**document, "events": {**document["events"], **columns}}


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        (changed_events(start=["soon", 1.5]), "a str in the column start"),
        (changed_events(end=[1.5]), "columns of other lengths"),
        (changed_activities(end=[1.5]), "columns of other lengths"),
        (changed_activities(name=[99] * len(ON_GPUS.activities)), "a text that is none of the"),
        (changed_activities(kind=[4] * len(ON_GPUS.activities)), "is not a valid ActivityKind"),
        (changed_activities(rank=[2] * len(ON_GPUS.activities)), "a rank that is none of the 2"),
        ({**to_document(ON_GPUS), "windows": []}, "activities of a GPU in a step that was not measured"),
        (changed_events(end=5), "the column end, which is not a list"),
        (changed_events(end=[float("nan"), 1.75]), "something from 0.0 to nan"),
        (changed_events(end=[-1.0, 1.75]), "something from 0.0 to -1.0"),
        (changed_events(after=[None, 7]), "event 1, which waits for event 7 of 2"),
        (changed_events(after=[1, 0]), "event 0, which waits for itself"),
        (changed_events(peer=[None, 2]), "a peer that is none of the 2 ranks"),
        (changed_events(lane=["compute", "compare"]), "'compare' is not a valid Lane"),
        ({**to_document(MEASURED), "windows": [[0.0, 1.0]]}, "1 windows of 2 ranks"),
        ({**to_document(MEASURED), "windows": [[0.0], [1.0]]}, "is a damaged trace"),
        ({**to_document(MEASURED), "holdings": [[5, "activations", 0.0, 1.0]]}, "a rank that is none of the 2"),
        ({**to_document(MEASURED), "traffic": [[0, 1, "values", 1, None]]}, "is a damaged trace"),
        ({**to_document(MEASURED), "num_ranks": 0}, "0 ranks"),
        ({**to_document(MEASURED), "num_ranks": "many"}, "is a damaged trace"),
        ({**to_document(MEASURED), "events": None}, "is a damaged trace"),
    ],
)
def test_what_cannot_be_is_told_and_not_drawn(document: object, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(document))
    with pytest.raises(ShardwiseError, match=re.escape(problem)) as caught:
        load_trace(path)
    assert caught.value.remedy == "shardwise profile again"


def test_a_run_is_a_folder_with_its_plan_and_its_reasons(tmp_path: Path) -> None:
    plan = 'pp = 2\nlayers = [3, 1]\n\n[offload]\noptimizer = 0.5\n\n[reasons]\npp = "two devices"\n'
    manifest = {"seed": 1, "torch": "2.13", "device_memory_bytes": 1e9, "nested": {"left": "out"}}
    save_run(Run(name="run", trace=MEASURED, predicted=MEASURED), tmp_path / "run", plan=plan, manifest=manifest)
    run = load_run(tmp_path / "run")
    assert (run.name, run.trace, run.predicted, run.memory_bytes) == ("run", MEASURED, MEASURED, 1e9)
    assert [(each.key, each.value, each.reason) for each in run.plan] == [
        ("pp", "2", "two devices"),
        ("layers", "3+1", ""),
        ("offload.optimizer", "0.5", ""),
    ]
    assert run.facts["torch"] == "2.13"


def test_a_trace_alone_is_a_run(tmp_path: Path) -> None:
    save_trace(MEASURED, tmp_path / "step.json")
    assert load_run(tmp_path / "step.json") == Run(name="step", trace=MEASURED)


def test_what_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ShardwiseError, match="there is no run at"):
        load_run(tmp_path / "nothing")
    with pytest.raises(ShardwiseError, match=r"has no trace.json"):
        load_run(tmp_path)


def test_owners_over_time_and_at_the_fullest_moment() -> None:
    trace = Trace(
        name="",
        num_ranks=2,
        events=(),
        holdings=(
            Holding(0, "parameters", 0.0, 10.0),
            Holding(0, "activations", 1.0, 5.0),
            Holding(0, "activations", 2.0, 5.0),
            Holding(0, "activations", 3.0, -10.0),
            Holding(0, "gradients", 3.0, 8.0),
            Holding(1, "parameters", 0.0, 1.0),
        ),
    )
    assert held_by_owner(trace)[0, "activations"] == ((1.0, 5.0), (2.0, 10.0), (3.0, 0.0))
    assert peak_by_owner(trace) == ({"parameters": 10.0, "activations": 10.0, "gradients": 0.0}, {"parameters": 1.0})


@pytest.mark.parametrize("windows", [(), ((0.0, 1.0), (0.0, 1.0))])
def test_a_step_in_which_nothing_was_computed_is_examined_and_drawn(
    windows: tuple[tuple[float, float], ...], tmp_path: Path
) -> None:
    save_trace(Trace(name="1f1b", num_ranks=2, events=(), windows=windows), tmp_path / "trace.json")
    run = load_run(tmp_path / "trace.json")
    assert examine(run) == []
    assert "<html" in make_page(run, None, found=[])
