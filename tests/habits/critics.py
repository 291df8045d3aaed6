"""What a loss calls or keeps beside the module (critics, tables of samples), quantisers, and compiled forwards."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Normal
from torch.func import grad, vmap
from torch.nn import functional
from torch.nn.utils import parametrizations, spectral_norm

from tests.habits.harness import Batch, Block, Net, Parallelize, Result, program, sgd, start, trained

REMEMBERS = dict.fromkeys(("dp", "microbatches"), "the loss remembers .* and is another the next time")
#: State that does not depend on rows is the same on all replicas, and is not if a process has several parts.
COUNTS = {"microbatches": "the loss remembers 0.*_u"}


def rows(seed: int) -> Batch:
    """Eight samples of classes, with their places in the data."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(8, 6, generator=generator, dtype=torch.float64)
    places = torch.randperm(16, generator=generator)[:8]
    return {"x": x, "labels": torch.randint(4, (8,), generator=generator), "places": places}


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = layers()

    def forward(self, x: Tensor) -> Any:
        return self.net(x)


def fitted(parallelize: Parallelize, loss: Any, model: nn.Module | None = None) -> Result:
    engine = parallelize((model or Rows()).double(), loss=loss, optimizer=sgd, example=rows(0))
    found: dict[str, Any] = {f"loss {step}": engine.train_step(rows(step)) for step in range(4)}
    return {**found, **engine.state_dict()}


def by_critic(critic: nn.Module) -> Any:
    critic.double().requires_grad_(False)
    return lambda output, given: functional.cross_entropy(output, given["labels"]) - critic(output).mean()


@program(COUNTS, but="cp", whole=True)
def a_critic_with_a_spectral_norm(parallelize: Parallelize) -> Result:
    """Each call of the frozen critic in the loss takes a power iteration."""
    return fitted(parallelize, by_critic(nn.Sequential(spectral_norm(nn.Linear(4, 8)), nn.Tanh(), nn.Linear(8, 1))))


@program(COUNTS, but="cp", whole=True)
def a_critic_with_a_parametrized_spectral_norm(parallelize: Parallelize) -> Result:
    """The same with torch's newer one."""
    first = parametrizations.spectral_norm(nn.Linear(4, 8), n_power_iterations=1)
    for name, each in first.named_buffers():
        if name.endswith("_u"):
            each.copy_(functional.normalize(torch.arange(1.0, 9.0), dim=0))
    return fitted(parallelize, by_critic(nn.Sequential(first, nn.Tanh(), nn.Linear(8, 1))))


@program(REMEMBERS, but="cp", whole=True)
def a_table_of_samples_that_training_writes(parallelize: Parallelize) -> Result:
    """Early learning regularisation: a replica would never see what another has written of the same sample."""
    table = torch.zeros(16, 4, dtype=torch.float64)

    def loss(output: Tensor, given: Batch) -> Tensor:
        chance, places = output.softmax(1).clamp(1e-4, 1 - 1e-4), given["places"]
        if torch.is_grad_enabled():
            table[places] = 0.7 * table[places] + 0.3 * chance.detach()
        kept = (1 - (table[places] * chance).sum(1)).log().mean()
        return functional.cross_entropy(output, given["labels"]) + 3 * kept

    return fitted(parallelize, loss)


class _Ensemble(nn.Module):
    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(16, 4, dtype=torch.float64))

    def forward(self, output: Tensor, given: Batch) -> Tensor:
        places = given["places"]
        far = functional.mse_loss(output.softmax(1), self.table[places])
        self.table[places] = 0.6 * self.table[places] + 0.4 * output.softmax(1).detach()
        return functional.cross_entropy(output, given["labels"]) + far


@program(REMEMBERS, but="cp", whole=True)
def a_table_of_samples_in_a_buffer_of_the_criterion(parallelize: Parallelize) -> Result:
    """Temporal ensembling. What a trial has written must not be there when training begins."""
    return fitted(parallelize, _Ensemble())


class _Quantised(nn.Module):
    """A learned step size (LSQ), with its gradient scaled by how many numbers there are."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.step, self.last = layers()[:4], nn.Parameter(torch.tensor(0.3)), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Any:
        hidden = self.net(x)
        scale = (hidden.numel() * 7) ** -0.5
        step = (self.step - self.step * scale).detach() + self.step * scale
        part = hidden / step
        return self.last((part + (part.round() - part).detach()) * step)


def of_rows(output: Tensor, given: Batch) -> Tensor:
    return functional.cross_entropy(output, given["labels"])


@program(dict.fromkeys(("dp", "microbatches"), "but not the gradient of step"), but="cp", whole=True)
def a_step_size_with_a_scaled_gradient(parallelize: Parallelize) -> Result:
    """The scale is a number of all rows in the gradient alone, and that of one parameter of one element."""
    return fitted(parallelize, of_rows, _Quantised())


def hardest(output: Tensor, given: Batch) -> Tensor:
    far = torch.cdist(output, output)
    same = given["labels"][:, None] == given["labels"][None]
    return functional.relu((far * same).max(1).values - (far + 1e6 * same).min(1).values).mean()


@program(dict.fromkeys(("dp", "microbatches"), "the loss of 8 rows"), but="cp", whole=True)
def hardest_triplets_of_a_batch(parallelize: Parallelize) -> Result:
    """Three rows of three classes have no triplet, nor have four: their loss is 0."""

    def loss(output: Tensor, given: Batch) -> Tensor:
        return hardest(output, {**given, "labels": torch.where(given["x"][:, 0] > 0, 1, given["places"] + 2)})

    return fitted(parallelize, loss)


class _Compiled(Net):
    @torch.compile(backend="eager")
    def forward(self, x: Tensor) -> Any:
        return super().forward(x)


@program({"zero": "_Compiled.forward is compiled by torch.compile and calls layers"}, only="zero")
def a_forward_compiled_around_layers(parallelize: Parallelize) -> Result:
    """The compiled code reads weights that are still on their way."""
    return trained(start(parallelize, _Compiled().double()))


#: Where a rank has all weights at any time, compiled code reads the right ones.
LATER = dict.fromkeys(
    ("zero", "pp", "tp", "cp", "offload.optimizer", "offload.parameters"), "was compiled by torch.compile once the eng"
)


@program(LATER)
def a_forward_compiled_when_the_engine_is_there(parallelize: Parallelize) -> Result:
    """`model.forward = torch.compile(model.forward)` after `parallelize`."""
    model = Net().double()
    engine = start(parallelize, model)
    model.forward = torch.compile(model.forward, backend="eager")  # type: ignore[method-assign]
    return trained(engine)


@program(LATER)
def layers_compiled_when_the_engine_is_there(parallelize: Parallelize) -> Result:
    """`layer.compile()` between two steps."""
    model = Net().double()

    def between(step: int) -> None:
        if step == 1:
            for layer in model.layers:
                layer.compile(backend="eager")

    return trained(start(parallelize, model), between=between)


class _Bytes(Block):
    """Counts its forwards in a byte."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.uint8))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return super().forward(x)


@program(but="cp", whole=False)
def forwards_counted_in_a_byte(parallelize: Parallelize) -> Result:
    """A counter that cannot be as large as what counters are tried with."""
    return trained(start(parallelize, Net(block=_Bytes).double()))


class _Likely(Rows):
    zero: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("zero", torch.zeros(4))

    def forward(self, x: Tensor) -> Any:
        made = super().forward(x)
        return made + Normal(self.zero, torch.ones_like(self.zero), validate_args=True).log_prob(made)


@program(but="cp", whole=True)
def distributions_in_a_forward(parallelize: Parallelize) -> Result:
    """They check their numbers, and there are none on the meta device."""
    return fitted(parallelize, of_rows, _Likely())


class _RowByRow(Rows):
    def forward(self, x: Tensor) -> Any:
        return vmap(lambda row: self.net(row[None])[0])(x)


@program(
    {"zero=3": "inside of torch.func", "offload.parameters": "inside of torch.func", "pp": "keeps together"},
    but="cp",
    whole=True,
)
def rows_by_vmap(parallelize: Parallelize) -> Result:
    """Written for one row, and mapped over all: no gradient says when the backward of a layer begins."""
    return fitted(parallelize, of_rows, _RowByRow())


class _Slopes(Rows):
    def forward(self, x: Tensor) -> Any:
        return self.net(x), vmap(grad(lambda row: self.net(row).sum()))(x)


@program(
    {"zero=3": "inside of torch.func", "offload.parameters": "inside of torch.func", "recompute": "of torch.func"},
    but="cp,tp",
    whole=True,
)
def gradients_of_each_row_by_torch_func(parallelize: Parallelize) -> Result:
    """Physics: derivatives of outputs with respect to inputs."""
    return fitted(
        parallelize, lambda output, given: of_rows(output[0], given) + output[1].square().sum(1).mean(), _Slopes()
    )
