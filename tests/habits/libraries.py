"""What users of timm, PEFT, fairseq and Accelerate write into blocks and loops: scales, masks, states, penalties."""
# Programs as users write them.
# mypy: disable-error-code="no-any-return,assignment,operator,arg-type,index,func-returns-value"

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from tests.habits.harness import (
    Block,
    Net,
    Parallelize,
    Result,
    batch,
    cross_entropy,
    program,
    sgd,
    small_net,
    start,
    trained,
)

#: Attention over tokens, of which cp gives each rank some, is not that of a part.
SEQUENCE = {"cp": "mixes the tokens|other numbers|attention|recurrent|with a part of a sequence|tokens"}


class LayerScale(Block):
    """A factor for each channel of the residual, small at first."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((8,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gamma * self.down(functional.gelu(self.up(self.norm(x))))


@program()
def layer_scale(parallelize: Parallelize) -> Result:
    """timm's LayerScale, without decay."""

    def make(parameters: Any) -> Any:
        every = list(parameters)
        groups = [{"params": [each for each in every if each.dim() > 1], "weight_decay": 0.1}]
        return torch.optim.AdamW([*groups, {"params": [each for each in every if each.dim() <= 1]}], lr=1e-2, eps=1e-4)

    return trained(start(parallelize, small_net(block=LayerScale), make))


class Standardised(nn.Module):
    """Parametrization: each row of a weight has mean 0 and deviation 1."""

    def forward(self, weight: Tensor) -> Tensor:
        return (weight - weight.mean(1, keepdim=True)) / (weight.std(1, keepdim=True) + 1e-4)


@program()
def weight_standardisation_by_parametrize(parallelize: Parallelize) -> Result:
    """`register_parametrization` on a layer of each block."""
    model = small_net()
    for each in model.layers:
        parametrize.register_parametrization(each.up, "weight", Standardised())
    return trained(start(parallelize, model.double()))


class StandardLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean(1, keepdim=True)
        return functional.linear(x, weight / weight.norm(dim=1, keepdim=True), self.bias)


@program()
def weight_standardisation_by_a_subclass(parallelize: Parallelize) -> Result:
    """A subclass of Linear that changes its weight in the forward."""

    class Own(Block):
        def __init__(self) -> None:
            super().__init__()
            self.up = StandardLinear(8, 16)

    return trained(start(parallelize, small_net(block=Own)))


@program({"cp": "its loss raises|other numbers"}, whole=True)
def smoothed_labels_with_weights_of_classes(parallelize: Parallelize) -> Result:
    """Both at once: the smoothed part has weights of its own."""
    weights = torch.linspace(0.5, 2.0, 12, dtype=torch.float64)

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        labels = given["labels"].flatten()
        total = functional.cross_entropy(
            output.flatten(0, 1), labels, weight=weights, label_smoothing=0.1, reduction="sum"
        )
        return total, weights[labels].sum()

    return trained(parallelize(small_net(), loss=loss, optimizer=sgd, example=batch(0)))


@program({"cp": "other numbers"})
def mixed_up_outside_of_the_module(parallelize: Parallelize) -> Result:
    """Mixup in the loop: targets are distributions."""

    class Soft(Net):
        def forward(self, x: Tensor) -> Tensor:
            hidden = x @ self.embed.weight
            for layer in self.layers:
                hidden = layer(hidden)
            return self.head(self.norm(hidden))

    def mixed(step: int) -> dict[str, Tensor]:
        x, labels = (functional.one_hot(batch(step)[key], 12).double() for key in ("x", "labels"))
        return {"x": 0.7 * x + 0.3 * x.flip(0), "labels": 0.7 * labels + 0.3 * labels.flip(0)}

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> tuple[Tensor, int]:
        rows = -(given["labels"] * output.log_softmax(-1)).sum(-1)
        return rows.sum(), rows.numel()

    engine = parallelize(Soft().double(), loss=loss, optimizer=sgd, example=mixed(0))
    found = {f"loss {step}": engine.train_step(mixed(step)) for step in range(3)}
    return {**found, **engine.state_dict()}


@program()
def a_backward_hook_that_looks(parallelize: Parallelize) -> Result:
    """`register_full_backward_hook` on a block, which changes nothing."""
    model, seen = small_net(), []
    model.layers[0].register_full_backward_hook(lambda _, given, made: seen.append(len(given) + len(made)))
    return trained(start(parallelize, model))


class Attends(Block):
    """`nn.MultiheadAttention` with a causal mask and one of padding."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        padding = torch.zeros(x.shape[:2], dtype=torch.bool)
        seen, _ = self.attention(x, x, x, attn_mask=mask, key_padding_mask=padding, need_weights=False)
        return super().forward(x + seen)


@program(SEQUENCE)
def torch_attention_with_two_masks(parallelize: Parallelize) -> Result:
    """As in torch's own tutorials."""
    return trained(start(parallelize, small_net(block=Attends)))


class Recurrent(Net):
    """Two GRUs: the state of the first is where the second begins."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.GRU(8, 8, batch_first=True), nn.GRU(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        hidden, state = self.first(self.embed(x))
        hidden, _ = self.second(hidden, state)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden))


@program(SEQUENCE)
def a_state_passed_between_recurrent_layers(parallelize: Parallelize) -> Result:
    """It has its rows in its second dimension."""
    return trained(start(parallelize, Recurrent().double()))


class Listed(Block):
    """Weights in a list and in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = nn.ParameterList([nn.Parameter(torch.full((8,), 1.0 + 0.1 * each)) for each in range(2)])
        self.named = nn.ParameterDict({"shift": nn.Parameter(torch.zeros(8)), "turn": nn.Parameter(torch.eye(8))})

    def forward(self, x: Tensor) -> Tensor:
        for each in self.factors:
            x = x * each
        return super().forward(x @ self.named["turn"] + self.named["shift"])


@program()
def parameter_lists_and_dictionaries(parallelize: Parallelize) -> Result:
    """`nn.ParameterList` and `nn.ParameterDict`."""
    return trained(start(parallelize, small_net(block=Listed)))


@program()
def lazy_layers_that_were_run_once(parallelize: Parallelize) -> Result:
    """`nn.LazyLinear`, made by a first forward."""

    class Lazy(Block):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.LazyLinear(16)

    torch.manual_seed(3)
    model = Net(block=Lazy)
    model(batch(0)["x"])
    return trained(start(parallelize, model.double()))


@program({"all": "up.weight has no shape yet"})
def lazy_layers_that_were_never_run(parallelize: Parallelize) -> Result:
    """Their weights have no shape yet."""

    class Lazy(Block):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.LazyLinear(16)

    return trained(start(parallelize, Net(block=Lazy).double()))


class Checkpointed(Block):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


@program()
def checkpoints_by_hand(parallelize: Parallelize) -> Result:
    """`torch.utils.checkpoint` inside of blocks."""
    return trained(start(parallelize, small_net(block=Checkpointed)))


class Dropped(Block):
    """Stochastic depth of a rate that is 0, and a division by what is kept, as timm's DropPath."""

    def forward(self, x: Tensor) -> Tensor:
        kept = 1.0
        made = super().forward(x) - x
        mask = torch.ones(x.shape[0], *(1,) * (x.dim() - 1), dtype=x.dtype).bernoulli_(kept)
        return x + made / kept * mask


@program()
def stochastic_depth(parallelize: Parallelize) -> Result:
    """One draw for each row, of which all are kept."""
    return trained(start(parallelize, small_net(block=Dropped)))


class Merged(Net):
    """Token merging: pairs of tokens become one, and come apart again at the end."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        merged = (hidden[:, :2] + hidden[:, -2:]) / 2
        for layer in self.layers:
            merged = layer(merged)
        return self.head(self.norm(hidden + merged.mean(1, keepdim=True)))


@program(SEQUENCE)
def tokens_merged(parallelize: Parallelize) -> Result:
    """A shorter sequence inside of the blocks."""
    return trained(start(parallelize, Merged().double()))


@program({"zero=3": "gradients are asked for", "cp": "other numbers"}, but="pp")
def a_gradient_penalty(parallelize: Parallelize) -> Result:
    """The gradient of the scores by the embedded input, squared: a second derivative."""

    class Penalised(Net):
        def forward(self, x: Tensor) -> Any:
            with torch.enable_grad():
                made = hidden = self.embed(x)
                for layer in self.layers:
                    made = layer(made)
                scores = self.head(self.norm(made))
                (slope,) = torch.autograd.grad(scores.square().sum(), hidden, create_graph=True)
            return scores, slope.square().sum((1, 2))

    def loss(output: Any, given: Mapping[str, Tensor]) -> Tensor:
        return cross_entropy(output[0], given) + 0.01 * output[1].mean()

    return trained(parallelize(Penalised().double(), loss=loss, optimizer=sgd, example=batch(0)))


@program()
def an_average_of_states_by_hand(parallelize: Parallelize) -> Result:
    """EMA of `engine.state_dict()`, evaluated, and the weights put back."""
    engine = start(parallelize, small_net())
    average = {name: each.clone() for name, each in engine.state_dict().items()}
    found: dict[str, Any] = {}
    for step in range(3):
        found[f"loss {step}"] = engine.train_step(batch(step))
        for name, each in engine.state_dict().items():
            average[name].lerp_(each, 0.1)
    kept = copy.deepcopy(dict(engine.state_dict()))
    engine.load_state_dict(average)
    found["averaged"] = engine.evaluate(batch(9))
    engine.load_state_dict(kept)
    found["later"] = engine.train_step(batch(3))
    return {**found, **engine.state_dict()}


@program()
def lookahead_by_hand(parallelize: Parallelize) -> Result:
    """Slow weights: every second step they go half of the way, and fast ones begin there again."""
    engine = start(parallelize, small_net())
    slow = {name: each.clone() for name, each in engine.state_dict().items()}
    found: dict[str, Any] = {}
    for step in range(4):
        found[f"loss {step}"] = engine.train_step(batch(step))
        if step % 2:
            for name, each in engine.state_dict().items():
                slow[name].lerp_(each, 0.5)
            engine.load_state_dict(slow)
    return {**found, **engine.state_dict()}


@program()
def accumulation_by_larger_batches(parallelize: Parallelize) -> Result:
    """What was two backwards before a step is one batch of twice the rows."""
    engine = start(parallelize, small_net())
    found: dict[str, Any] = {}
    for step in range(2):
        parts = batch(2 * step), batch(2 * step + 1)
        found[f"loss {step}"] = engine.train_step({key: torch.cat([each[key] for each in parts]) for key in parts[0]})
    return {**found, **engine.state_dict()}


class Adapter(Block):
    """A frozen block with a small trained one beside it, which begins as nothing."""

    def __init__(self) -> None:
        super().__init__()
        for each in self.parameters():
            each.requires_grad_(False)
        self.into, self.out = nn.Linear(8, 2), nn.Linear(2, 8)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.out(functional.relu(self.into(x)))


@program()
def adapters_in_frozen_blocks(parallelize: Parallelize) -> Result:
    """Houlsby's adapters: the factory is given what is trained."""

    def make(parameters: Any) -> Any:
        return torch.optim.SGD([each for each in parameters if each.requires_grad], lr=0.1)

    return trained(start(parallelize, small_net(block=Adapter), make))


class Prompted(Net):
    """Learned tokens before the sequence, taken off behind."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt = nn.Parameter(torch.randn(2, 8))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.cat([self.prompt.expand(len(x), -1, -1), self.embed(x)], 1)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden[:, 2:]))


@program()
def a_learned_prompt(parallelize: Parallelize) -> Result:
    """PEFT's prompt tuning."""
    return trained(start(parallelize, Prompted().double()))


class Functional(Block):
    """`torch.func.functional_call` with weights that are changed on the way."""

    def forward(self, x: Tensor) -> Tensor:
        weights = {name: each * 0.5 for name, each in self.down.named_parameters()}
        hidden = torch.func.functional_call(self.down, weights, torch.tanh(self.up(self.norm(x))))
        return x + hidden


@program()
def a_functional_call(parallelize: Parallelize) -> Result:
    """Half of the weights of a layer."""
    return trained(start(parallelize, small_net(block=Functional)))
