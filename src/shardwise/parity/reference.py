"""The steps on one device, by plain torch: what a plan is held against."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.execution.compute_policy import ComputePolicy
from shardwise.parity.course import Course, Looks, Step, Uses, are_looked_at
from shardwise.parity.problem import Problem, clip_factor, make_optimizer, microbatches_of
from shardwise.planner.plan import Plan
from shardwise.sharding.dropout import Dropouts, Finding, Place, num_tokens_of
from shardwise.stages.batch import length_of
from shardwise.stages.metrics import take_metrics
from shardwise.stages.split.arguments import Signature
from shardwise.stages.split.materialise import materialise
from shardwise.stages.stage import Batch
from shardwise.torch_private import BatchNormModule


def train_reference(problem: Problem, plan: Plan, looks: Looks = "every step") -> Course:
    """Train on one device, with the microbatches and in the precision of a plan.

    A plan whose gradients are a step old (pipedream-2bw) has them here too: those of step t are of the weights before
    step t-1, and step on the weights after it.
    """
    module, signature = problem.module, Signature(problem.module)
    # One that is built without numbers gets those that ranks get theirs of.
    materialise(module, [name for name, _ in (*module.named_parameters(), *module.named_buffers())])
    optimizer = make_optimizer(module.parameters())
    is_stale, policy = plan.schedule == "pipedream-2bw", ComputePolicy.of(plan)
    steps: list[Step] = []
    newest = older = _weights(module)
    first = microbatches_of(problem.batches[0], plan, apart=True)[0]
    finding, before = Finding(), _weights(module)
    with torch.no_grad(), finding.watching():
        is_sum = isinstance(_loss(problem, signature, first, policy), tuple)
    _put(module, before)  # Buffers are as they were.
    # What is normalised over a microbatch is so on each replica; a mean of the loss is that of each replica too.
    apart = not is_sum or any(isinstance(each, BatchNormModule) for each in module.modules())
    # Masks are drawn as engines draw them; by which rule is for the tests of dropout to say.
    dropouts = Dropouts(seed=0)
    dropouts.attach(module, finding.names(module))
    for number, batch in enumerate(problem.batches):
        uses = Uses()
        optimizer.zero_grad()
        with uses.of(module):
            # A sum may be of all replicas, as a balancing loss must be.
            loss = _gradients(problem, signature, _placed(batch, plan, dropouts, number, apart=apart), policy)
        if is_stale:
            _put(module, newest)
        gradients = {name: each.grad for name, each in module.named_parameters() if each.grad is not None}
        norm = float(nn.utils.get_total_norm(gradients.values()))
        step = Step(loss=loss, norm=norm)
        if are_looked_at(looks, len(steps), len(problem.batches)):
            found = {name: each.cpu().clone() for name, each in gradients.items()}
            step = replace(step, gradients=found, used={name: each.cpu() for name, each in uses.found.items()})
        for each in gradients.values():
            each.mul_(clip_factor(norm))
        optimizer.step()
        older, newest = newest, _weights(module)
        weights = {name: each.cpu() for name, each in newest.items()}
        steps.append(replace(step, weights=weights) if step.gradients else step)
        if is_stale:
            _put(module, older)
    return Course(steps=steps, first_use=list(uses.found))


def _placed(batch: Batch, plan: Plan, dropouts: Dropouts, step: int, *, apart: bool) -> Iterator[Batch]:
    """The microbatches, each where its rows stand in the batch."""
    rows = microbatches_of({"rows": torch.arange(length_of(batch))}, plan, apart=apart)
    for each, mine in zip(microbatches_of(batch, plan, apart=apart), rows, strict=True):
        places = mine["rows"]
        tokens = num_tokens_of(each)
        dropouts.stand(Place(step=step, first_row=0, num_rows=len(places), rows=places, num_tokens=tokens))
        yield each


def _gradients(problem: Problem, signature: Signature, microbatches: Iterable[Batch], policy: ComputePolicy) -> float:
    """Make the gradients of the mean over a batch, and return it."""
    sum_of_losses = count = 0.0
    for each in microbatches:
        result = _loss(problem, signature, each, policy)
        total, number = result if isinstance(result, tuple) else (result, 1)
        total.backward()
        sum_of_losses, count = sum_of_losses + float(total.detach()), count + float(number)
    for parameter in problem.module.parameters():
        if parameter.grad is not None:
            parameter.grad.div_(count)
    return sum_of_losses / count


def _loss(problem: Problem, signature: Signature, batch: Batch, policy: ComputePolicy) -> Any:
    args, kwargs = signature.arguments(batch)
    with policy.precision(next(problem.module.parameters()).device):
        return take_metrics(problem.loss(problem.module(*args, **kwargs), batch))[0]


def _weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: each.detach().clone() for name, each in module.state_dict().items() if isinstance(each, Tensor)}


@torch.no_grad()
def _put(module: nn.Module, weights: dict[str, Tensor]) -> None:
    module.load_state_dict(weights, strict=False)
