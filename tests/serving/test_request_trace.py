"""What requests waited for is recorded, and the doctor names it: each cause is made on purpose."""

import time
from pathlib import Path
from typing import Any

import pytest

from shardwise.cli import main
from shardwise.explain.doctor.examine import examine
from shardwise.ranks.spawn import Ranks
from shardwise.serving.limits import Limits
from shardwise.serving.request import Request
from shardwise.serving.request_trace import RecordedEngine
from shardwise.serving.sharded import load_sharded
from shardwise.trace.run import load_run
from tests.nets.families import save_theirs
from tests.serving.answers import ask, both, engine_over, prompts, run


def slow_down(engine: Any, seconds: float) -> None:
    """Steps take as long as they have tokens."""
    plain = engine.runner.run

    def slowly(inputs: Any) -> Any:
        time.sleep(seconds * len(inputs.tokens))
        return plain(inputs)

    engine.runner.run = slowly


def found_in(engine: Any, folder: Path, requests: list[Request]) -> list[Any]:
    recorded = RecordedEngine(engine, folder)
    run(recorded, requests)
    recorded.close()
    found = load_run(folder)
    for number, (start, end) in enumerate(found.trace.windows):
        own = [event for event in found.trace.events if event.rank == number]
        assert sum(event.seconds for event in own) == pytest.approx(end - start), "events add up"
    return examine(found)


def many(count: int, length: int, num_tokens: int = 6) -> list[Request]:
    given = prompts(count, shortest=length, longest=length)
    return [ask(prompt, f"r{number}", num_tokens=num_tokens) for number, prompt in enumerate(given)]


def test_too_few_blocks(tmp_path: Path) -> None:
    engine = engine_over(both("llama")[1], num_blocks=7, max_length=28)
    slow_down(engine, 0.0005)
    assert found_in(engine, tmp_path, many(6, 18))[0].kind == "waited for blocks"


def test_too_few_places(tmp_path: Path) -> None:
    engine = engine_over(both("llama")[1], max_running=1, token_budget=64)
    slow_down(engine, 0.0005)
    assert found_in(engine, tmp_path, many(5, 4))[0].kind == "waited for a place"


def test_prompts_of_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = engine_over(both("llama")[1], token_budget=20, max_running=8, num_blocks=200)
    slow_down(engine, 0.0005)
    assert found_in(engine, tmp_path, [*many(1, 3, 20), *many(7, 20, 2)[1:]])[0].kind == "waited for other prompts"
    assert main(["doctor", str(tmp_path)]) == 0
    assert "requests wait while prompts of others are read" in capsys.readouterr().out
    assert main(["report", str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "request 3" in page
    assert "waited for other prompts" in page or "requests wait while prompts of others are read" in page
    drawn = capsys.readouterr().out
    assert f"{tmp_path.name}: 7 requests in " in drawn
    assert "other prompts" in drawn.splitlines()[1]
    head, _, rest = page.partition("<body>")[2].partition('<section id="timeline"')
    assert "7 requests to " in head
    # A request has no steps, ranks or bubbles, and nothing was measured of its memory.
    for word in ("rank", "bubble", "microbatch", "schedule"):
        assert word not in head
        assert word not in drawn
    assert "Where the time went" in rest
    assert 'id="memory" hidden>' in rest


def test_a_slow_tier(tmp_path: Path) -> None:
    engine = engine_over(both("llama")[1], num_blocks=9, host_bytes=2**20, measured=False)
    run(engine, many(4, 18, 2))
    assert engine.tiers is not None
    plain = engine.tiers.store.bring

    def slowly(wanted: Any, within: Any = None) -> int:
        time.sleep(0.05)
        return plain(wanted, within)

    engine.tiers.store.bring = slowly  # type: ignore[method-assign]
    first = many(4, 18, 2)[0]
    requests = [Request(id="again", prompt=first.prompt, sampling=first.sampling)]
    assert found_in(engine, tmp_path, requests)[0].kind == "waited for a tier"


def _slow(seconds: float) -> None:
    """On the second rank: its layers take longer."""
    import torch.distributed as dist

    from shardwise.serving.ranked import _HELD

    if dist.get_rank() == 1:
        _HELD["part"].model.layers[0].attention.register_forward_pre_hook(lambda *_: time.sleep(seconds))


def test_a_slow_rank(two: Ranks, tmp_path: Path) -> None:
    save_theirs("llama", tmp_path / "model")
    limits = Limits(kv_bytes=2**20, block_size=4, token_budget=24, max_running=24)
    engine = load_sharded(str(tmp_path / "model"), "tp=2", limits, ranks=two)
    two.run(_slow, 0.2)
    found = found_in(engine, tmp_path / "kept", many(1, 6, 4))
    assert found[0].kind == "waited for a rank"
    assert "rank 1 computes longer" in found[0].problem


def test_nothing_is_found_where_nothing_is_wrong(tmp_path: Path) -> None:
    engine = engine_over(both("llama")[1])
    slow_down(engine, 0.0005)
    assert found_in(engine, tmp_path, many(1, 12)) == []
