"""The reference for a plan: the same steps on one device, in plain torch, on whole batches."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.errors import ShardwiseError
from shardwise.execution.compute_policy import ComputePolicy
from shardwise.nets.balance import correct_balance
from shardwise.parity.course import Course, Looks, Step, Uses, are_looked_at
from shardwise.parity.legs import Leg, one_leg
from shardwise.parity.problem import Problem, clip_factor, microbatches_of
from shardwise.parity.rows import BIAS_RATE, across_rows, corrects, has_batch_norm
from shardwise.planner.plan import Plan
from shardwise.sharding.dropout import Dropouts, Finding, Place, num_tokens_of
from shardwise.stages.batch import length_of
from shardwise.stages.metrics import take_metrics
from shardwise.stages.split.arguments import Signature
from shardwise.stages.split.materialise import materialise
from shardwise.stages.stage import Batch
from shardwise.states.parameter_group import shares_of, sort_out

# If two forwards of the same rows differ by more, they have drawn different random numbers.
_DRAWN = 1e-5


def train_reference(
    problem: Problem,
    plan: Plan,
    looks: Looks = "every step",
    legs: Sequence[Leg] | None = None,
    *,
    whole: bool | None = None,
) -> Course:
    """Train on one device in the precision of a plan, on whole batches; or on the plan's microbatches.

    Microbatches are used for modules that compute across the rows of one (`rows.py`), and on request (`whole=False`, or
    by the problem). If the plan's gradients are one step old (pipedream-2bw), so are they here: those of step t are of
    the weights before step t-1, and update the weights after it. After a save and load there are no older weights.
    """
    device = _OneDevice(problem, plan, whole=sees_whole(problem) if whole is None else whole)
    steps: list[Step] = []
    evaluations: dict[int, float] = {}
    for leg in legs or one_leg(plan, len(problem.batches)):
        device.begin(leg.plan)
        for number in range(leg.first, leg.stop):
            steps.append(device.step(number, sees=are_looked_at(looks, number, len(problem.batches))))
            if leg.evaluates(number):
                evaluations[number] = device.evaluate()
    return Course(steps=steps, first_use=device.first_use, evaluations=evaluations, num_dropping=device.num_dropping)


def sees_whole(problem: Problem) -> bool:
    """Return whether one device computes whole batches."""
    return not (problem.by_microbatches or across_rows(problem.module))


class _OneDevice:
    """A module, its optimizers and its dropout masks, on one device."""

    def __init__(self, problem: Problem, plan: Plan, *, whole: bool) -> None:
        module = problem.without_kernels()
        self._problem, self._whole, self._signature = problem, whole, Signature(module)
        self._plan, self._policy = plan, ComputePolicy.of(plan)
        # A module on the meta device gets the same initial values as on ranks.
        materialise(module, [name for name, _ in (*module.named_parameters(), *module.named_buffers())])
        self._masters = _masters(module) if plan.precision != "fp32" else {}
        self._optimizers = _make_optimizers(problem, self._masters)
        make = problem.scheduler
        self._schedulers = [] if make is None else [make(each) for each in self._optimizers]
        finding, before = Finding(), {name: each.clone() for name, each in module.named_buffers()}
        first = microbatches_of(problem.batches[0], plan, apart=True)[0]
        with torch.no_grad(), finding.watching():
            is_sum = isinstance(self._loss(first), tuple)
        # Normalisation over a microbatch is per replica, and so is the mean of a loss.
        self._apart = not is_sum or has_batch_norm(module)
        # Masks are drawn as in engines. The tests of dropout verify the rule itself.
        self._dropouts = Dropouts(seed=0)
        callers = finding.names(module)
        self._dropouts.attach(module, callers)
        own = [each for each in module.modules() if isinstance(each, nn.Dropout) and each.p > 0]
        self.num_dropping = len(callers) + len(own)
        self._check_draws()
        for name, each in module.named_buffers():
            each.copy_(before[name])
        self._newest = self._older = _weights(module)
        self._is_stale = False
        self.first_use: list[str] = []

    def begin(self, plan: Plan) -> None:
        """Train under this plan from now on, from the newest weights: the 16-bit ones if there are master weights."""
        _put(self._problem.module, self._newest)
        with torch.no_grad():
            for name, master in self._masters.items():
                master.copy_(self._newest[name])
        self._plan, self._older = plan, self._newest
        self._is_stale = plan.schedule == "pipedream-2bw"

    def step(self, number: int, *, sees: bool) -> Step:
        """Train one step."""
        module, uses = self._problem.module, Uses()
        module.zero_grad()
        with uses.of(module):
            loss = self._gradients(number)
        self.first_use = list(uses.found)
        if self._is_stale:
            _put(module, self._newest)
        gradients = {name: each.grad for name, each in module.named_parameters() if each.grad is not None}
        norm = float(nn.utils.get_total_norm(gradients.values()))
        found = {name: each.cpu().clone() for name, each in gradients.items()} if sees else {}
        for each in gradients.values():
            each.mul_(clip_factor(norm, self._problem.clip))
        self._update()
        self._older, self._newest = self._newest, _weights(module)
        if self._is_stale:
            _put(module, self._older)
        if not sees:
            return Step(loss=loss, norm=norm)
        masters = {name: each.detach().clone() for name, each in self._masters.items()}
        weights = {name: each.cpu() for name, each in {**self._newest, **masters}.items()}
        used = {name: each.cpu() for name, each in uses.found.items()}
        return Step(loss=loss, norm=norm, gradients=found, weights=weights, used=used)

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the loss of the held-out batch with the newest weights, without dropout."""
        module = self._problem.module
        training = [each for each in module.modules() if each.training]
        _put(module, self._newest)
        module.eval()
        self._dropouts.stand(None)
        found = [_numbers(self._loss(each)) for each in self._parts(self._problem.evaluated)]
        for each in training:
            each.training = True
        if self._is_stale:
            _put(module, self._older)
        return sum(float(total) for total, _ in found) / sum(float(count) for _, count in found)

    @torch.no_grad()
    def _update(self) -> None:
        named = dict(self._problem.module.named_parameters())
        for name, master in self._masters.items():
            gradient = named[name].grad
            master.grad = None if gradient is None else gradient.float()
        for optimizer in self._optimizers:
            optimizer.step()
        for name, master in self._masters.items():
            named[name].copy_(master)
        for scheduler in self._schedulers:
            scheduler.step()
        if corrects(self._problem.module):
            correct_balance(self._problem.module, BIAS_RATE)

    def _gradients(self, step: int) -> float:
        """Make the gradients of the mean over a batch, and return it."""
        sum_of_losses = count = 0.0
        for each in self._placed(step):
            total, number = _numbers(self._loss(each))
            total.backward()  # type: ignore[no-untyped-call]
            sum_of_losses, count = sum_of_losses + float(total.detach()), count + float(number)
        for parameter in self._problem.module.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(count)
        return sum_of_losses / count

    def _placed(self, step: int) -> Iterator[Batch]:
        """Yield the batches that are computed at once, each with the place of its rows in the whole batch."""
        batch = self._problem.batches[step]
        rows = self._parts({"rows": torch.arange(length_of(batch))})
        for each, mine in zip(self._parts(batch), rows, strict=True):
            places, tokens = mine["rows"], num_tokens_of(each)
            self._dropouts.stand(Place(step=step, first_row=0, num_rows=len(places), rows=places, num_tokens=tokens))
            yield each

    def _parts(self, batch: Batch) -> list[Batch]:
        # A sum may be over all replicas, as a balancing loss must be.
        return [batch] if self._whole else microbatches_of(batch, self._plan, apart=self._apart)

    def _loss(self, batch: Batch) -> Any:
        problem = self._problem
        args, kwargs = self._signature.arguments(batch)
        with self._policy.precision(next(problem.module.parameters()).device):
            return take_metrics(problem.loss(problem.module(*args, **kwargs), batch))[0]

    @torch.no_grad()
    def _check_draws(self) -> None:
        """Refuse a module that draws numbers which no plan can draw alike."""
        found = []
        for seed in range(2):
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                total, count = _numbers(self._loss(next(self._placed(0))))
                found.append(float(total) / float(count))
        if abs(found[0] - found[1]) > _DRAWN * abs(found[0]):
            raise ShardwiseError(
                f"{type(self._problem.module).__name__} draws random numbers of its own in forward (its loss is"
                f" {found[0]:.6g} with one seed and {found[1]:.6g} with another): ranks draw others than one device",
                remedy="nn.Dropout or nn.functional.dropout, whose masks are the same under every plan; or no noise"
                " while it is checked",
            )


def _numbers(result: Any) -> tuple[Tensor, Any]:
    """Return a loss as a sum and the number that it is summed over; a mean counts as one."""
    return result if isinstance(result, tuple) else (result, 1)


def _masters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return full-precision copies of 16-bit weights, for optimizers to work on."""
    return {
        name: nn.Parameter(each.detach().float(), requires_grad=each.requires_grad)
        for name, each in module.named_parameters()
        if each.dtype.itemsize < 4
    }


def _make_optimizers(problem: Problem, masters: dict[str, nn.Parameter]) -> list[Optimizer]:
    """Return the user's optimizers, made on the module's parameters; they work on master weights if there are any."""
    named = dict(problem.module.named_parameters())
    shares = shares_of(problem.optimizer)
    trained = {name: each for name, each in named.items() if each.requires_grad}
    taken = [list(named)] if callable(problem.optimizer) else sort_out(shares, trained)
    made = [share.make([named[name] for name in names]) for share, names in zip(shares, taken, strict=True) if names]
    instead = {id(named[name]): master for name, master in masters.items()}
    for group in (group for optimizer in made for group in optimizer.param_groups):
        group["params"] = [instead.get(id(each), each) for each in group["params"]]
    return made


def _weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: each.detach().clone() for name, each in module.state_dict().items() if isinstance(each, Tensor)}


@torch.no_grad()
def _put(module: nn.Module, weights: dict[str, Tensor]) -> None:
    module.load_state_dict(weights, strict=False)
