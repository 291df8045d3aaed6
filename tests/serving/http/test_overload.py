"""More asked than can be answered, clients that leave, an engine that fails: bounded, fair, and nothing leaks."""

import asyncio
import random
import socket
import threading
import time
from collections import Counter
from typing import Any

import httpx
import pytest

from shardwise.serving.http.fair_queue import FairQueue
from shardwise.serving.http.retry_after import RetryAfter
from tests.serving.http.repeating import RepeatingEngine
from tests.serving.http.serving_here import Running, running


def wait_until(holds: Any) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline, "it does not come to hold"
        time.sleep(0.01)


def assert_nothing_left(here: Running) -> None:
    wait_until(lambda: here.engine.load().num_running == here.engine.load().num_waiting == 0)
    assert here.engine.load().num_used_blocks == 0
    assert here.server.loop.tickets() == []
    assert here.server.loop.num_waiting == 0


def leaving(here: Running, count: int, seed: int) -> None:
    """Clients that leave at any time: before the answer, amid a stream, or not at all."""
    draw = random.Random(seed)

    async def one(client: httpx.AsyncClient, is_streamed: bool, patience: float) -> None:
        body = {"prompt": "letters", "max_tokens": draw.randint(1, 400), "n": draw.randint(1, 3), "stream": is_streamed}
        try:
            async with asyncio.timeout(patience):
                async with client.stream("POST", "/v1/completions", json=body) as answer:
                    async for _ in answer.aiter_bytes():
                        pass
        except TimeoutError:
            pass

    async def all_of_them() -> None:
        limits = httpx.Limits(max_connections=32)
        async with httpx.AsyncClient(base_url=here.url, timeout=60, trust_env=False, limits=limits) as client:
            gate = asyncio.Semaphore(16)

            async def gated() -> None:
                async with gate:
                    await one(client, draw.random() < 0.5, draw.choice([0.001, 0.01, 0.03, 0.1, 0.3]))

            await asyncio.gather(*(gated() for _ in range(count)))

    asyncio.run(all_of_them())


def test_clients_that_leave_leave_nothing_behind() -> None:
    with running(RepeatingEngine(step_seconds=0.0005)) as here:
        leaving(here, 80, seed=1)
        assert_nothing_left(here)
        assert here.complete(prompt="say: still here").json()["choices"][0]["text"] == "still here"


@pytest.mark.whole
def test_a_thousand_clients_that_leave_leave_nothing_behind() -> None:
    with running(RepeatingEngine(step_seconds=0.0005)) as here:
        leaving(here, 1000, seed=2)
        assert_nothing_left(here)


def test_a_client_that_leaves_is_cancelled_within_a_step_or_two() -> None:
    with running(RepeatingEngine(step_seconds=0.02)) as here, here.client() as client:
        body = {"prompt": "letters", "max_tokens": 2000, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as answer:
            next(answer.iter_lines())
        steps = here.engine.num_steps
        assert_nothing_left(here)
        assert here.engine.num_steps - steps <= 50  # Of 2,000 that it asked for.


def test_at_four_times_its_capacity_some_are_refused_and_the_others_are_answered_as_fast() -> None:
    """One step gives every slot a token: what is answered in so many steps tells whether slots stood empty."""
    slots, tokens = 4, 40
    with running(RepeatingEngine(slots=slots, step_seconds=0.002), most_waiting=8) as here:
        statuses = Counter[int]()
        here.engine.gate.clear()  # However slowly requests come, more come than there is room for.

        async def one(client: httpx.AsyncClient) -> None:
            answer = await client.post("/v1/completions", json={"prompt": "letters", "max_tokens": tokens})
            statuses[answer.status_code] += 1
            if answer.status_code == 429:
                here.engine.gate.set()
                assert int(answer.headers["retry-after"]) >= 1
                assert answer.json()["error"]["type"] == "rate_limit_error"

        async def all_of_them() -> None:
            async with httpx.AsyncClient(
                base_url=here.url, timeout=60, trust_env=False, limits=httpx.Limits(max_connections=100)
            ) as client:
                await asyncio.gather(*(one(client) for _ in range(64)))

        asyncio.run(all_of_them())
        assert set(statuses) == {200, 429}
        answered = statuses[200]
        assert answered >= 1 + 8, "the one that the engine waits with, and as many as may wait"
        # Whole rounds of full slots, and as much again for the beginning and the end.
        assert here.engine.num_steps <= (answered / slots + 2) * tokens
        assert_nothing_left(here)


def test_where_nobody_can_be_let_in_a_request_is_refused_before_its_body_has_come() -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n"
    with running(RepeatingEngine(slots=1), most_waiting=1) as here:
        assert here.complete(prompt="x", n=2).json()["error"]["message"] == (
            "2 answers at once are more than the 1 that may wait here; try: fewer prompts, or a smaller n"
        )
        here.engine.gate.clear()
        threads = [threading.Thread(target=here.complete, kwargs={"prompt": "say: x", "user": name}) for name in "ab"]
        threads[0].start()
        wait_until(lambda: here.engine.has_work())  # It is in the engine, whose step waits.
        threads[1].start()
        wait_until(lambda: here.server.loop.num_waiting == 1)
        host, port = here.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as early:
            early.settimeout(20)
            early.sendall(head)
            assert early.recv(4096).startswith(b"HTTP/1.1 429 ")
        here.engine.gate.set()
        for thread in threads:
            thread.join()
        assert_nothing_left(here)


def test_who_is_refused_is_told_when_those_before_are_answered() -> None:
    retry = RetryAfter()
    assert retry.refused(64, 0.5) == 1  # Nothing has been measured yet.
    retry.ended(10, 2.0)
    assert retry.refused(64, 2.1) == 13  # 64 at 5 a second; one in two seconds was refused.
    for _ in range(98):
        retry.refused(64, 2.2)
    retry.ended(20, 3.0)
    assert retry.refused(64, 3.1) == 9  # 64 wait and 99 were refused in the last second: 163 at 20 a second.
    assert retry.refused(10_000, 3.2) == 60


def test_one_client_with_many_requests_does_not_keep_out_another() -> None:
    with running(RepeatingEngine(slots=1, step_seconds=0.001), most_waiting=10) as here:
        statuses = list[int]()

        def flood() -> None:
            statuses.append(here.complete(prompt="letters", max_tokens=30, user="many").status_code)

        here.engine.gate.clear()
        threads = [threading.Thread(target=flood) for _ in range(24)]
        for thread in threads:
            thread.start()
        wait_until(lambda: 429 in statuses)
        here.engine.gate.set()
        alone = here.complete(prompt="say: my turn", max_tokens=20, user="one")
        for thread in threads:
            thread.join()
        assert alone.status_code == 200
        assert_nothing_left(here)


def test_turns_go_round_among_clients_and_lower_priorities_come_first() -> None:
    queue = FairQueue[str](10)
    for name in ("a1", "a2", "a3", "b1", "c1"):
        assert queue.put(name, client=name[0]) is None
    assert queue.put("z1", client="z", priority=-1) is None
    assert [queue.take() for _ in range(7)] == ["z1", "a1", "b1", "c1", "a2", "a3", None]


def test_a_full_queue_sends_away_the_newest_of_whoever_has_most() -> None:
    queue = FairQueue[str](3)
    for name in ("a1", "a2", "a3"):
        queue.put(name, client="a")
    assert queue.put("a4", client="a") == "a4"
    assert queue.put("b1", client="b") == "a3"
    assert queue.put("b2", client="b") == "b2"
    assert not queue.refuses_all()  # Whoever comes with none there sends away one of a's.
    assert queue.put("c1", client="c") == "a2"
    assert queue.refuses_all()
    assert queue.put("d1", client="d") == "d1"
    assert queue.remove("a1")
    assert not queue.refuses_all()
    assert not queue.remove("a1")
    assert [queue.take() for _ in range(3)] == ["b1", "c1", None]


def test_an_engine_that_fails_is_told_of_and_brought_back(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwise.serving.http import engine_loop

    monkeypatch.setattr(engine_loop, "_PAUSE_SECONDS", 0.1)
    with running(RepeatingEngine(step_seconds=0.005)) as here, here.client() as client:
        body = {"prompt": "letters", "max_tokens": 500, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            here.engine.broken = "rank 1 is gone"
            left = [line for line in lines if line]
        assert "the engine has failed: RuntimeError: rank 1 is gone" in left[-1]
        health = client.get("/health")
        assert health.status_code == 503
        assert health.json()["reason"] == "the engine has failed: RuntimeError: rank 1 is gone"
        refused = here.complete(prompt="x")
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        here.engine.broken = None
        wait_until(lambda: here.complete(prompt="say: back").status_code == 200)
        assert client.get("/health").json() == {"status": "ok", "model": "repeating"}
        assert_nothing_left(here)


def test_metrics_have_vllms_names_after_the_prefix() -> None:
    with running(RepeatingEngine()) as here, here.client() as client:
        for number in range(3):
            here.complete(prompt=f"say: {number}")
        client.post("/v1/completions", json={"prompt": 3})
        text = client.get("/metrics").text
    for name in (
        "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total",
        "prompt_tokens_total", "generation_tokens_total", "prefix_cache_queries_total", "prefix_cache_hits_total",
        "time_to_first_token_seconds_bucket", "inter_token_latency_seconds_bucket",
        "kv_offload_load_bytes_total", "kv_offload_load_time_total", "kv_offload_store_bytes_total",
        "kv_offload_store_time_total", "kv_offload_cpu_cache_usage_perc",
        "e2e_request_latency_seconds_bucket", "request_queue_time_seconds_bucket", "iteration_tokens_total_bucket",
    ):  # fmt: skip
        assert f"shardwise:{name}{{" in text, name
    assert 'shardwise:request_success_total{finished_reason="stop",model_name="repeating"} 3.0' in text
    assert 'shardwise:request_refused_total{model_name="repeating",status="400"} 1.0' in text
    assert 'shardwise:generation_tokens_total{model_name="repeating"} 6.0' in text
