"""Which layers become layers of 8 bits, what is said of the others, and what is refused."""

import pickle
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from shardwise.engine.engine import Engine
from shardwise.engine.fp8_layers import Linear, restore_layers, use_fp8
from shardwise.engine.parallelize import parallelize
from shardwise.errors import ShardwiseError
from shardwise.kernels.fp8 import fp8_linear
from tests.stages.small import small_matrices

CPU = torch.device("cpu")


class Loud(nn.Linear):
    """One that does something of its own."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


class Same(nn.Linear):
    """One that comes to the same."""

    def forward(self, input: Tensor) -> Tensor:
        return input @ self.weight.t() + self.bias


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(32, 16)
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        made: Tensor = sum(weights[..., [index]] * each(x) for index, each in enumerate(self.experts))
        return made


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.same, self.loud = nn.Linear(32, 48), Same(48, 32), Loud(32, 32)
        self.odd, self.back, self.patched = nn.Linear(32, 24), nn.Linear(24, 32), nn.Linear(32, 32)
        self.mixture = Mixture()
        self.patched.forward = partial(nn.functional.linear, weight=self.patched.weight)  # type: ignore[method-assign]

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.loud(self.same(torch.tanh(self.first(x))))
        made: Tensor = x + self.back(self.odd(x)) + self.patched(x) + self.mixture(x)
        return made


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(32, 64)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        made: Tensor = self.head(x)
        return made


class Plain(nn.Sequential):
    """No blocks: the last layer is the head."""

    def forward(self, input_ids: Tensor) -> Tensor:
        made: Tensor = super().forward(input_ids)  # type: ignore[no-untyped-call]
        return made


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1).float(), batch["labels"].flatten())


def batch() -> dict[str, Tensor]:
    ids = torch.randint(64, (4, 9), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}


def engine_of(module: nn.Module, plan: str, **options: object) -> Engine:
    return parallelize(module, plan, loss=loss, optimizer=lambda p: SGD(p, 0.1), example=batch(), **options)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    with small_matrices():
        yield


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_EMULATE_FP8", "1")


def test_layers_of_blocks_are_in_fp8_and_of_the_others_it_is_told_why(emulated: None) -> None:
    del emulated
    torch.manual_seed(0)
    module = Net()
    before = {name: (type(each), each.weight) for name, each in module.named_modules() if isinstance(each, nn.Linear)}
    names = list(module.state_dict())
    with pytest.warns(UserWarning, match=r"4 linear layers stay in bf16.*multiples of 16: layers\.\*\.odd, .*back"):
        engine = engine_of(module, "precision=fp8")
    with engine:
        lines = engine.explain().splitlines()
        assert isinstance(module.layers[0].get_submodule("first"), Linear)
        assert list(engine.state_dict()) == names
        engine.train_step(batch())
    told = next(line for line in lines if line.startswith("in fp8"))
    assert told.endswith("4 linear layers: layers.*.first, layers.*.same")
    assert "a scale for each tensor, emulated" in told
    wide = [line for line in lines if line.startswith("not in fp8")]
    reasons = {name: line for line in wide for name in line.split(": ")[1].split(", ")}
    assert "outside of the blocks" in reasons["head"]
    assert "Loud's own" in reasons["layers.*.loud"]
    assert "replaced by another function" in reasons["layers.*.patched"]
    assert "24 x 32" in reasons["layers.*.odd"]
    assert "a router" in reasons["layers.*.mixture.gate"]
    assert "an expert" in reasons["layers.*.mixture.experts.*"]
    # When the engine is closed, layers are what they were.
    for name, (kind, weight) in before.items():
        layer = module.get_submodule(name)
        assert type(layer) is kind
        assert layer.weight is weight


def test_an_engine_that_was_not_closed_leaves_no_layer_in_fp8_to_the_next(emulated: None) -> None:
    del emulated
    module = Plain(nn.Embedding(64, 32), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 64))
    first = engine_of(module, "precision=fp8")
    assert [type(each).__module__ for each in module][1] == "shardwise.engine.fp8_layers"
    assert "not in fp8: 3: the head" in first.explain()
    with engine_of(module, "precision=bf16") as engine:
        assert type(module[1]) is nn.Linear
        assert "fp8" not in engine.explain()


def test_a_layer_computes_what_the_kernel_does_and_can_be_pickled() -> None:
    layer, x = nn.Linear(32, 48), torch.randn(5, 32)
    module = nn.ModuleList([nn.Sequential(layer)])
    assert use_fp8(module, "row", CPU).narrow == ("0.0",)
    assert torch.equal(layer(x), fp8_linear(x, layer.weight, layer.bias, scales="row"))
    assert not torch.equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias))
    assert torch.equal(pickle.loads(pickle.dumps(module)).get_submodule("0.0")(x), layer(x))
    restore_layers(module)
    assert torch.equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias))


def test_weights_that_lie_the_other_way_are_taken_as_they_lie() -> None:
    transformers = pytest.importorskip("transformers")
    layer = transformers.pytorch_utils.Conv1D(48, 32)
    module = nn.ModuleList([nn.Sequential(layer)])
    plain = layer(x := torch.randn(5, 32))
    use_fp8(module, "tensor", CPU)
    assert torch.equal(layer(x), fp8_linear(x, layer.weight.t(), layer.bias))
    assert (layer(x) - plain).norm() < 0.08 * plain.norm()


def test_a_module_without_such_layers_is_refused() -> None:
    module = nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 7))
    with pytest.raises(
        ShardwiseError, match=r"no linear layer of Sequential .* 7 x 7, are no multiples of 16"
    ) as caught:
        use_fp8(module, "tensor", CPU)
    assert caught.value.remedy == "precision=bf16"


def test_on_a_processor_it_is_an_explicit_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHARDWISE_EMULATE_FP8", raising=False)
    with pytest.raises(ShardwiseError, match="precision=fp8: processors have no products of 8-bit numbers") as caught:
        engine_of(Net(), "precision=fp8")
    assert caught.value.remedy == "precision=fp32; or SHARDWISE_EMULATE_FP8=1, which computes the same numbers slowly"


def test_weights_without_masters_are_of_sixteen_bits(emulated: None) -> None:
    del emulated
    module = Plain(nn.Embedding(64, 32), nn.Linear(32, 32), nn.Linear(32, 64))
    with pytest.raises(ShardwiseError, match=r"masters=False is for weights of 16 bits.*0\.weight: float32"):
        engine_of(module, "precision=fp8", masters=False)
    with engine_of(module.to(torch.bfloat16), "precision=fp8", masters=False) as engine:
        engine.train_step(batch())
        assert all(bucket.master is None for bucket in engine.states.data.buckets)


# The compiler makes an object of the class of a function, which torch advises against.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:.*linear layers stay in bf16")
@pytest.mark.parametrize(
    "ways",
    [
        [("precision=fp8,recompute=selective", False), ("pp=2,schedule=zb-h1,precision=fp8", False)],
        pytest.param(
            [
                ("precision=fp8,recompute=full", False),
                ("precision=fp8,offload.activations=1", False),
                ("precision=fp8", "aot_eager"),
                ("pp=2,schedule=zb-h1,precision=fp8", "aot_eager"),
            ],
            marks=pytest.mark.whole,
        ),
    ],
    ids=["plain", "compiled"],
)
def test_every_way_to_compute_a_step_gives_the_same_gradients(ways: list[tuple[str, object]], emulated: None) -> None:
    del emulated
    expected: dict[str, Tensor] = {}
    for plan, compiled in [("precision=fp8", False), *ways]:
        torch.manual_seed(0)
        with engine_of(Net().to(torch.bfloat16), plan, compile=compiled) as engine:
            engine.train_step(batch())
            found = engine.gradients()
        expected = expected or found
        for name, each in found.items():
            error = (each.float() - expected[name].float()).norm() / expected[name].float().norm()
            assert error < 1e-2, f"{name} under {plan}, compile={compiled}: {error:.3g}"
