"""The five things that stock pipelines fail at: ours do them, under every schedule.

The model is small: an embedding, four blocks, a head that is the embedding again, and a value that the first block
makes and the head reads. So the first and the last stage hold one weight, and one value jumps over all between them.
"""

from dataclasses import replace

import pytest
import torch

from shardwise.errors import ShardwiseError
from shardwise.schedule.catalogue import CATALOGUE
from tests.conformance.cases import Case, layouts, loss_of, make_batches, make_module
from tests.conformance.outcomes import Runner, plain
from tests.same import worst
from tests.stages.pieces import Net

TIED = "embedding.weight"


def deepest(schedule: str) -> Case:
    """The most stages, over several ranks."""
    num_ranks, num_chunks, num_microbatches = max(
        (each for each in layouts(schedule) if each[0] > 1), key=lambda each: each[0] * (each[1] or 1)
    )
    return Case(
        model="tied-and-skipping",
        schedule=schedule,
        num_ranks=num_ranks,
        num_chunks=num_chunks,
        num_microbatches=num_microbatches,
    )


def test_a_tied_weight_gets_the_sum_of_what_its_stages_give_it(schedule: str, outcome_of: Runner) -> None:
    case = deepest(schedule)
    wanted = plain(case).gradients[TIED]
    error, _ = worst({TIED: outcome_of(case).gradients[TIED]}, {TIED: wanted})
    assert error <= 1e-6
    # Either stage's part alone would be far off: this test can fail.
    head_alone = _gradient_without_the_embedding(case)
    assert worst({TIED: head_alone}, {TIED: wanted})[0] > 0.01


def _gradient_without_the_embedding(case: Case) -> torch.Tensor:
    """The tied weight's gradient from the head only."""
    module = make_module(case.model)
    assert isinstance(module, Net)
    module.embedding.register_forward_hook(lambda _module, _given, made: made.detach())
    (batch,) = make_batches(replace(case, lengths=case.lengths[:1]))
    result = loss_of(case.model)(module(batch["ids"]), batch)
    assert isinstance(result, tuple)
    (gradient,) = torch.autograd.grad(result[0] / result[1], module.embedding.weight)
    return gradient


def test_a_skip_goes_from_its_maker_to_its_reader_over_the_stages_between(schedule: str, outcome_of: Runner) -> None:
    case = deepest(schedule)
    expected, found = plain(case), outcome_of(case)
    # The blocks on both sides of the skip, and those that it jumps over.
    assert worst(found.gradients, expected.gradients)[0] <= 1e-6
    assert found.losses == pytest.approx(expected.losses, rel=1e-6)


def test_the_sequence_length_may_change_from_step_to_step(schedule: str, runner: Runner) -> None:
    case = replace(deepest(schedule), lengths=(8, 12, 5))
    expected, found = plain(case), runner(case)
    assert found.losses == pytest.approx(expected.losses, rel=1e-6)
    assert worst(found.weights, expected.weights)[0] <= 1e-6


def test_a_weight_in_two_groups_of_stages_stays_one_weight(schedule: str, runner: Runner) -> None:
    """Sharded data parallelism raises there; a pipeline would let the two copies drift apart."""
    case = replace(deepest(schedule), lengths=(6,) * 5, optimizer="sgd")
    expected, found = plain(case), runner(case)
    assert found.losses == pytest.approx(expected.losses, rel=1e-6)
    assert worst(found.weights, expected.weights)[0] <= 1e-6


def test_a_second_run_is_the_same_bit_for_bit(schedule: str, runner: Runner, outcome_of: Runner) -> None:
    case = deepest(schedule)
    assert runner(case).is_same(outcome_of(case))


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_fewer_microbatches_than_stages_run_or_are_refused(
    schedule: str, num_microbatches: int, runner: Runner
) -> None:
    case = replace(deepest(schedule), num_microbatches=num_microbatches)
    assert num_microbatches < 4
    entry = CATALOGUE[schedule]
    if num_microbatches < entry.least_microbatches * case.num_ranks or (entry.mirrored and num_microbatches % 2):
        with pytest.raises(ShardwiseError, match=f"{schedule} .*microbatches.*, not {num_microbatches}"):
            runner(case)
        return
    expected, found = plain(case), runner(case)
    assert worst(found.gradients, expected.gradients)[0] <= 1e-6
    assert worst(found.weights, expected.weights)[0] <= 1e-6
