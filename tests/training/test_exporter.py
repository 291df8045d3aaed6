"""What Prometheus is told of a training run, read by its own parser."""

import time
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import pytest

from shardwise.errors import ShardwiseError
from shardwise.trace.journal import note
from shardwise.training.exporter import Exporter, Facts, check_exporter, text_of
from shardwise.training.job import Watching
from shardwise.training.run import train_rank
from tests.training.programs import make_job

parser = pytest.importorskip("prometheus_client.parser")


def samples(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in parser.text_string_to_metric_families(text):
        for each in family.samples:
            found.setdefault(each.name, []).append((each.labels, each.value))
    return found


def test_the_official_parser_reads_all_of_it() -> None:
    facts = Facts(run='runs/"odd"\\\n', plan="dp=2", parts={"compute": 0.25, "data wait": 0.125})
    facts.numbers |= {"step": 20, "loss": 1.5, "restarts_total": 2, "mfu": 0.4}
    facts.slow, facts.saved, facts.copied = ((1, "node2", "data"),), 90.0, 99.5
    told = samples(text_of(facts, 100.0))
    assert told["shardwise_train_info"] == [({"run": 'runs/"odd"\\\n', "plan": "dp=2"}, 1)]
    assert told["shardwise_train_loss"] == [({}, 1.5)]
    assert told["shardwise_train_restarts_total"] == [({}, 2)]
    assert told["shardwise_train_checkpoint_age_seconds"] == [({}, 10.0)]
    assert told["shardwise_train_copy_age_seconds"] == [({}, 0.5)]
    assert told["shardwise_train_part_seconds"][1] == ({"part": "data wait"}, 0.125)
    assert told["shardwise_train_slow_rank"] == [({"rank": "1", "host": "node2", "cause": "data"}, 1)]


def test_it_is_told_over_http_and_no_more_when_it_is_closed() -> None:
    exporter = Exporter(Watching(port=0), Facts(run="run", plan="dp=1"))
    address = f"http://127.0.0.1:{exporter.port}"
    with urlopen(f"{address}/metrics", timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        assert "shardwise_train_info" in samples(answer.read().decode())
    with pytest.raises(HTTPError):
        urlopen(f"{address}/other", timeout=10)
    with pytest.raises(ShardwiseError, match=f"metrics cannot be served at 127.0.0.1:{exporter.port}: Address already"):
        check_exporter(Watching(port=exporter.port))
    exporter.close()
    with pytest.raises(URLError, match="refused"):
        urlopen(f"{address}/metrics", timeout=10)


def test_a_run_writes_them_for_node_exporter_while_it_goes_on(tmp_path: Path) -> None:
    folder, file, seen = tmp_path / "run", tmp_path / "train.prom", list[str]()
    folder.mkdir()
    for _ in range(2):
        note(folder, "start", step=0, plan="dp=1")
    is_over = False

    def look() -> None:
        while not is_over:
            if file.is_file() and (text := _read(file)) and text not in seen:
                seen.append(text)
            time.sleep(0.001)

    watcher = Thread(target=look)
    watcher.start()
    job = replace(make_job(folder, "dp=1", steps=4, log=1, checkpoint__every=2), watching=Watching(file=file))
    train_rank(job)
    is_over = True
    watcher.join()
    told = [samples(text) for text in seen]
    assert told[0]["shardwise_train_step"] == [({}, 0)]
    assert told[0]["shardwise_train_steps"] == [({}, 4)]
    last: dict[str, Any] = told[-1]
    assert last["shardwise_train_restarts_total"] == [({}, 2)]
    assert last["shardwise_train_tokens_per_second"][0][1] > 0
    assert {labels["part"] for labels, _ in last["shardwise_train_part_seconds"]} >= {"compute", "data wait"}
    assert not file.exists(), "what is over is told no more"


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


@pytest.mark.parametrize(
    ("watching", "said"),
    [
        (Watching(port=70_000), "--metrics-port 70000: ports are 1 to 65535"),
        (Watching(file=Path("train.txt")), "--metrics-file train.txt: node_exporter reads files that end in .prom"),
        (Watching(file=Path("nowhere/train.prom")), "there is no folder nowhere"),
    ],
)
def test_what_could_not_be_told_is_refused_before_ranks_are_started(watching: Watching, said: str) -> None:
    with pytest.raises(ShardwiseError, match=said):
        check_exporter(watching)
