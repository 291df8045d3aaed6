"""Greedy tokens are transformers', on every path that a request can take."""

import pytest

from shardwise.serving.request import Request
from tests.serving.answers import FAMILIES, answer, ask, both, engine_over, expected, prompts

every_family = pytest.mark.parametrize("family", FAMILIES)


def requests(given: list[tuple[int, ...]], prefix: str = "r") -> list[Request]:
    return [ask(prompt, f"{prefix}{number}") for number, prompt in enumerate(given)]


@every_family
def test_greedy_tokens_are_those_of_transformers_on_every_path(family: str) -> None:
    theirs, ours = both(family)
    given = prompts(8)
    wanted = [expected(theirs, prompt) for prompt in given]

    plain = engine_over(ours)
    assert answer(plain, requests(given)) == wanted

    # The same prompts again: all but the last tokens of each are in the cache.
    assert answer(plain, requests(given, "again")) == wanted
    assert plain.load().prefix_cache_hits > 0

    # Prompts in pieces of at most three tokens beside single tokens.
    pieces = engine_over(ours, token_budget=3, max_running=3)
    assert answer(pieces, requests(given)) == wanted

    # Nine blocks of 4 tokens: a sequence alone may need 8, so they send each other away.
    tight = engine_over(ours, num_blocks=9)
    assert answer(tight, requests(given)) == wanted
    assert tight.load().num_preemptions > 0
    assert tight.load().num_used_blocks == 0

    # Four times as many.
    many = engine_over(ours, num_blocks=300)
    assert answer(many, requests(given * 4)) == wanted * 4


def test_a_beginning_that_two_share_is_computed_once() -> None:
    theirs, ours = both("llama")
    beginning = prompts(1, shortest=17, longest=17)[0]
    first, second = (*beginning, 5, 6), (*beginning, 7)
    engine = engine_over(ours)
    assert answer(engine, [ask(first, "first")]) == [expected(theirs, first)]
    assert answer(engine, [ask(second, "second")]) == [expected(theirs, second)]
    assert engine.load().prefix_cache_hits == 16
