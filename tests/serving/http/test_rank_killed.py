"""A rank that is killed while it serves: its requests are told within seconds, others go on, and it comes back."""

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardwise.serving.limits import Limits
from shardwise.serving.served import served_by
from shardwise.serving.sharded import load_sharded
from tests.nets.families import save_theirs
from tests.serving.answers import expected, prompts
from tests.serving.http.serving_here import Running, running
from tests.serving.http.test_overload import wait_until

LIMITS = Limits(kv_bytes=2**20, block_size=4, token_budget=24, max_running=24)
PROMPT = prompts(1)[0]
BODY: dict[str, Any] = {
    "prompt": list(PROMPT), "temperature": 0, "max_tokens": 12, "ignore_eos": True, "return_token_ids": True,
}  # fmt: skip


@contextmanager
def served(plan: str, folder: Path) -> Iterator[tuple[Running, Any]]:
    theirs = save_theirs("llama", folder)
    engine = load_sharded(str(folder), plan, LIMITS)
    with running(engine, served=served_by(engine, "mine")) as here:
        yield here, theirs


def slow_down(engine: Any) -> None:
    """Steps of a tenth of a second: who is killed amid an answer is killed amid an answer."""
    plain = engine.runner.run

    def run(inputs: Any) -> Any:
        time.sleep(0.1)
        return plain(inputs)

    engine.runner.run = run


def kill(engine: Any, rank: int) -> None:
    os.kill(engine.runner.ranks.process_ids[rank], signal.SIGKILL)


def tokens(here: Running) -> Any:
    answer = here.complete(**BODY)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"]


def test_its_requests_fail_at_once_and_later_ones_are_answered(tmp_path: Path) -> None:
    with served("tp=2", tmp_path) as (here, theirs), here.client() as client:
        right = expected(theirs, PROMPT, 12)
        assert tokens(here) == right
        slow_down(here.engine)
        with client.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as answer:
            lines = answer.iter_lines()
            next(lines)
            kill(here.engine, 1)
            last = [line for line in lines if line][-1]
        # What was seen is its death, and not its silence: no limit of time has passed.
        error = json.loads(last.removeprefix("data: "))["error"]
        assert error["message"] == "the engine has failed: rank 1 was killed by SIGKILL (signal 9)"
        assert error["type"] == "server_error"
        health = client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "failed")
        assert "rank 1 was killed by SIGKILL" in health.json()["reason"]
        refused = here.complete(**BODY)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "engine_failed"
        wait_until(lambda: client.get("/health").status_code == 200)
        assert tokens(here) == right
        # Also while nobody asks: it is told, and it comes back by itself.
        seen = set[int]()
        kill(here.engine, 0)

        def is_back() -> bool:
            seen.add(client.get("/health").status_code)
            return 503 in seen and client.get("/health").status_code == 200

        wait_until(is_back)
        assert tokens(here) == right
        assert here.engine.load().num_used_blocks == 0


def test_a_replica_that_is_killed_takes_its_own_requests_alone(tmp_path: Path) -> None:
    with served("dp=2", tmp_path) as (here, theirs), here.client() as client:
        right = expected(theirs, PROMPT, 12)
        for engine in here.engine.engines:
            slow_down(engine)
        answers = dict[int, list[str]]()
        with client.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as one:
            lines = one.iter_lines()
            answers[0] = [next(lines)]
            home = next(iter(here.engine._homes.values()))
            other = next(each for each in here.engine.engines if each is not home)
            kill(other, 0)
            wait_until(lambda: client.get("/health").json()["status"] == "partly")
            assert "rank 0 was killed" in client.get("/health").json()["reason"]
            answers[0] += [line for line in lines if line]
        assert answers[0][-1] == "data: [DONE]"
        wait_until(lambda: client.get("/health").json()["status"] == "ok")
        with client.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as one:
            lines = one.iter_lines()
            next(lines)
            kill(next(iter(here.engine._homes.values())), 0)
            answers[1] = list(lines)
        assert "a replica has failed: rank 0 was killed by SIGKILL" in "".join(answers[1])
        assert tokens(here) == right  # By the other, at once.
