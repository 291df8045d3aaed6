"""The engine around its tokens: how answers end, who comes first, who leaves, and what is refused."""

import random

import pytest

from shardwise.errors import ShardwiseError
from shardwise.serving.request import Request, Sampling
from tests.serving.answers import answer, ask, both, engine_over, prompts, run, tokens_of


def test_an_answer_ends_with_a_stop_token_or_at_its_length() -> None:
    _, ours = both("llama")
    prompt = prompts(1)[0]
    whole = answer(engine_over(ours), [ask(prompt)])[0]
    stop = whole[4]
    end = whole.index(stop)
    told = run(engine_over(ours), [ask(prompt, stop_token_ids=frozenset({stop}))])["r"]
    assert [each.token for each in told] == whole[: end + 1]
    assert [each.finish for each in told] == [None] * end + ["stop"]
    assert run(engine_over(ours), [ask(prompt)])["r"][-1].finish == "length"
    later = answer(engine_over(ours), [ask(prompt, stop_token_ids=frozenset({stop}), min_tokens=8)])[0]
    assert len(later) >= 8
    assert stop not in later[:8]
    engine = engine_over(ours)
    engine.eos_token_ids = frozenset({stop})
    assert answer(engine, [ask(prompt, "a")]) == [whole[: end + 1]]
    assert answer(engine, [ask(prompt, "b", ignore_eos=True)]) == [whole]


def test_a_prompt_in_pieces_does_not_hold_up_the_others() -> None:
    _, ours = both("llama")
    engine = engine_over(ours, token_budget=6, max_running=4)
    engine.add(ask((1, 2, 3), "short"))
    assert [each.request for each in engine.step()] == ["short"]
    engine.add(ask(range(40), "long"))
    told = [[each.request for each in engine.step()] for _ in range(9)]
    assert told == [["short"]] * 7 + [["short", "long"]] * 2


def test_priorities_come_first_and_send_others_away() -> None:
    _, ours = both("llama")
    given = prompts(4, shortest=12, longest=12)
    engine = engine_over(ours, num_blocks=7, max_running=2)
    for number, prompt in enumerate(given[:3]):
        engine.add(ask(prompt, f"low{number}", priority=1))
    engine.step()
    engine.add(ask(given[3], "high"))
    assert "high" in {each.request for each in engine.step()}
    told = run(engine)
    assert engine.load().num_preemptions > 0
    assert set(told) == {"low0", "low1", "low2", "high"}
    order = [name for name, tokens in told.items() if tokens[-1].finish]
    assert len(order) == 4


def test_whoever_leaves_frees_their_blocks_at_once() -> None:
    _, ours = both("llama")
    dice, engine = random.Random(0), engine_over(ours, num_blocks=24, token_budget=16, max_running=8)
    ended: set[tuple[str, str]] = set()
    for number, prompt in enumerate(prompts(60)):
        engine.add(ask(prompt, f"r{number}"))
        for token in engine.step():
            if token.finish:
                ended.add((token.request, token.finish))
        if number % 2:
            name = f"r{dice.randrange(number + 1)}"
            engine.cancel(name)
            assert engine.scheduler.find(name) is None
    ended |= {(name, tokens[-1].finish or "open") for name, tokens in run(engine).items()}
    assert len({name for name, _ in ended}) == 60
    assert any(finish == "cancelled" for _, finish in ended)
    assert engine.load().num_used_blocks == 0
    assert engine.load().num_waiting == engine.load().num_running == 0


def test_salts_share_nothing() -> None:
    _, ours = both("llama")
    prompt = prompts(1, shortest=20, longest=20)[0]
    engine = engine_over(ours)
    answers = []
    for name, salt in (("a", ""), ("b", "x"), ("c", "x")):
        request = Request(id=name, prompt=prompt, sampling=Sampling(max_tokens=2, temperature=0), salt=salt)
        told = run(engine, [request])
        answers.append((tokens_of(told)[name], told[name][0].num_cached))
    assert [cached for _, cached in answers] == [0, 0, 16]
    assert answers[0][0] == answers[1][0] == answers[2][0]


@pytest.mark.parametrize(
    ("request_", "problem"),
    [
        (ask(()), "a prompt needs at least one token"),
        (ask((1,), num_tokens=0), "max_tokens=0 asks for no token"),
        (ask(range(60)), "60 tokens of prompt and 12 to come are 72, and this model takes 64"),
        (ask((1, 97)), "token 97 is outside the vocabulary of 97"),
        (ask((1,), logit_bias={-1: 2.0}), "token -1 is outside the vocabulary of 97"),
    ],
)
def test_what_can_never_be_answered_is_refused(request_: Request, problem: str) -> None:
    engine = engine_over(both("llama")[1])
    with pytest.raises(ShardwiseError) as caught:
        engine.add(request_)
    assert caught.value.problem == problem
    assert not engine.has_work()


def test_a_name_is_taken_once() -> None:
    engine = engine_over(both("llama")[1])
    engine.add(ask((1, 2)))
    with pytest.raises(ShardwiseError, match="being answered already"):
        engine.add(ask((1, 2)))
