"""Groups of parameters: by shape, identity, name, attribute and place; what is left out, and what is foreign."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adafactor, Adagrad, Adam, AdamW, NAdam, Optimizer, RMSprop

import shardwise as sw
from tests.habits.harness import Parallelize, Result, batch, program, sgd, small_net, start, trained


def of_groups(kind: Any, groups: list[dict[str, Any]], **settings: Any) -> Optimizer:
    made: Optimizer = kind(groups, **settings)
    return made


DECAY = {"weight_decay": 0.3}
PIECES = "would see"


@program()
def decay_by_shape(parallelize: Parallelize) -> Result:
    """nanoGPT's groups: matrices decay, vectors do not."""

    def make(parameters: Iterable[nn.Parameter]) -> Optimizer:
        every = list(parameters)
        matrices = [each for each in every if each.dim() >= 2]
        vectors = [each for each in every if each.dim() < 2]
        return of_groups(AdamW, [{"params": matrices, **DECAY}, {"params": vectors, "weight_decay": 0.0}], lr=1e-2)

    return trained(start(parallelize, small_net(), make))


@program()
def decay_by_identity(parallelize: Parallelize) -> Result:
    """The embedding is known by the object that it is."""
    model = small_net()

    def make(parameters: Iterable[nn.Parameter]) -> Optimizer:
        others = [each for each in parameters if each is not model.embed.weight]
        return of_groups(AdamW, [{"params": [model.embed.weight], "lr": 1e-3}, {"params": others, **DECAY}], lr=1e-2)

    return trained(start(parallelize, model, make))


@program()
def decay_by_name(parallelize: Parallelize) -> Result:
    """Names come from the module: the parameters that are given are not used at all."""
    model = small_net()

    def make(_: Iterable[nn.Parameter]) -> Optimizer:
        named = dict(model.named_parameters())
        slow = [each for name, each in named.items() if "norm" in name or name.endswith("bias")]
        fast = [each for name, each in named.items() if not ("norm" in name or name.endswith("bias"))]
        return of_groups(SGD, [{"params": slow, "lr": 0.01}, {"params": fast, **DECAY}], lr=0.1)

    return trained(start(parallelize, model, make))


@program()
def decay_by_attribute(parallelize: Parallelize) -> Result:
    """timm and many others mark parameters."""
    model = small_net()
    for each in model.norm.parameters():
        each.no_decay = True  # type: ignore[attr-defined]

    def make(parameters: Iterable[nn.Parameter]) -> Optimizer:
        every = list(parameters)
        kept = [each for each in every if getattr(each, "no_decay", False)]
        rest = [each for each in every if not getattr(each, "no_decay", False)]
        return of_groups(SGD, [{"params": kept, "lr": 0.5}, {"params": rest, **DECAY}], lr=0.1)

    return trained(start(parallelize, model, make))


@program()
def rate_by_place(parallelize: Parallelize) -> Result:
    """The first three are slow, the last is fast."""

    def make(parameters: Iterable[nn.Parameter]) -> Optimizer:
        every = list(parameters)
        return of_groups(
            SGD, [{"params": every[:3], "lr": 0.01}, {"params": every[3:-1]}, {"params": every[-1:], "lr": 0.3}], lr=0.1
        )

    return trained(start(parallelize, small_net(), make))


@program()
def rate_by_place_beside_frozen(parallelize: Parallelize) -> Result:
    """What is frozen has its place in `model.parameters()` too."""
    model = small_net()
    model.embed.requires_grad_(False)

    def make(parameters: Iterable[nn.Parameter]) -> Optimizer:
        every = list(parameters)
        return of_groups(SGD, [{"params": every[:3], "lr": 0.01}, {"params": every[3:]}], lr=0.1)

    return trained(start(parallelize, model, make))


@program()
def layer_wise_rates(parallelize: Parallelize) -> Result:
    """A learning rate that falls towards the input: fine-tuning of BERT."""
    model = small_net()

    def make(_: Iterable[nn.Parameter]) -> Optimizer:
        parts = [model.embed, *model.layers, nn.ModuleList([model.norm, model.head])]
        groups = [{"params": list(each.parameters()), "lr": 0.1 * 0.5 ** (3 - at)} for at, each in enumerate(parts)]
        return of_groups(SGD, groups, momentum=0.9)

    return trained(start(parallelize, model, make))


@program()
def a_group_for_each_parameter(parallelize: Parallelize) -> Result:
    """As LARS and layer-wise schedules have it."""

    def make(parameters: Iterable[nn.Parameter]) -> Optimizer:
        return of_groups(
            SGD, [{"params": [each], "lr": 0.02 * (1 + at % 4)} for at, each in enumerate(parameters)], momentum=0.9
        )

    return trained(start(parallelize, small_net(), make))


@program()
def tied_weights_in_one_group(parallelize: Parallelize) -> Result:
    """A tied weight is one parameter, by its first name."""
    model = small_net(tied=True)

    def make(parameters: Iterable[nn.Parameter]) -> Optimizer:
        every = list(parameters)
        tied = [each for each in every if each is model.head.weight]
        return of_groups(
            SGD, [{"params": tied, "lr": 0.02}, {"params": [e for e in every if e is not tied[0]]}], lr=0.1
        )

    return trained(start(parallelize, model, make))


@program()
def names_given_to_torch(parallelize: Parallelize) -> Result:
    """torch takes pairs of names and parameters."""
    model = small_net()
    return trained(start(parallelize, model, lambda _: AdamW(model.named_parameters(), lr=1e-2)))


@program()
def an_optimizer_that_is_there(parallelize: Parallelize) -> Result:
    """Made before `parallelize`, as every other library wants it, and handed over."""
    model = small_net()
    made = AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    return trained(start(parallelize, model, lambda _: made))


@program()
def adagrad_makes_its_state_at_once(parallelize: Parallelize) -> Result:
    """Its sums begin with a number, in the constructor."""
    return trained(start(parallelize, small_net(), lambda p: Adagrad(p, lr=0.1, initial_accumulator_value=0.5)))


@program()
def rmsprop_and_groups(parallelize: Parallelize) -> Result:
    """Another optimizer, with groups of other settings than the rate."""

    def make(parameters: Iterable[nn.Parameter]) -> Optimizer:
        every = list(parameters)
        return of_groups(
            RMSprop, [{"params": every[::2], "alpha": 0.9}, {"params": every[1::2], "momentum": 0.5}], lr=1e-2
        )

    return trained(start(parallelize, small_net(), make))


@program()
def nadam(parallelize: Parallelize) -> Result:
    """State that is one number for each parameter."""
    return trained(start(parallelize, small_net(), lambda p: NAdam(p, lr=1e-2)))


@program()
def amsgrad_in_one_group(parallelize: Parallelize) -> Result:
    """Groups whose state has other entries."""

    def make(parameters: Iterable[nn.Parameter]) -> Optimizer:
        every = list(parameters)
        return of_groups(Adam, [{"params": every[:4], "amsgrad": True}, {"params": every[4:]}], lr=1e-2)

    return trained(start(parallelize, small_net(), make))


@program()
def matrices_seen_whole_in_groups(parallelize: Parallelize) -> Result:
    """Adafactor looks at rows and columns: a group each for matrices and vectors."""

    def make(parameters: Iterable[nn.Parameter]) -> Optimizer:
        every = list(parameters)
        groups = [[each for each in every if (each.dim() >= 2) is wide] for wide in (True, False)]
        return of_groups(Adafactor, [{"params": groups[0], **DECAY}, {"params": groups[1]}], lr=1e-2)

    return trained(start(parallelize, small_net(), make))


@program()
def shares_by_shape(parallelize: Parallelize) -> Result:
    """Two optimizers; a share sees whole parameters, also under tp."""
    shares = [
        sw.Share(make=lambda p: SGD(p, lr=0.1, weight_decay=0.3), takes=lambda _, p: p.shape == (16, 8)),
        sw.Share(make=lambda p: AdamW(p, lr=1e-2)),
    ]
    return trained(start(parallelize, small_net(), shares))


@program()
def a_scheduler_made_in_the_factory(parallelize: Parallelize) -> Result:
    """It hangs on the optimizer that it was made for, and on the numbers of its groups."""
    schedulers: list[Any] = []

    def make(parameters: Iterable[nn.Parameter]) -> Optimizer:
        every = list(parameters)
        made = of_groups(SGD, [{"params": every[:5]}, {"params": every[5:]}], lr=0.1)
        rates = [lambda step: 0.5**step, lambda step: 1.0 / (1 + step)]
        schedulers.append(torch.optim.lr_scheduler.LambdaLR(made, rates))
        return made

    return trained(start(parallelize, small_net(), make), between=lambda _: schedulers[0].step())


@program()
def a_scheduler_of_the_engines_optimizer(parallelize: Parallelize) -> Result:
    """One for each group, made afterwards: groups have the same numbers on every rank."""

    def make(parameters: Iterable[nn.Parameter]) -> Optimizer:
        every = list(parameters)
        return of_groups(SGD, [{"params": every[:1]}, {"params": every[1:]}], lr=0.1)

    engine = start(parallelize, small_net(), make)
    scheduler = torch.optim.lr_scheduler.LambdaLR(engine.optimizers[0], [lambda s: 0.1**s, lambda s: 0.5**s])
    return trained(engine, between=lambda _: scheduler.step())


@program()
def rates_changed_between_steps(parallelize: Parallelize) -> Result:
    """`param_groups[1]["lr"]` is set by hand."""

    def make(parameters: Iterable[nn.Parameter]) -> Optimizer:
        every = list(parameters)
        return of_groups(SGD, [{"params": every[-1:]}, {"params": every[:-1]}], lr=0.1)

    engine = start(parallelize, small_net(), make)

    def between(step: int) -> None:
        engine.optimizers[0].param_groups[0]["lr"] = 0.01 * step

    return trained(engine, between=between)


@program({"all": r"1 of the 16 parameters that require a gradient are in no group of the optimizer \(head.weight\)"})
def the_head_left_out(parallelize: Parallelize) -> Result:
    """It gets gradients and would never move."""
    model = small_net()
    return trained(start(parallelize, model, lambda p: sgd([each for each in p if each is not model.head.weight])))


@program({"all": "no parameters of the module"})
def parameters_of_another_model(parallelize: Parallelize) -> Result:
    """A copy of the model is trained by mistake."""
    other = small_net()
    return trained(start(parallelize, small_net(), lambda _: sgd(other.parameters())))


@program({"all": "no parameters of the module"})
def a_parameter_of_the_loss(parallelize: Parallelize) -> Result:
    """A temperature that is trained, and belongs to no module."""
    temperature = nn.Parameter(torch.ones(1, dtype=torch.float64))
    return trained(start(parallelize, small_net(), lambda p: sgd([*p, temperature])))


@program({"all": "head.weight is in two optimizers, SGD and AdamW"})
def a_parameter_in_two_shares(parallelize: Parallelize) -> Result:
    """The second share takes what it was not given."""
    model = small_net()
    shares = [
        sw.Share(make=lambda p: SGD(p, lr=0.1), takes=lambda name, _: name == "head.weight"),
        sw.Share(make=lambda _: AdamW(model.parameters(), lr=1e-2)),
    ]
    return trained(start(parallelize, model, shares))


@program({"all": "returned a tuple of 2, and not one torch.optim.Optimizer"})
def optimizer_and_scheduler(parallelize: Parallelize) -> Result:
    """As Lightning's `configure_optimizers` returns them."""

    def make(parameters: Iterable[nn.Parameter]) -> Any:
        made = SGD(parameters, lr=0.1)
        return made, torch.optim.lr_scheduler.StepLR(made, 1)

    return trained(start(parallelize, small_net(), make))


@program({"all": "LBFGS computes the loss again within a step, by a closure"})
def lbfgs(parallelize: Parallelize) -> Result:
    """It needs a closure."""
    return trained(start(parallelize, small_net(), lambda p: torch.optim.LBFGS(p, lr=0.1)))


@program({"all": "SparseAdam takes sparse gradients alone"})
def sparse_adam(parallelize: Parallelize) -> Result:
    """It needs sparse gradients."""
    return trained(start(parallelize, small_net(), torch.optim.SparseAdam))


class Clipped(SGD):
    """Somebody's own: it scales every step by the norm of the parameter's gradient."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    each.sub_(group["lr"] * each.grad / each.grad.norm().clamp(min=1.0))
        return closure


@program(dict.fromkeys(("zero", "tp"), "whether Clipped can update a piece by itself is not known"))
def an_optimizer_of_ones_own(parallelize: Parallelize) -> Result:
    """Nobody knows whether it may see pieces: it does where parameters are whole, else one has to say."""
    return trained(start(parallelize, small_net(), lambda p: Clipped(p, lr=0.1)))


@program()
def an_optimizer_of_ones_own_that_sees_wholes(parallelize: Parallelize) -> Result:
    """And that has been said."""
    return trained(start(parallelize, small_net(), [sw.Share(make=lambda p: Clipped(p, lr=0.1), whole=True)]))


class Averaging(SGD):
    """Keeps a list of its parameters, as wrappers of optimizers do."""

    def __init__(self, params: Iterable[nn.Parameter], **settings: Any) -> None:
        kept = list(params)
        super().__init__(kept, **settings)
        self.kept = kept


@program({"all": "Averaging.kept keeps 16 parameters beside its groups"})
def an_optimizer_that_keeps_parameters(parallelize: Parallelize) -> Result:
    """Those would be the whole ones, which nobody trains."""
    shares = [sw.Share(make=lambda p: Averaging(p, lr=0.1), whole=False)]
    return trained(start(parallelize, small_net(), shares))


def _hooked(norms: list[float]) -> Any:
    def make(parameters: Iterable[nn.Parameter]) -> Optimizer:
        made = SGD(parameters, lr=0.1)

        def look(optimizer: Optimizer, *_: Any) -> None:
            every = [each for group in optimizer.param_groups for each in group["params"]]
            norms.append(float(sum(each.grad.square().sum() for each in every if each.grad is not None)))

        made.register_step_pre_hook(look)
        return made

    return make


@program(dict.fromkeys(("zero", "tp", "pp", "offload.optimizer=1.0", "offload.parameters=1.0"), PIECES))
def a_hook_of_steps_that_looks_at_norms(parallelize: Parallelize) -> Result:
    """It would see pieces; where it sees all it is right."""
    norms: list[float] = []
    found = trained(start(parallelize, small_net(), _hooked(norms)))
    return {**found, **{f"norm {at}": each for at, each in enumerate(norms)}}


@program(dict.fromkeys(("zero", "tp", "pp", "offload.optimizer=1.0", "offload.parameters=1.0"), PIECES))
def a_hook_registered_later(parallelize: Parallelize) -> Result:
    """On the engine's own optimizer, between steps."""
    engine = start(parallelize, small_net())
    first = engine.train_step(batch(0))
    engine.optimizers[0].register_step_post_hook(lambda *_: None)
    return {"first": first, **trained(engine)}


@program()
def the_optimizers_state_goes_on(parallelize: Parallelize) -> Result:
    """Saved, and loaded by another engine with groups made by shape."""

    def make(parameters: Iterable[nn.Parameter]) -> Optimizer:
        every = list(parameters)
        groups = [[each for each in every if (each.dim() >= 2) is wide] for wide in (True, False)]
        return of_groups(AdamW, [{"params": groups[0], **DECAY}, {"params": groups[1]}], lr=1e-2)

    engine = start(parallelize, small_net(), make)
    found = {"loss": engine.train_step(batch(7))}
    if hasattr(engine, "optimizer_state_dict"):
        weights, state = engine.state_dict(), engine.optimizer_state_dict()
        assert [len(each["params"]) for each in state["param_groups"]] == [6, 10], state["param_groups"]
        engine.close()
        engine = start(parallelize, small_net(), make)
        engine.load_state_dict(weights)
        engine.load_optimizer_state_dict(state)
    return {**found, **trained(engine)}


@program()
def a_module_on_the_meta_device(parallelize: Parallelize) -> Result:
    """Groups by shape and identity, and state from the constructor, where parameters have no numbers yet."""
    weights = small_net().state_dict()
    with torch.device("meta"):
        model = small_net()

    def make(parameters: Iterable[nn.Parameter]) -> Optimizer:
        every = list(parameters)
        slow = [each for each in every if each is model.head.weight or each.dim() < 2]
        rest = [each for each in every if all(each is not other for other in slow)]
        return of_groups(
            Adagrad, [{"params": slow, "lr": 0.01}, {"params": rest}], lr=0.1, initial_accumulator_value=0.1
        )

    engine = start(parallelize, model, make)
    engine.load_state_dict(weights)
    return trained(engine)


@program(only="dp")
def a_mask_on_gradients(parallelize: Parallelize) -> Result:
    """Some rows of the embedding are not trained: a hook that multiplies."""
    model = small_net()
    mask = torch.ones(12, 1, dtype=torch.float64)
    mask[3:6] = 0
    model.embed.weight.register_hook(lambda gradient: gradient * mask)  # type: ignore[no-untyped-call]
    return trained(start(parallelize, model))


@program({"dp": "a hook of head.weight", "microbatches": "a hook of head.weight"}, only="dp")
def gradients_clamped_by_a_hook(parallelize: Parallelize) -> Result:
    """A clamp of parts is no clamp of their sum."""
    model = small_net()
    model.head.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))  # type: ignore[no-untyped-call]
    return trained(start(parallelize, model))


@program({"dp": "a hook of head.weight"}, only="dp")
def gradients_logged_by_a_hook(parallelize: Parallelize) -> Result:
    """It would log those of some rows."""
    model, norms = small_net(), list[float]()
    model.head.weight.register_hook(lambda gradient: norms.append(float(gradient.norm())))  # type: ignore[no-untyped-call]
    found = trained(start(parallelize, model))
    return {**found, "norms": torch.tensor(norms)}


@program({"dp": r"a hook of embed.weight \(register_post_accumulate_grad_hook\)"}, only="dp")
def a_step_in_the_backward(parallelize: Parallelize) -> Result:
    """An optimizer for each parameter, stepped when its gradient is there."""
    model = small_net()
    for each in model.parameters():
        each.register_post_accumulate_grad_hook(lambda p: SGD([p], lr=0.1).step())  # type: ignore[no-untyped-call]
    return trained(start(parallelize, model))


@program()
def state_that_a_scheduler_has_seen(parallelize: Parallelize) -> Result:
    """Saved with a scheduler on it, loaded before the next one is made; parameters were given with names."""

    def make_for(model: nn.Module) -> Any:
        return lambda _: AdamW(model.named_parameters(), lr=1e-2)

    model = small_net()
    engine = start(parallelize, model, make_for(model))
    torch.optim.lr_scheduler.StepLR(engine.optimizers[0], 1)
    found = {"loss": engine.train_step(batch(7))}
    if hasattr(engine, "optimizer_state_dict"):
        weights, state = engine.state_dict(), engine.optimizer_state_dict()
        assert len(state["param_groups"]) == 1, state["param_groups"]
        engine.close()
        model = small_net()
        engine = start(parallelize, model, make_for(model))
        engine.load_state_dict(weights)
        engine.load_optimizer_state_dict(state)
    return {**found, **trained(engine)}
