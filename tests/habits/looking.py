"""`engine.module` between steps: looked at, written to, copied, saved, and parts of it frozen or replaced."""

import copy
import io
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD

from tests.habits.harness import Parallelize, Result, batch, in_two_groups, program, small_net, start, trained

AWAY = {
    "zero=3": r"between steps each of 2 ranks keeps a piece of it \(zero=3\)",
    "pp": r"it is on another stage of the pipeline \(pp=2\)",
    "tp": r"it has a part of it, .* \(tp=2\)",
    "offload.parameters=1.0": r"it is in memory of the host \(offload.parameters=1\)",
}
GRADIENT = {**AWAY, "zero": "the gradient of .* is not here"}
OTHERS = {"tp": AWAY["tp"], "pp": AWAY["pp"], "zero=3": AWAY["zero=3"], "offload.parameters=1.0": "memory of the host"}


@program(AWAY)
def norms_of_weights(parallelize: Parallelize) -> Result:
    """Logged after each step."""
    model = small_net()
    engine = start(parallelize, model)
    return trained(engine, between=lambda step: {f"{n} {step}": p.norm() for n, p in model.named_parameters()})


@program(AWAY)
def norms_after_flush(parallelize: Parallelize) -> Result:
    """The same by `engine.module`, when all that is under way was waited for."""
    engine = start(parallelize, small_net())

    def between(step: int) -> dict[str, Any]:
        engine.flush()
        return {f"norm {step}": sum(float(each.detach().square().sum()) for each in engine.module.parameters())}

    return trained(engine, between=between)


@program(AWAY)
def the_modules_own_state_dict(parallelize: Parallelize) -> Result:
    """`torch.save(model.state_dict())`, read back."""
    model = small_net()
    engine = start(parallelize, model)

    def between(step: int) -> dict[str, Any]:
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        return {f"{name} {step}": each for name, each in torch.load(file).items()}

    return trained(engine, between=between)


@program(AWAY)
def the_module_saved_whole(parallelize: Parallelize) -> Result:
    """A parameter that was looked at is pickled as it always was."""
    model = small_net()
    engine = start(parallelize, model)
    engine.train_step(batch(0))
    file = io.BytesIO()
    torch.save(model.norm, file)
    torch.save(dict(model.named_parameters()), file := io.BytesIO())
    file.seek(0)
    return {name: each.detach() for name, each in torch.load(file).items()}


@program(AWAY)
def a_copy_as_moving_average(parallelize: Parallelize) -> Result:
    """EMA of weights as everybody writes it."""
    model = small_net()
    average = copy.deepcopy(model)
    engine = start(parallelize, model)

    @torch.no_grad()
    def between(_: int) -> None:
        for mean, each in zip(average.parameters(), model.parameters(), strict=True):
            mean.lerp_(each, 0.1)

    found = trained(engine, between=between)
    return {**found, **{f"mean {name}": each.detach() for name, each in average.named_parameters()}}


@program(AWAY)
def a_deep_copy_between_steps(parallelize: Parallelize) -> Result:
    """The best model so far is kept as a copy."""
    model = small_net()
    engine = start(parallelize, model)
    engine.train_step(batch(0))
    best = copy.deepcopy(model)
    engine.train_step(batch(1))
    return {name: each.detach() for name, each in best.named_parameters()}


@program(AWAY)
def the_module_called_between_steps(parallelize: Parallelize) -> Result:
    """For a sample, say."""
    model = small_net()
    engine = start(parallelize, model)

    @torch.no_grad()
    def between(step: int) -> dict[str, Any]:
        return {f"scores {step}": model(batch(9)["x"])}

    return trained(engine, between=between)


@program()
def numbers_of_parameters(parallelize: Parallelize) -> Result:
    """What asks for no numbers is answered on every rank."""
    model = small_net(tied=True)
    engine = start(parallelize, model)
    engine.train_step(batch(0))
    assert all(each.requires_grad and each.dtype is torch.float64 for each in engine.module.parameters())
    assert all(isinstance(each, nn.Parameter) for each in engine.parameters.values()) if _is_ours(engine) else True
    return {"names": len(list(engine.module.named_parameters()))}


def _is_ours(engine: Any) -> bool:
    return hasattr(engine, "parameters")


@program(GRADIENT)
def gradients_looked_at(parallelize: Parallelize) -> Result:
    """`p.grad.norm()` after a step; whole where it is there."""
    model = small_net()
    engine = start(parallelize, model)

    def between(step: int) -> dict[str, Any]:
        return {f"{n} {step}": p.grad.norm() for n, p in model.named_parameters() if p.grad is not None}

    return trained(engine, between=between)


@program()
def gradients_asked_of_the_engine(parallelize: Parallelize) -> Result:
    """The same by the way that is right under every plan."""
    engine = start(parallelize, small_net())

    def between(step: int) -> dict[str, Any]:
        return {f"{name} {step}": each.norm() for name, each in engine.gradients().items()}

    return trained(engine, between=between)


@program(OTHERS)
def weights_scaled_in_place(parallelize: Parallelize) -> Result:
    """Weights are shrunk by hand after each step."""
    model = small_net()
    engine = start(parallelize, model)

    @torch.no_grad()
    def between(_: int) -> None:
        for each in model.parameters():
            each.mul_(0.9)

    return trained(engine, between=between)


@program(OTHERS)
def weights_clamped_through_data(parallelize: Parallelize) -> Result:
    """As WGAN does it."""
    model = small_net()
    engine = start(parallelize, model)

    def between(_: int) -> None:
        for each in model.parameters():
            each.data.clamp_(-0.2, 0.2)

    return trained(engine, between=between)


@program(OTHERS)
def weights_given_other_memory(parallelize: Parallelize) -> Result:
    """`p.data = ...`: the engine's memory is not where the parameter looks any more."""
    model = small_net()
    engine = start(parallelize, model)

    def between(_: int) -> None:
        for each in model.parameters():
            each.data = each.data.clamp(-0.2, 0.2)

    return trained(engine, between=between)


@program(OTHERS)
def weights_set_from_a_vector(parallelize: Parallelize) -> Result:
    """`torch.nn.utils.vector_to_parameters`."""
    model = small_net()
    engine = start(parallelize, model)

    def between(_: int) -> None:
        vector = nn.utils.parameters_to_vector(model.parameters())
        nn.utils.vector_to_parameters(0.9 * vector, model.parameters())

    return trained(engine, between=between)


@program(OTHERS)
def weights_loaded_into_the_module(parallelize: Parallelize) -> Result:
    """By the module's own method, and not by the engine's."""
    model, other = small_net(), small_net()
    engine = start(parallelize, model)
    engine.train_step(batch(0))
    model.load_state_dict(other.state_dict())
    return trained(engine)


@program(OTHERS)
def blocks_loaded_by_themselves(parallelize: Parallelize) -> Result:
    """`model.layers.load_state_dict(...)`: of a part of the module alone."""
    model, other = small_net(), small_net()
    engine = start(parallelize, model)
    engine.train_step(batch(0))
    model.layers.load_state_dict(other.layers.state_dict())
    return trained(engine)


@program()
def weights_loaded_by_the_engine(parallelize: Parallelize) -> Result:
    """Under every plan."""
    model, other = small_net(), small_net()
    engine = start(parallelize, model)
    engine.train_step(batch(0))
    engine.load_state_dict(other.state_dict())
    return trained(engine)


@program({part: AWAY[part] for part in ("zero=3", "pp", "tp")})
def looked_at_after_close(parallelize: Parallelize) -> Result:
    """`with ... as engine`, and then the model is saved. What was on the host is a parameter there."""
    model = small_net()
    engine = start(parallelize, model)
    engine.train_step(batch(0))
    engine.close()
    return {name: each.cpu() for name, each in model.state_dict().items()}


@program({"all": r"1 parameters require a gradient now and did not when the engine was made \(embed.weight\)"})
def a_layer_unfrozen_later(parallelize: Parallelize) -> Result:
    """Gradual unfreezing: no optimizer would have it."""
    model = small_net()
    model.embed.requires_grad_(False)
    engine = start(parallelize, model)

    def between(step: int) -> None:
        if step == 0:
            model.embed.requires_grad_(True)

    return trained(engine, between=between)


@program()
def a_layer_frozen_later(parallelize: Parallelize) -> Result:
    """It gets no gradient and stays as it is."""
    model = small_net()
    engine = start(parallelize, model, lambda p: SGD(p, lr=0.1))

    def between(step: int) -> None:
        if step == 0:
            engine.module.layers[0].requires_grad_(False)

    return trained(engine, between=between)


@program()
def frozen_and_unfrozen_again(parallelize: Parallelize) -> Result:
    """What the engine was made with may come and go."""
    engine = start(parallelize, small_net(), lambda p: SGD(p, lr=0.1))
    return trained(engine, between=lambda step: engine.module.norm.requires_grad_(step != 0) and None)


@program()
def unfrozen_from_the_beginning_with_rate_zero(parallelize: Parallelize) -> Result:
    """What the sentence says to do instead."""
    model = small_net()
    engine = start(parallelize, model, in_two_groups(model.embed.weight, 0.0, 0.1))

    def between(step: int) -> None:
        engine.optimizers[0].param_groups[0]["lr"] = 0.1 * step

    return trained(engine, between=between)


@program({"all": "head.weight is another parameter than the engine was made with"})
def a_parameter_replaced(parallelize: Parallelize) -> Result:
    """The head is made anew between steps."""
    engine = start(parallelize, small_net())
    engine.train_step(batch(0))
    engine.module.head.weight = nn.Parameter(torch.zeros(12, 8, dtype=torch.float64))
    return trained(engine)


@program({"all": "head is another module than the engine was made with"}, always=True)
def a_layer_replaced(parallelize: Parallelize) -> Result:
    """A new head, for other classes."""
    engine = start(parallelize, small_net())
    engine.train_step(batch(0))
    engine.module.head = nn.Linear(8, 12, bias=False).double()
    return trained(engine)


@program({"all": "layers.0 is another module than the engine was made with"})
def blocks_exchanged(parallelize: Parallelize) -> Result:
    """Two blocks change places."""
    engine = start(parallelize, small_net())
    engine.train_step(batch(0))
    layers = engine.module.layers
    layers[0], layers[1] = layers[1], layers[0]
    return trained(engine)


@program({"all": "what is new would never be trained"})
def an_adapter_added_later(parallelize: Parallelize) -> Result:
    """LoRA injected after `parallelize`."""
    engine = start(parallelize, small_net())
    engine.train_step(batch(0))
    engine.module.adapter = nn.Linear(8, 8).double()
    return trained(engine)


@program({"all": r"clip=-1.0 would turn gradients round"})
def clip_of_minus_one(parallelize: Parallelize) -> Result:
    """Which some libraries take for none."""
    return trained(start(parallelize, small_net(), clip=-1.0))


@program({"all": "clip=0.0 is no norm to clip to"})
def clip_of_zero(parallelize: Parallelize) -> Result:
    """Which others take for none."""
    return trained(start(parallelize, small_net(), clip=0.0))


@program()
def clip_of_infinity(parallelize: Parallelize) -> Result:
    """To have the norm alone."""
    engine = start(parallelize, small_net(), clip=float("inf"))
    return trained(engine, between=lambda step: {f"norm {step}": engine.gradient_norm})


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        dropped: Tensor = self.drop(torch.tanh(self.up(x)))
        return x + dropped


@program()
def dropout_switched_off_by_eval(parallelize: Parallelize) -> Result:
    """A module that is partly in evaluation mode stays so."""
    model = small_net(block=Dropping)
    model.train()
    model.layers.eval()
    return trained(start(parallelize, model))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.batch = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = self.batch(self.up(x).transpose(1, 2)).transpose(1, 2)
        return x + normed


@program({"cp": "is a BatchNorm1d, which mixes the tokens"})
def frozen_batch_norms(parallelize: Parallelize) -> Result:
    """Fine-tuning with statistics as they are: `bn.eval()` before training, which is not undone."""
    model = small_net(block=Normed)
    for each in model.modules():
        if isinstance(each, nn.BatchNorm1d):
            each.eval()
    return trained(start(parallelize, model))


@program()
def a_module_loaded_in_evaluation_mode(parallelize: Parallelize) -> Result:
    """`from_pretrained` gives it so; all of it, and it is trained."""
    model = small_net()
    model.eval()
    engine = start(parallelize, model)
    assert engine.module.training
    return trained(engine)


@program()
def tensors_held_from_before(parallelize: Parallelize) -> Result:
    """What looks into the memory that parameters had stays readable: it has the numbers of before."""
    model = small_net()
    held = [each.data for each in model.parameters()] + [each.detach()[0] for each in model.parameters()]
    before = [each.clone() for each in held]
    engine = start(parallelize, model)
    found = trained(engine)
    assert type(engine).__name__ == "Plain" or all(torch.isfinite(each).all() for each in held)
    return {**found, "before": torch.cat([each.flatten() for each in before])}


@program(AWAY)
def averaged_by_torch(parallelize: Parallelize) -> Result:
    """`AveragedModel`, told of the module after each step."""
    model = small_net()
    averaged = torch.optim.swa_utils.AveragedModel(model)
    engine = start(parallelize, model)
    found = trained(engine, between=lambda _: averaged.update_parameters(model))
    return {**found, **{f"mean {name}": each.detach() for name, each in averaged.named_parameters()}}


@program(AWAY, always=True)
def views_kept_over_steps(parallelize: Parallelize) -> Result:
    """`weights = [p.data for p in ...]` and `p.detach().numpy()`, taken once: read and written after every step."""
    model = small_net()
    engine = start(parallelize, model)
    first, *others = model.parameters()
    array, views = first.detach().numpy(), [each.data for each in others]

    def between(step: int) -> dict[str, Any]:
        found = float(abs(array).sum()) + float(sum(each.abs().sum() for each in views))
        array[...] *= 0.99
        for each in views:
            each.mul_(0.99)
        return {f"sum {step}": found}

    return trained(engine, between=between)
