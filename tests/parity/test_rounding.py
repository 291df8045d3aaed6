"""The judgement of bf16 lets rounding pass and nothing else."""

from dataclasses import replace

import torch

from shardwise.parity.course import Course, Step
from shardwise.parity.rounding import judge

GENERATOR = torch.Generator().manual_seed(0)
NAMES = ("embedding", "attention", "norm", "head")


def numbers(count: int) -> torch.Tensor:
    return torch.randn(count, generator=GENERATOR)


EXACT = Course(
    steps=[
        Step(
            loss=5.0 - step,
            norm=2.0,
            gradients={name: numbers(64) for name in NAMES},
            weights={name: numbers(64) for name in NAMES},
        )
        for step in range(3)
    ]
)


def rounded(error: float) -> Course:
    """The same, with errors of this relative size, each drawn anew."""

    def off(tensor: torch.Tensor) -> torch.Tensor:
        return tensor * (1 + error * numbers(len(tensor)))

    return Course(
        steps=[
            replace(
                step,
                loss=step.loss * (1 + error * float(numbers(1)) / 10),
                gradients={name: off(each) for name, each in step.gradients.items()},
                weights={name: off(each) for name, each in step.weights.items()},
            )
            for step in EXACT.steps
        ]
    )


def test_other_roundings_of_the_same_size_pass() -> None:
    for _ in range(20):
        assert judge(EXACT, [rounded(4e-3)], [rounded(4e-3), rounded(4e-3)]).problem is None


def test_roundings_of_three_times_the_size_do_not() -> None:
    judged = judge(EXACT, [rounded(4e-3)], [rounded(12e-3)])
    assert judged.problem is not None
    assert judged.problem.startswith("the gradient is off by 1")


def test_one_wrong_tensor_on_one_rank_does_not_pass() -> None:
    wrong = rounded(4e-3)
    wrong.steps[2].gradients["norm"].mul_(1.02)
    judged = judge(EXACT, [rounded(4e-3)], [rounded(4e-3), wrong])
    assert judged.problem is not None


def test_a_loss_that_one_device_had_right_by_chance_is_held_to_half_a_step_of_bf16() -> None:
    lucky = rounded(4e-3)
    exact = Course(steps=[replace(step, loss=5.0) for step in lucky.steps])
    for loss, passes in ((5.0 * (1 + 1e-3), True), (5.0 * (1 + 1e-2), False)):
        other = Course(steps=[replace(step, loss=loss) for step in rounded(4e-3).steps])
        theirs = Course(steps=[replace(step, loss=5.0) for step in lucky.steps])
        ours = Course(
            steps=[
                replace(step, gradients=same.gradients, weights=same.weights)
                for step, same in zip(other.steps, lucky.steps, strict=True)
            ]
        )
        exact_with = Course(
            steps=[replace(step, loss=known.loss) for step, known in zip(EXACT.steps, exact.steps, strict=True)]
        )
        assert (judge(exact_with, [theirs], [ours]).problem is None) is passes
