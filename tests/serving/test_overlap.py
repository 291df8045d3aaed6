"""Steps that begin before the one before is known: the way of GPUs, here on the CPU by definitions."""

import gc
import random
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from shardwise.nets.transformer import Transformer
from shardwise.serving import assemble
from shardwise.serving.device_runner import DeviceRunner
from shardwise.serving.engine import LLMEngine
from shardwise.serving.sequence import Sequence
from shardwise.serving.steps import needs_host
from tests.serving.answers import FAMILIES, answer, ask, both, engine_over, expected, prompts, run, tokens_of


@pytest.fixture
def overlapped(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Engines as on a GPU."""

    def make(model: Transformer, **limits: Any) -> LLMEngine:
        with monkeypatch.context() as patched:
            patched.setattr(assemble, "make_runner", partial(DeviceRunner, kernels=False))
            engine = engine_over(model, **limits)
        assert engine.overlaps
        return engine

    return make


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_transformers(family: str, overlapped: Any) -> None:
    theirs, ours = both(family)
    given = prompts(8)
    wanted = [expected(theirs, prompt) for prompt in given]
    requests = [ask(prompt, f"r{number}") for number, prompt in enumerate(given)]
    plain = overlapped(ours, max_running=5)
    assert answer(plain, requests) == wanted
    assert answer(plain, requests) == wanted
    assert plain.load().prefix_cache_hits > 0
    tight = overlapped(ours, num_blocks=9, token_budget=6, max_running=6)
    assert answer(tight, requests) == wanted
    assert tight.load().num_preemptions > 0
    assert tight.load().num_used_blocks == 0


def test_a_closed_engine_holds_no_memory(tmp_path: Path, overlapped: Any) -> None:
    """Whoever still has it: the next engine wants its room. And it goes at once, not when Python looks for circles."""
    model = Transformer(both("llama")[1].settings)
    gc.disable()
    try:
        engine = overlapped(model, host_bytes=4096, file_bytes=4096, kv_folder=tmp_path)
        held = [weakref.ref(each) for each in (model.embed.weight, engine.tiers.store._data)]
        answer(engine, [ask(prompts(1)[0])])
        del model
        engine.close()
        assert [each() is None for each in held] == [True, True]
    finally:
        gc.enable()


def test_draws_stops_and_those_who_need_the_host_are_the_same(overlapped: Any) -> None:
    _, ours = both("qwen3")
    given = prompts(10)

    def requests() -> list[Any]:
        stop = frozenset(range(0, 97, 6))
        free = [
            ask(prompt, f"r{number}", 4 + number, temperature=0.9, top_k=number, seed=number, stop_token_ids=stop)
            for number, prompt in enumerate(given)
        ]
        bound = [
            ask(given[0], "logprobs", logprobs=2, prompt_logprobs=1),
            ask(given[1], "penalty", repetition_penalty=1.3, temperature=0.7, seed=3),
            ask(given[2], "early", min_tokens=6, stop_token_ids=stop),
        ]
        return [*free[:5], *bound, *free[5:]]

    wanted = run(engine_over(ours, num_blocks=40, max_running=6), requests())
    for limits in ({"num_blocks": 40, "max_running": 6}, {"num_blocks": 12, "max_running": 4, "token_budget": 9}):
        engine = overlapped(ours, **limits)
        told = run(engine, requests())
        assert tokens_of(told) == tokens_of(wanted)
        ends = {name: tokens[-1].finish for name, tokens in told.items()}
        assert ends == {name: tokens[-1].finish for name, tokens in wanted.items()}
        mine, other = (
            [each.logprob for each in found["logprobs"][0].prompt_logprobs or ()] for found in (told, wanted)
        )
        assert mine == pytest.approx(other, rel=1e-4)
        assert engine.load().num_used_blocks == 0


def test_those_who_leave_between_steps_leave_nothing_behind(overlapped: Any) -> None:
    _, ours = both("llama")
    dice, engine = random.Random(1), overlapped(ours, num_blocks=24, token_budget=16, max_running=8)
    given, ended = prompts(40), set()
    for number, prompt in enumerate(given):
        engine.add(ask(prompt, f"r{number}"))
        ended |= {token.request for token in engine.step() if token.finish}
        if number % 2:
            engine.cancel(f"r{dice.randrange(number + 1)}")
    ended |= {name for name, tokens in run(engine).items() if tokens[-1].finish}
    assert len(ended) == 40
    assert engine.load().num_used_blocks == 0
    whole = answer(engine_over(ours), [ask(given[0])])
    assert answer(engine, [ask(given[0])]) == whole


def test_what_prompts_cost_is_measured_also_where_nobody_waits_for_a_step(overlapped: Any) -> None:
    """Without it every block beneath would be reloaded, however slow that is."""
    _, ours = both("qwen3")
    engine = overlapped(ours, host_bytes=2**20)
    assert engine.tiers is not None
    engine.tiers.speeds.predicted = None
    run(engine, [ask(range(3, 40), "long", 3)])
    measured = engine.tiers.speeds.compute(8)
    run(engine, [ask([1], "one", 6)])
    assert measured is not None
    assert engine.tiers.speeds.compute(8) == measured > 0, "of steps with prompts alone"


def test_those_who_wait_cost_nothing_until_it_is_their_turn(overlapped: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of requests has them all wait at once: to look at all of them, for every one and in every step, took
    longer than the answers."""
    _, ours = both("llama")
    engine, num_names, looked = overlapped(ours, max_running=2), 0, list[str]()

    def name_of(sequence: Sequence) -> str:
        nonlocal num_names
        num_names += 1
        return sequence.request.id

    def look(sequence: Sequence) -> bool:
        looked.append(sequence.request.id)
        return needs_host(sequence)

    monkeypatch.setattr(Sequence, "id", property(name_of))
    monkeypatch.setattr("shardwise.serving.engine.needs_host", look)
    for number in range(300):
        engine.add(ask((1, 2, 3), f"r{number}", 2))
    assert num_names < 3_000
    engine.step()
    assert looked == ["r0", "r1"]
