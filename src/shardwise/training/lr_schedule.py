"""The learning rate of a step: a function of the step alone, so that a run which goes on has the same ones."""

import math

from shardwise.training.recipe import OptimizerChoice

#: The part of a `wsd` run in which the rate falls.
_LAST_PART = 0.2


def learning_rate_at(step: int, num_steps: int, choice: OptimizerChoice) -> float:
    """The rate of a step, counted from 0.

    cosine   /‾‾\\__        linear   /\\.        constant  /‾‾‾‾‾        wsd   /‾‾‾‾\\
    """
    if step < choice.warmup:
        return choice.rate * (step + 1) / choice.warmup
    done = (step - choice.warmup) / max(1, num_steps - choice.warmup)
    if choice.schedule == "constant":
        return choice.rate
    if choice.schedule == "wsd":
        done = max(0.0, done - (1 - _LAST_PART)) / _LAST_PART
    height = 0.5 * (1 + math.cos(math.pi * done)) if choice.schedule == "cosine" else 1 - done
    return choice.rate * (choice.final + (1 - choice.final) * height)
