"""Compiled units: the same numbers under every schedule, no gradient computed twice, and few compilations."""

import copy
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends import debugging
from torch._dynamo.utils import counters
from torch.nn.functional import cross_entropy
from torch.optim import SGD

from shardwise.engine.engine import Engine
from shardwise.engine.parallelize import parallelize
from shardwise.errors import ShardwiseError
from shardwise.execution.interpreter import Interpreter
from shardwise.ranks.spawn import Ranks
from shardwise.schedule.instruction import Instruction
from shardwise.stages.stage import Batch
from tests.same import Trained, assert_same, train
from tests.stages.odd_nets import Shared
from tests.stages.pieces import Net
from tests.stages.small import small_matrices

NUM_TOKENS = 11

# Torch's compiler warns of itself.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
]


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    with small_matrices():
        yield


def tokens(size: int = 8, length: int = 5) -> dict[str, Tensor]:
    ids = torch.randint(0, NUM_TOKENS, (size, length + 1), generator=torch.Generator().manual_seed(length))
    return {"ids": ids[:, :-1], "labels": ids[:, 1:]}


def token_loss(output: Tensor, batch: Batch) -> tuple[Tensor, int]:
    labels: Tensor = batch["labels"]
    return cross_entropy(output.flatten(0, 1).float(), labels.flatten(), reduction="sum"), labels.numel()


def square(output: Tensor, _: Batch) -> Tensor:
    return output.square().mean()


def an_engine(module: nn.Module, plan: str, **changed: Any) -> Engine:
    given: dict[str, Any] = {
        "loss": token_loss,
        "optimizer": lambda parameters: SGD(parameters, lr=0.1),
        "example": tokens(),
        **changed,
    }
    engine = parallelize(module, plan, **given)
    assert isinstance(engine, Engine)
    return engine


def trained(module: nn.Module, plan: str, batches: list[dict[str, Tensor]], **changed: Any) -> Trained:
    return train(an_engine(module, plan, example=batches[0], **changed), batches)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v", pytest.param("dualpipe-v", marks=pytest.mark.whole)])
def test_a_compiled_pipeline_trains_as_the_plain_one_does(schedule: str) -> None:
    plan = f"pp=2,microbatches=4,schedule={schedule}"
    batches = [tokens(), tokens(length=7), tokens(length=9), tokens()]
    expected = trained(Net(num_blocks=4), plan, batches)
    assert_same(trained(Net(num_blocks=4), plan, batches, compile="aot_eager"), expected, 1e-5)
    assert counters["stats"]["unique_graphs"] > 0


class Convolutions(nn.Module):
    """Blocks of convolutions and batch norm, of which one reads what an earlier one made."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        widths = [3, 4, 4, 4]
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(before, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()) for before in widths
        )

    def forward(self, x: Tensor) -> Tensor:
        first = self.blocks[0](x)
        return self.blocks[3](self.blocks[2](self.blocks[1](first)) + first)  # type: ignore[no-any-return]


IMAGES = {"x": torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(1))}


@pytest.mark.parametrize("more", ["", ",recompute=full"])
def test_batch_norm_and_skips_keep_working(more: str) -> None:
    plan = f"pp=2,microbatches=2,schedule=zb-h1{more}"
    expected = trained(Convolutions(), plan, [IMAGES], loss=square)
    assert "blocks.2.1.running_mean" in expected.weights
    assert_same(trained(Convolutions(), plan, [IMAGES], loss=square, compile="aot_eager"), expected, 1e-5)


def test_a_unit_that_is_called_again_and_again_has_its_gradients_added_up() -> None:
    torch.manual_seed(0)
    module, batch = Shared(), {"x": torch.randn(4, 8)}
    plan = "pp=2,microbatches=2,schedule=zb-h1"
    expected = trained(copy.deepcopy(module), plan, [batch], loss=square)
    assert_same(trained(module, plan, [batch], loss=square, compile="aot_eager"), expected, 1e-5)


def test_bf16_is_compiled_too() -> None:
    plan = "pp=2,microbatches=4,schedule=zb-v,precision=bf16"
    expected = trained(Net(num_blocks=4), plan, [tokens()])
    assert_same(trained(Net(num_blocks=4), plan, [tokens()], compile="aot_eager"), expected, tolerance=0.02)


class Counting:
    """What the compiled graphs of an engine compute, by the kind of instruction that runs them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self._at = ""
        compute, nop = Interpreter.compute, debugging.boxed_nop

        def watched(interpreter: Interpreter, instruction: Instruction) -> None:
            self._at = str(instruction.kind)
            compute(interpreter, instruction)

        def counted(graph: torch.fx.GraphModule, examples: list[Any]) -> Any:
            inner = nop(graph, examples)
            done = Counter(name for node in graph.graph.nodes if (name := _expensive(node)) is not None)

            def run(args: list[Any]) -> Any:
                self.counts.update({(self._at, name): count for name, count in done.items()})
                return inner(args)

            run._boxed_call = True  # type: ignore[attr-defined]
            return run

        monkeypatch.setattr(Interpreter, "compute", watched)
        monkeypatch.setattr(torch._dynamo.backends.debugging, "boxed_nop", counted)


def _expensive(node: torch.fx.Node) -> str | None:
    """A matrix product or a convolution; of a convolution's backward also which gradients it makes."""
    name = getattr(node.target, "_schema", None) and node.target._schema.name.removeprefix("aten::")  # type: ignore[union-attr]
    if name == "convolution_backward":
        return f"convolution_backward {node.args[-1]}"
    return name if name in ("mm", "addmm", "convolution") else None


def test_an_input_gradient_computes_no_weight_gradient_and_nothing_is_computed_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counting = Counting(monkeypatch)
    engine = an_engine(Net(num_blocks=6), "pp=3,microbatches=4,schedule=zb-h1,layers=2+2+2", compile="aot_eager")
    engine.train_step(tokens())
    # One matrix in each of 6 blocks: 3 x 4 microbatches x 6 products. The first stage has no input to wait for, and
    # leaves all to its W.
    assert counting.counts == {("F", "addmm"): 24, ("I", "mm"): 16, ("W", "mm"): 16 + 16}


def test_a_convolution_is_told_which_of_its_gradients_to_make(monkeypatch: pytest.MonkeyPatch) -> None:
    counting = Counting(monkeypatch)
    plan = "pp=2,microbatches=2,schedule=zb-h1,layers=2+2"
    an_engine(Convolutions(), plan, loss=square, example=IMAGES, compile="aot_eager").train_step(IMAGES)
    assert counting.counts == {
        ("F", "convolution"): 8,
        # Of the second stage. The first has no input to wait for, and its first block not even one inside.
        ("I", "convolution_backward [True, False, False]"): 4,
        ("W", "convolution_backward [False, True, True]"): 4 + 2,
        ("W", "convolution_backward [True, True, True]"): 2,
    }


def test_blocks_of_one_shape_are_compiled_once_and_a_new_length_at_most_once_more() -> None:
    engine = an_engine(Net(num_blocks=6), "pp=2,microbatches=4,schedule=zb-h1", compile="aot_eager")
    engine.train_step(tokens())
    # The embedding, and one block for all six of them.
    assert counters["stats"]["unique_graphs"] == 2
    engine.train_step(tokens())
    assert counters["stats"]["unique_graphs"] == 2
    for length in (6, 7, 8, 9, 10):
        engine.train_step(tokens(length=length))
    assert counters["stats"]["unique_graphs"] <= 4


def test_a_compiled_loss_is_compiled_for_the_batches_of_training_alone() -> None:
    """Trials see other shapes, under modes that watch: what they compile would be slow, and used up the compiler's
    patience (an H200: 6 % of a Llama-1B's speed, and 16 GiB)."""
    shapes: list[Any] = []

    def compiler(graph: Any, given: list[Any]) -> Any:
        shapes.append(next(each.shape[0] for each in given if isinstance(each, Tensor)))
        return graph.forward

    batch = tokens()
    engine = parallelize(
        Net(num_blocks=2), "dp=1", loss=torch.compile(token_loss, backend=compiler),
        optimizer=lambda parameters: SGD(parameters, lr=0.1), example=batch,
    )  # fmt: skip
    assert shapes == []
    for _ in range(2):
        engine.train_step(batch)
    assert shapes == [len(batch["ids"])]


def on_rank(compile: str | bool, schedule: str) -> Trained:
    torch.set_num_threads(1)
    batches = [tokens(), tokens(length=7)]
    engine = parallelize(
        Net(num_blocks=2),
        f"pp=2,microbatches=2,schedule={schedule}",
        loss=token_loss,
        optimizer=lambda parameters: SGD(parameters, lr=0.1),
        example=batches[0],
        compile=compile,
    )
    with engine:
        return train(engine, batches)


@pytest.mark.parametrize("schedule", ["zb-h1", pytest.param("interleaved,chunks=2", marks=pytest.mark.whole)])
def test_two_processes_train_compiled_as_they_do_plain(schedule: str, two: Ranks) -> None:
    plain, compiled = (two.run(on_rank, compile, schedule) for compile in (False, "aot_eager"))
    for found, expected in zip(compiled, plain, strict=True):
        assert_same(found, expected, 1e-5)


def _has_compiler() -> bool:
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        return bool(get_cpp_compiler())
    except InvalidCxxCompiler:
        return False


@pytest.mark.whole  # A GPU compiles so by default: `make test-gpu` has it.
@pytest.mark.skipif(not _has_compiler(), reason="inductor needs a C++ compiler here")
def test_inductor_gives_the_same_too() -> None:
    plan = "pp=2,microbatches=4,schedule=zb-h1"
    expected = trained(Net(num_blocks=2), plan, [tokens()])
    assert_same(trained(Net(num_blocks=2), plan, [tokens()], compile=True), expected, 1e-5)


def test_evaluation_of_compiled_units_is_the_same_and_compiles_nothing() -> None:
    engine = an_engine(Net(num_blocks=4), "pp=2,microbatches=4,schedule=zb-v", compile="aot_eager")
    plain = an_engine(Net(num_blocks=4), "pp=2,microbatches=4,schedule=zb-v", compile="eager")
    assert engine.evaluate(tokens()) == pytest.approx(plain.evaluate(tokens()), rel=1e-6)
    assert counters["stats"]["unique_graphs"] == 0
    assert engine.train_step(tokens()) == pytest.approx(plain.train_step(tokens()), rel=1e-6)


def test_an_unknown_backend_is_refused_with_the_nearest() -> None:
    with pytest.raises(ShardwiseError) as caught:
        an_engine(Net(num_blocks=4), "pp=2,microbatches=4", compile="induktor")
    assert str(caught.value) == (
        "unknown backend to compile with 'induktor'; known: inductor, aot_eager, eager\n  try: inductor"
    )


def test_inductor_without_a_compiler_is_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import cpp_builder
    from torch._inductor.exc import InvalidCxxCompiler

    def none() -> str:
        raise InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none)
    with pytest.raises(ShardwiseError) as caught:
        an_engine(Net(num_blocks=4), "pp=2,microbatches=4", compile=True)
    assert str(caught.value) == (
        "compile='inductor' needs a C++ compiler for cpu, and none is found\n  try: compile='aot_eager'"
    )
