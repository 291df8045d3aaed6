"""What scripts of trainers do around a step and inside of a loss: pops, returned outputs, modes, settings, prunings."""
# Programs as users write them.
# mypy: disable-error-code="no-any-return,no-untyped-call,arg-type,union-attr,assignment"

import copy
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize, prune

from tests.habits.harness import (
    Batch,
    Block,
    Net,
    Parallelize,
    Plain,
    Result,
    batch,
    cross_entropy,
    program,
    sgd,
    small_net,
    start,
    trained,
)

#: Of what scripts read or write between steps a rank has a piece, a part or nothing.
GONE = "cannot be read or written on this rank"
AWAY = dict.fromkeys(("zero=3", "pp", "tp", "offload.parameters"), GONE)
#: Parameters that the loss reads.
READS = "the loss reads .* parameters"
READ = dict.fromkeys(("zero=3", "pp", "offload.parameters"), READS)


#: Predictions whose rows are not their first dim.
JOINED = dict.fromkeys(("dp", "pp"), "it cannot be joined")


def with_loss(parallelize: Parallelize, loss: Any, model: nn.Module | None = None, **options: Any) -> Any:
    return parallelize(model or small_net(), loss=loss, optimizer=sgd, example=apart(0), **options)


def apart(seed: int) -> Batch:
    """Inputs and labels that do not share memory."""
    return {name: each.clone() for name, each in batch(seed).items()}


@program()
def labels_popped_by_the_loss(parallelize: Parallelize) -> Result:
    """`inputs.pop("labels")`, as HF's Trainer does."""

    def loss(output: Tensor, given: Any) -> Tensor:
        return functional.cross_entropy(output.flatten(0, 1), given.pop("labels").flatten())

    engine = with_loss(parallelize, loss)
    found = {f"loss {step}": engine.train_step(dict(batch(step))) for step in range(3)}
    return {**found, **engine.state_dict()}


@program(but="cp", whole=True)
def labels_changed_by_the_loss(parallelize: Parallelize) -> Result:
    """`labels[labels == 3] = -100` in place."""

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        labels = given["labels"]
        labels[labels == 3] = -100
        return functional.cross_entropy(output.flatten(0, 1), labels.flatten())

    engine = with_loss(parallelize, loss)
    found = {f"loss {step}": engine.train_step(apart(step)) for step in range(3)}
    return {**found, **engine.state_dict()}


@program({"all": "beside itself, where the number belongs|beside"})
def outputs_returned_beside_the_loss(parallelize: Parallelize) -> Result:
    """`return loss, outputs`, as `compute_loss(return_outputs=True)` does."""

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Any:
        return cross_entropy(output, given), output

    return trained(with_loss(parallelize, loss))


class Overwrites(Net):
    def forward(self, x: Tensor) -> Tensor:
        x[:, 0] = 0
        return super().forward(x)


@program({"cp": "a part of a sequence gives other numbers"})
def inputs_changed_by_the_forward(parallelize: Parallelize) -> Result:
    """`x[:, 0] = 0` in place, and the loss reads `x` as well."""

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        return functional.cross_entropy(output.flatten(0, 1), given["x"].flatten()) + cross_entropy(output, given)

    engine = with_loss(parallelize, loss, Overwrites().double())
    found = {f"loss {step}": engine.train_step(apart(step)) for step in range(3)}
    return {**found, **engine.state_dict()}


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.layers = nn.ModuleList([Block(), Block()])
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 12)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = layer(hidden)
        made: Tensor = self.head(self.norm(hidden.flatten(0, 1)).view_as(hidden))
        return made


@program(but="cp", apart=True)
def evaluation_mode_that_stays(parallelize: Parallelize) -> Result:
    """`model.eval()` before a validation, and nobody calls `train()` afterwards."""
    model = Normed().double()
    engine = start(parallelize, model)

    def between(step: int) -> dict[str, Any]:
        if step == 0:
            engine.module.eval()
        return {f"held out {step}": engine.evaluate(batch(9))}

    return trained(engine, steps=4, between=between)


class Backbone(Net):
    """Its first layers are run without gradients."""

    how = staticmethod(torch.no_grad)

    def forward(self, x: Tensor) -> Tensor:
        with self.how():
            hidden = self.layers[0](self.embed(x))
        return self.head(self.norm(self.layers[1](hidden.clone())))


def rest_only(parameters: Any) -> Any:
    return torch.optim.AdamW([each for each in parameters if each.requires_grad], lr=0.01, weight_decay=0.3)


@program()
def a_backbone_without_gradients(parallelize: Parallelize) -> Result:
    """`with torch.no_grad(): features = backbone(x)`; its parameters are in the optimizer nonetheless."""
    return trained(start(parallelize, Backbone().double(), rest_only))


@program()
def a_backbone_in_inference_mode(parallelize: Parallelize) -> Result:
    """The same with `torch.inference_mode()`."""
    model = Backbone().double()
    model.how = torch.inference_mode
    return trained(start(parallelize, model, rest_only))


class Stopped(Net):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layers[0](self.embed(x))
        return self.head(self.norm(self.layers[1](hidden.detach())))


@program()
def a_gradient_that_is_stopped(parallelize: Parallelize) -> Result:
    """`hidden.detach()` between two blocks; AdamW leaves alone what has no gradient."""
    return trained(start(parallelize, Stopped().double(), rest_only))


@program()
def the_first_half_frozen(parallelize: Parallelize) -> Result:
    """Nothing before the last block is trained."""
    model = small_net()
    for each in (model.embed, model.layers[0]):
        each.requires_grad_(False)
    return trained(start(parallelize, model, rest_only))


@program()
def pruned_weights(parallelize: Parallelize) -> Result:
    """`prune.l1_unstructured`: a weight is computed from another one and a mask before each forward."""
    model = small_net()
    for each in model.layers:
        prune.l1_unstructured(each.up, "weight", amount=0.3)
    return trained(start(parallelize, model))


@program()
def orthogonal_weights(parallelize: Parallelize) -> Result:
    """`parametrizations.orthogonal` on a layer of each block."""
    model = small_net()
    for each in model.layers:
        parametrizations.orthogonal(each.down)
    return trained(start(parallelize, model.double()))


@program(whole=True)
def orthogonal_weights_cached_around_a_step(parallelize: Parallelize) -> Result:
    """`with parametrize.cached():` around a step: each microbatch has a graph of its own."""
    model = small_net()
    for each in model.layers:
        parametrizations.orthogonal(each.down)
    engine = start(parallelize, model.double())
    with parametrize.cached():
        found = {"first": engine.train_step(batch(0))}
    return found | trained(engine)


@program({"all": "is compiled by torch.jit"})
def scripted_blocks(parallelize: Parallelize) -> Result:
    """`torch.jit.script` of a block."""
    model = small_net()
    model.layers[1] = torch.jit.script(model.layers[1])
    return trained(start(parallelize, model))


@program()
def a_graph_of_the_module(parallelize: Parallelize) -> Result:
    """`torch.fx.symbolic_trace(model)`."""
    return trained(start(parallelize, torch.fx.symbolic_trace(small_net())))


class Pads(Net):
    def __init__(self, padding: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8, padding_idx=padding)


@program()
def a_word_that_pads(parallelize: Parallelize) -> Result:
    """`padding_idx` of an embedding: its row has no gradient."""
    return trained(start(parallelize, Pads(9).double()))


@program()
def a_word_that_pads_counted_from_behind(parallelize: Parallelize) -> Result:
    """The same by a negative number, and the embedding's weight is the head's."""
    model = Pads(-2)
    model.head.weight = model.embed.weight
    return trained(start(parallelize, model.double()))


class Types(Net):
    """Layers of two types."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = layer(hidden.to(layer.norm.weight.dtype))
        return self.head(self.norm(hidden.double()))


@program()
def layers_of_two_types(parallelize: Parallelize) -> Result:
    """A block in single precision among others in double."""
    model = Types().double()
    model.layers[1].float()
    return trained(start(parallelize, model))


@program()
def anomalies_looked_for(parallelize: Parallelize) -> Result:
    """`torch.autograd.set_detect_anomaly(True)` around all of it, deterministic algorithms too."""
    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        with torch.autograd.set_detect_anomaly(True):
            return trained(start(parallelize, small_net()))
    finally:
        torch.use_deterministic_algorithms(was)


@program()
def a_phase_with_another_optimizer(parallelize: Parallelize) -> Result:
    """Adam first, then SGD: a second engine of a new module with the state of the first."""
    first = start(parallelize, small_net(), lambda parameters: torch.optim.Adam(parameters, lr=0.01))
    found = {f"first {step}": first.train_step(batch(step)) for step in range(2)}
    state = {name: each.clone() for name, each in first.state_dict().items()}
    first.close()
    model = small_net()
    model.load_state_dict(state)
    return {**found, **trained(start(parallelize, model))}


@program(dict.fromkeys(("zero=3", "pp", "tp"), GONE))
def a_second_phase_of_the_same_module(parallelize: Parallelize) -> Result:
    """The same with the same module."""
    model = small_net()
    first = start(parallelize, model, lambda parameters: torch.optim.Adam(parameters, lr=0.01))
    found = {f"first {step}": first.train_step(batch(step)) for step in range(2)}
    first.close()
    return {**found, **trained(start(parallelize, model))}


@program({**READ, "cp": "a part of a sequence"})
def the_model_called_again_in_the_loss(parallelize: Parallelize) -> Result:
    """Consistency with other inputs: the loss calls the module once more."""
    model = small_net()

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        other = model((given["x"] + 1) % 12)
        return cross_entropy(output, given) + 0.1 * (output - other).square().mean()

    return trained(with_loss(parallelize, loss, model))


class Temperature(Net):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return functional.normalize(super().forward(x), dim=-1) * self.scale.exp().clamp(max=100.0)


@program()
def a_learned_temperature(parallelize: Parallelize) -> Result:
    """A parameter without dims, as CLIP's `logit_scale`."""
    return trained(start(parallelize, Temperature().double()))


class Uncertain(Net):
    """Kendall's weights of two tasks, which the loss reads of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.log_vars = nn.Parameter(torch.zeros(2))


@program({"zero=3": READS, "offload.parameters": READS, "cp": "a part of a sequence"}, always=True)
def weights_of_tasks_that_are_learned(parallelize: Parallelize) -> Result:
    """`exp(-s) * loss + s` for each task, by parameters of the module. No layer has them: the last stage does."""
    model = Uncertain().double()

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        first, second = cross_entropy(output, given), output.square().mean()
        return ((-model.log_vars).exp() * torch.stack([first, second]) + model.log_vars).sum()

    return trained(with_loss(parallelize, loss, model))


class Encoder(nn.Module):
    """torch's own layers, with time first."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0), 2)
        self.head = nn.Linear(8, 12)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.encoder(self.embed(x).transpose(0, 1), src_key_padding_mask=x == 0)
        made: Tensor = self.head(hidden.transpose(0, 1))
        return made


def words(seed: int) -> Batch:
    made = batch(seed)
    return {"x": made["x"].clamp(min=1), "labels": made["labels"]}


@program(but="cp")
def torch_encoder_with_time_first(parallelize: Parallelize) -> Result:
    """`nn.TransformerEncoder` as it is by default."""
    engine = parallelize(Encoder().double(), loss=cross_entropy, optimizer=sgd, example=words(0))
    found = {f"loss {step}": engine.train_step(words(step)) for step in range(3)}
    return {**found, "held out": engine.evaluate(words(9)), **engine.state_dict()}


class Instances(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.layers = nn.ModuleList([Block(), Block()])
        self.norm = nn.InstanceNorm1d(8, track_running_stats=True, affine=True)
        self.head = nn.Linear(8, 12)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = layer(hidden)
        made: Tensor = self.head(self.norm(hidden.transpose(1, 2)).transpose(1, 2))
        return made


@program({"dp": "the forward writes to the buffer norm.running_mean, and 2 replicas"}, but="cp")
def instance_norms_with_statistics(parallelize: Parallelize) -> Result:
    """`InstanceNorm1d(track_running_stats=True)`: statistics are means over the rows of a batch."""
    engine = start(parallelize, Instances().double())
    return trained(engine) | {"held out": engine.evaluate(batch(9))}


def own_seed(plain: bool) -> Net:
    torch.manual_seed(5 + (0 if plain else dist.get_rank()))
    return small_net()


@program({"all": "was given other numbers than rank 0"})
def weights_drawn_from_a_seed_of_each_rank(parallelize: Parallelize) -> Result:
    """DDP sends those of rank 0 to all, and scripts rely on it."""
    is_plain = isinstance(parallelize(small_net(), loss=cross_entropy, optimizer=sgd, example=batch(0)), Plain)
    return trained(start(parallelize, own_seed(is_plain)))


@program({"all": "do not have the same lr"})
def a_rate_changed_on_the_first_rank(parallelize: Parallelize) -> Result:
    """`if rank == 0: scheduler.step()`."""
    engine = start(parallelize, small_net())

    def between(step: int) -> None:
        if isinstance(engine, Plain) or dist.get_rank() == 0:
            for optimizer in engine.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = 0.1 / (step + 2)

    return trained(engine, between=between)


@program(
    {**AWAY, "dp": "written between steps|cannot be read or written", "cp": "were written between"},
    but="late",
)
def weights_changed_on_the_first_rank(parallelize: Parallelize) -> Result:
    """`if rank == 0: model.load_state_dict(...)`, out of habit."""
    engine = start(parallelize, small_net())

    def between(step: int) -> None:
        if step == 0 and (isinstance(engine, Plain) or dist.get_rank() == 0):
            engine.module.head.weight.data.mul_(0.5)

    return trained(engine, between=between)


class Twice(Net):
    """Two crops of each row, one batch of both, as DINO's student sees them."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.cat([x, x.flip(1)]))


@program(JOINED, but="cp")
def two_crops_in_one_batch(parallelize: Parallelize) -> Result:
    """The output has two rows for each row of the batch; so have predictions."""

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        one, other = output.chunk(2)
        return cross_entropy(one, given) + (one - other).square().mean()

    engine = with_loss(parallelize, loss, Twice().double())
    return trained(engine) | {"outputs": engine.predict(batch(9))}


class TimeFirst(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).transpose(0, 1)


@program(JOINED, but="cp")
def outputs_with_time_first(parallelize: Parallelize) -> Result:
    """Predictions have their rows in the second dim."""

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        return cross_entropy(output.transpose(0, 1), given)

    engine = with_loss(parallelize, loss, TimeFirst().double())
    return trained(engine) | {"outputs": engine.predict(batch(9))}


@program(JOINED, but="cp")
def outputs_as_long_as_wide(parallelize: Parallelize) -> Result:
    """The same where a batch has as many rows as tokens."""

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        return cross_entropy(output.transpose(0, 1), given)

    engine = with_loss(parallelize, loss, TimeFirst().double())
    square = torch.randint(12, (4, 4), generator=torch.Generator().manual_seed(1))
    return {"outputs": engine.predict({"x": square})}


class Counts(Net):
    def forward(self, x: Tensor) -> Any:
        scores = super().forward(x)
        return {"scores": scores, "hits": (scores.argmax(-1) == x).sum(), "sum": scores.sum()}


@program(JOINED, but="cp")
def numbers_beside_the_outputs(parallelize: Parallelize) -> Result:
    """The module returns how many it got right, and a sum: a prediction has those of all rows."""

    def loss(output: Any, given: Mapping[str, Tensor]) -> Tensor:
        return cross_entropy(output["scores"], given)

    engine = with_loss(parallelize, loss, Counts().double())
    found = trained(engine)
    made = engine.predict(batch(9))
    return {**found, "hits": made["hits"], "sum": made["sum"]}


@program({**AWAY, "cp": "a part of a sequence"})
def an_average_kept_between_steps(parallelize: Parallelize) -> Result:
    """BYOL: a target network of the module follows in the script, `target.data.lerp_(online.data, 0.1)`."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.online, self.target = Net(), Net()
            self.target.requires_grad_(False)

        def forward(self, x: Tensor) -> Any:
            with torch.no_grad():
                wanted = self.target(x)
            return self.online(x), wanted

    def loss(output: Any, given: Mapping[str, Tensor]) -> Tensor:
        return cross_entropy(output[0], given) + (output[0] - output[1]).square().mean()

    model = Pair().double()
    model.target.load_state_dict(copy.deepcopy(model.online.state_dict()))
    engine = with_loss(parallelize, loss, model)

    def between(_: int) -> None:
        module = engine.module
        for target, online in zip(module.target.parameters(), module.online.parameters(), strict=True):
            target.data.lerp_(online.data, 0.1)

    return trained(engine, between=between)
