"""Draws: as often as they should come, the same for the same seed, and narrowed as was asked."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.kernels.sampling import make_key, sample_plain, threshold
from tests.nets.families import VOCABULARY
from tests.serving.answers import answer, ask, both, engine_over, prompts, run, tokens_of


def drawn(logits: Tensor, count: int, **options: float) -> Tensor:
    """Draws from one row, at positions 0 to count - 1 of one seed."""

    def row(name: str, default: float) -> Tensor:
        return torch.full((count,), options.get(name, default))

    return sample_plain(
        logits.expand(count, -1),
        row("temperature", 1.0),
        row("top_k", 0).long(),
        row("top_p", 1.0),
        row("min_p", 0.0),
        torch.tensor([make_key(7)] * count),
        torch.arange(count),
    )


def chi_square(tokens: Tensor, shares: Tensor) -> float:
    found = torch.bincount(tokens, minlength=len(shares)).double()
    assert not found[shares == 0].any()
    expected = shares.double()[shares > 0] * len(tokens)
    return float(((found[shares > 0] - expected) ** 2 / expected).sum())


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.5}, {"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.2}, {"top_k": 8, "top_p": 0.7}]
)
def test_words_come_as_often_as_they_should(options: dict[str, float]) -> None:
    logits = torch.randn(16, generator=torch.Generator().manual_seed(3)) * 1.5
    scaled = logits / options.get("temperature", 1.0)
    order = scaled.argsort(descending=True)
    kept = torch.ones(16, dtype=torch.bool)
    kept[order[int(options.get("top_k", 16)) :]] = False
    shares = scaled.masked_fill(~kept, -torch.inf).softmax(-1)
    before = shares[order].cumsum(0) - shares[order]
    kept[order[before >= options.get("top_p", 1.0)]] = False
    kept &= scaled.softmax(-1) >= options.get("min_p", 0.0) * scaled.softmax(-1).max()
    shares = scaled.masked_fill(~kept, -torch.inf).softmax(-1)
    freedom = int(kept.sum()) - 1
    # Wilson and Hilferty: 4.3 standard deviations, one honest failure in 100,000.
    limit = freedom * (1 - 2 / (9 * freedom) + 4.3 * math.sqrt(2 / (9 * freedom))) ** 3
    assert chi_square(drawn(logits, 40_000, **options), shares) < limit


def test_words_that_are_equally_likely_go_or_stay_together() -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 0.0]])
    one, all_of_it = torch.ones(1), torch.zeros(1)
    assert threshold(logits, torch.tensor([2]), one, all_of_it).tolist() == [1.0]
    assert threshold(logits, torch.tensor([0]), torch.tensor([0.1]), all_of_it).tolist() == [2.0]


def test_a_seed_gives_the_same_tokens_alone_in_a_full_batch_and_preempted() -> None:
    _, ours = both("llama")
    given = prompts(12)
    options: dict[str, Any] = {"temperature": 0.9, "top_p": 0.9, "seed": 5}
    alone = answer(engine_over(ours), [ask(given[0], **options)])
    crowd = [ask(prompt, f"c{number}", temperature=1.0) for number, prompt in enumerate(given[1:])]
    for engine in (engine_over(ours, num_blocks=200), engine_over(ours, num_blocks=9, token_budget=7, max_running=7)):
        assert tokens_of(run(engine, [*crowd[:6], ask(given[0], **options), *crowd[6:]]))["r"] == alone[0]
    other = answer(engine_over(ours), [ask(given[0], **{**options, "seed": 6})])
    assert other != alone


def test_penalties_bias_and_guides_change_what_comes() -> None:
    _, ours = both("llama")
    prompt = prompts(1)[0]

    def tokens(**options: Any) -> list[int]:
        return answer(engine_over(ours), [ask(prompt, **options)])[0]

    plain = tokens()
    assert set(tokens(logit_bias={5: 100.0})) == {5}
    assert plain[0] not in tokens(logit_bias={plain[0]: -100.0})
    assert len(set(tokens(frequency_penalty=100.0))) == 12
    assert len(set(tokens(presence_penalty=100.0))) == 12
    penalised = tokens(repetition_penalty=1000.0)
    assert len(set(penalised)) == 12
    assert not set(penalised) & set(prompt)

    class Alternating:
        def __init__(self) -> None:
            self.told: list[int] = []

        def allowed(self) -> Tensor:
            return torch.arange(97) == (3, 8)[len(self.told) % 2]

        def advance(self, token: int) -> None:
            self.told.append(token)

        is_complete = False

    assert tokens(guide=Alternating()) == [3, 8] * 6


def test_repetition_is_penalised_as_transformers_does() -> None:
    theirs, ours = both("qwen3")
    prompt = prompts(1)[0]
    wanted = theirs.generate(  # type: ignore[operator]
        torch.tensor([prompt]), max_new_tokens=12, do_sample=False, repetition_penalty=1.3
    )[0, len(prompt) :].tolist()
    assert answer(engine_over(ours), [ask(prompt, repetition_penalty=1.3)]) == [wanted]


def test_log_probabilities_are_the_models_own() -> None:
    theirs, ours = both("llama")
    prompt = prompts(1, shortest=11, longest=11)[0]
    request = ask(prompt, num_tokens=3, logprobs=2, prompt_logprobs=1, temperature=0.7, seed=1)
    with torch.no_grad():
        for engine in (engine_over(ours), engine_over(ours, token_budget=4, max_running=4)):
            told = run(engine, [request])["r"]
            whole = [*prompt, *(each.token for each in told if each.token is not None)]
            logprobs = theirs(torch.tensor([whole])).logits.log_softmax(-1)[0]
            about_prompt = told[0].prompt_logprobs
            assert about_prompt is not None
            every = [*about_prompt, *(each.logprob for each in told)]
            assert len(every) == len(whole) - 1
            for place, each in enumerate(every):
                assert each is not None
                assert each.token == whole[place + 1]
                assert abs(each.logprob - float(logprobs[place, each.token])) < 1e-4
                assert each.top[0][0] == int(logprobs[place].argmax())
                assert len(each.top) == (1 if place < len(prompt) - 1 else 2)


class Fixed:
    """Allows the same tokens at every place; after some places none."""

    def __init__(self, tokens: list[int], num_places: int) -> None:
        self._tokens, self._num_left = tokens, num_places

    def allowed(self) -> list[bool]:
        return [self._num_left > 0 and token in self._tokens for token in range(VOCABULARY)]

    def advance(self, token: int) -> None:
        assert token in self._tokens
        self._num_left -= 1

    is_complete = False


def test_a_guide_that_allows_no_token_ends_the_answer_and_no_other() -> None:
    engine = engine_over(both("llama")[1])
    told = run(engine, [ask((1, 2, 3), "stuck", guide=Fixed([7], 2)), ask((1, 2, 3), "free", num_tokens=5)])
    assert [token.token for token in told["stuck"]] == [7, 7, None]
    assert told["stuck"][-1].finish == "stop"
    assert len(told["free"]) == 5
    assert engine.load().num_used_blocks == 0


def test_a_guide_after_which_nothing_may_come_ends_the_answer_with_its_last_token() -> None:
    guide = Fixed([7], 2)
    guide.is_complete = True
    (only,) = run(engine_over(both("llama")[1]), [ask((1, 2, 3), guide=guide)])["r"]
    assert (only.token, only.finish) == (7, "complete")


def test_an_answer_ends_where_its_guide_allows_ends_alone_also_before_it_is_long_enough() -> None:
    engine = engine_over(both("llama")[1])
    given = ask((1, 2, 3), guide=Fixed([9], 12), min_tokens=4, stop_token_ids=frozenset({9}))
    assert [(token.token, token.finish) for token in run(engine, [given])["r"]] == [(9, "stop")]
