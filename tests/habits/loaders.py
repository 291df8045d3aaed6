"""Batches as users bring them: loaders of ranks, samplers, nested containers, tensors as long as a batch by chance."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import shardwise as sw
from tests.habits.harness import Batch, Net, Parallelize, Plain, Result, batch, cross_entropy, program, sgd, small_net

DIFFERENT = {"all": "every rank must be given the same whole batch"}
#: Ranks of one replica, where a plan has such.
ONE_REPLICA = dict.fromkeys(("pp", "tp"), "are parts of one replica")
SIZE = 8


def data() -> TensorDataset:
    ids = torch.randint(12, (6 * SIZE, 4), generator=torch.Generator().manual_seed(3))
    return TensorDataset(ids[:, :-1], ids[:, 1:])


def loader(index: int, count: int, *, epoch: int = 0, shuffle: bool = True) -> Iterator[Batch]:
    """As everybody writes it for DDP: a sampler, and a part of the batch for each replica."""
    rows = data()
    sampler: DistributedSampler[Any] = DistributedSampler(rows, num_replicas=count, rank=index, shuffle=shuffle, seed=5)
    sampler.set_epoch(epoch)
    for x, labels in DataLoader(rows, batch_size=SIZE // count, sampler=sampler):
        yield {"x": x, "labels": labels}


def world(engine: Any) -> tuple[int, int]:
    """This process among all, as users of DDP ask for it; plain torch is alone."""
    return (0, 1) if isinstance(engine, Plain) else (dist.get_rank(), dist.get_world_size())


def run(engine: Any, batches: Any, *, steps: int = 3) -> dict[str, Any]:
    found: dict[str, Any] = {f"loss {step}": engine.train_step(next(batches)) for step in range(steps)}
    return found | {name: each for name, each in engine.state_dict().items() if isinstance(each, Tensor)}


def start(parallelize: Parallelize, model: nn.Module | None = None, **options: Any) -> Any:
    given = {"loss": cross_entropy, "optimizer": sgd, "example": batch(0), **options}
    return parallelize(model or small_net(), **given)


@program(whole=True)
def one_loader_with_one_seed(parallelize: Parallelize) -> Result:
    """Every rank reads all rows, in the same order."""
    engine = start(parallelize)
    return run(engine, loader(0, 1))


@program(DIFFERENT)
def a_sampler_for_each_rank(parallelize: Parallelize) -> Result:
    """DDP's habit, without a word: ranks bring different rows."""
    engine = start(parallelize)
    return run(engine, loader(*world(engine)))


@program(DIFFERENT)
def shuffled_without_a_seed(parallelize: Parallelize) -> Result:
    """A plain loader that shuffles, from a generator that differs between ranks."""
    engine = start(parallelize)
    order = DataLoader(data(), batch_size=SIZE, shuffle=True, generator=torch.Generator().manual_seed(world(engine)[0]))
    return run(engine, ({"x": x, "labels": labels} for x, labels in order))


@program(DIFFERENT)
def an_example_from_the_loader_of_a_rank(parallelize: Parallelize) -> Result:
    """`example=next(iter(loader))`, of another rank's rows: known before anything is made."""
    return run(start(parallelize, example=next(loader(dist.get_rank(), dist.get_world_size()))), loader(0, 1))


@program(DIFFERENT)
def an_epoch_set_on_one_rank_alone(parallelize: Parallelize) -> Result:
    """The first batches are the same, and later ones are not: seen in the step that has them."""
    engine = start(parallelize)
    batches = list(loader(0, 1))
    batches[3:] = list(loader(0, 1, epoch=world(engine)[0]))
    return run(engine, iter(batches), steps=4)


@program(DIFFERENT)
def rows_of_ranks_in_evaluation(parallelize: Parallelize) -> Result:
    """Training is right, and the held out rows are sampled for each rank."""
    engine = start(parallelize)
    found = run(engine, loader(0, 1))
    return {**found, "held out": engine.evaluate(next(loader(*world(engine))))}


@program(whole=True)
def a_sampler_for_each_replica(parallelize: Parallelize) -> Result:
    """The same loader, told so: `batch="local"`, and the sampler is given the replica's numbers."""
    engine = start(parallelize, batch="local")
    return run(engine, loader(engine.replica, engine.num_replicas))


@program({"pp": "cannot be cut into 2 equal microbatches"})
def a_sampler_that_repeats_rows(parallelize: Parallelize) -> Result:
    """`drop_last=False`, and replicas do not divide the rows: some are repeated, and the last batch is small."""
    engine = start(parallelize, batch="local")
    rows = TensorDataset(*data()[: 2 * SIZE + 5])
    count = engine.plan.dp

    def mine(index: int) -> Iterator[Batch]:
        sampler: DistributedSampler[Any] = DistributedSampler(rows, num_replicas=count, rank=index, seed=5)
        for x, labels in DataLoader(rows, batch_size=SIZE // count, sampler=sampler):
            yield {"x": x, "labels": labels}

    if not isinstance(engine, Plain):
        return run(engine, mine(engine.replica))
    together = zip(*map(mine, range(count)), strict=True)
    return run(engine, ({key: torch.cat([each[key] for each in parts]) for key in parts[0]} for parts in together))


@program(whole=True)
def replicas_that_evaluate_their_own(parallelize: Parallelize) -> Result:
    """Held out rows too."""
    engine = start(parallelize, batch="local")
    found = run(engine, loader(engine.replica, engine.num_replicas))
    held_out = loader(engine.replica, engine.num_replicas, shuffle=False)
    return {**found, **{f"held out {number}": engine.evaluate(each) for number, each in enumerate(held_out)}}


@program(ONE_REPLICA, whole=True)
def local_rows_for_each_rank(parallelize: Parallelize) -> Result:
    """`batch="local"` with the numbers of the rank: right where each rank is a replica, else ranks of one differ."""
    engine = start(parallelize, batch="local")
    return run(engine, loader(*world(engine)))


@program(whole=True)
def every_nth_batch(parallelize: Parallelize) -> Result:
    """Accelerate's way: of batches in a row, each process has its own."""
    engine = start(parallelize, batch="local")
    size = SIZE // engine.num_replicas

    def mine() -> Iterator[Batch]:
        for step in range(3):
            first = step * SIZE + engine.replica * size
            x, labels = data()[first : first + size]
            yield {"x": x, "labels": labels}

    return run(engine, mine())


@program(whole=True)
def replicas_with_different_numbers_of_rows(parallelize: Parallelize) -> Result:
    """A last batch that is not full: rows weigh the same, whoever has them."""
    engine = start(parallelize, batch="local")

    def mine() -> Iterator[Batch]:
        for step in range(3):
            ends = [step * SIZE, step * SIZE + 6, step * SIZE + SIZE] if engine.num_replicas > 1 else [step * SIZE] * 2
            first = ends[engine.replica]
            end = ends[engine.replica + 1] if engine.num_replicas > 1 else first + SIZE
            x, labels = data()[first:end]
            yield {"x": x, "labels": labels}

    return run(engine, mine())


@program(whole=True)
def replicas_that_pad_by_themselves(parallelize: Parallelize) -> Result:
    """A collator that pads to the longest of its rows and ignores the rest, as the HF Trainer's: lengths differ."""

    class Tokenwise(Net):
        """Without positions, so that padding changes no other token."""

    engine = start(parallelize, Tokenwise().double(), batch="local")

    def mine() -> Iterator[Batch]:
        for step in range(3):
            x, labels = data()[step * SIZE : (step + 1) * SIZE]
            size = SIZE // engine.num_replicas
            rows = slice(engine.replica * size, (engine.replica + 1) * size)
            longest = 3 if engine.replica == 0 else 2
            kept = labels.clone()
            kept[SIZE // 2 :, 2] = -100
            yield {"x": x[rows, :longest], "labels": kept[rows, :longest]}

    return run(engine, mine())


@program(whole=True)
def a_last_batch_that_is_small(parallelize: Parallelize) -> Result:
    """`drop_last=False`: the same on all ranks."""
    engine = start(parallelize)
    return run(engine, iter([batch(0, 8), batch(1, 8), batch(2, 4)]))


@program({"dp": "a batch of 7 cannot be shared out", "pp": "a batch of 7 cannot be cut"}, whole=True)
def a_batch_of_seven(parallelize: Parallelize) -> Result:
    """Rows that do not divide."""
    return run(start(parallelize), iter([batch(0, 7), batch(1, 7), batch(2, 7)]))


class Nested(Net):
    """Takes its input from inside of a dictionary."""

    def forward(self, inputs: Any) -> Any:
        return super().forward(inputs["ids"]) * inputs["scale"][0][:, None, None]


def nested(seed: int) -> dict[str, Any]:
    given = batch(seed)
    scale = torch.linspace(0.5, 1, 4, dtype=torch.float64)
    return {"inputs": {"ids": given["x"], "scale": [scale]}, "labels": given["labels"]}


@program(whole=True)
def dictionaries_in_dictionaries(parallelize: Parallelize) -> Result:
    """Tensors are cut wherever they are, also in a list inside of a dictionary."""
    engine = start(parallelize, Nested().double(), example=nested(0))
    return run(engine, (nested(step) for step in range(3)))


class Pair(NamedTuple):
    ids: Tensor
    scale: Tensor


@dataclass
class Target:
    labels: Tensor


class FromPair(Net):
    def forward(self, pair: Pair) -> Tensor:  # type: ignore[override]
        return super().forward(pair.ids) * pair.scale[:, None, None]


@program(whole=True)
def named_tuples_and_dataclasses(parallelize: Parallelize) -> Result:
    """As collators of one's own make them."""

    def make(seed: int) -> dict[str, Any]:
        given = batch(seed)
        scale = torch.linspace(0.5, 1, 4, dtype=torch.float64)
        return {"pair": Pair(given["x"], scale), "target": Target(given["labels"])}

    def loss(output: Tensor, given: Any) -> Any:
        return cross_entropy(output, {"labels": given["target"].labels})

    engine = start(parallelize, FromPair().double(), loss=loss, example=make(0))
    return run(engine, (make(step) for step in range(3)))


@program(whole=True)
def an_ordered_dictionary_of_a_library(parallelize: Parallelize) -> Result:
    """A mapping of another class, as tokenizers and models return them."""

    def make(seed: int) -> dict[str, Any]:
        return {"x": batch(seed)["x"], "targets": OrderedDict(labels=batch(seed)["labels"])}

    def loss(output: Tensor, given: Any) -> Any:
        return cross_entropy(output, given["targets"])

    return run(start(parallelize, loss=loss, example=make(0)), (make(step) for step in range(3)))


def weighted(output: Tensor, given: Any, weights: list[float]) -> Tensor:
    losses = functional.cross_entropy(output.flatten(0, 1), given["labels"].flatten(), reduction="none")
    return (losses.view(len(output), -1).mean(1) * torch.tensor(weights, dtype=torch.float64)).mean()


@program(whole=True)
def a_list_of_strings(parallelize: Parallelize) -> Result:
    """One for each row, that the loss reads."""

    def make(seed: int) -> dict[str, Any]:
        return {**batch(seed), "names": ["a", "bb", "ccc", "dddd"]}

    def loss(output: Tensor, given: Any) -> Any:
        return weighted(output, given, [float(len(each)) for each in given["names"]])

    return run(start(parallelize, loss=loss, example=make(0)), (make(step) for step in range(3)))


@program(whole=True)
def a_list_of_targets(parallelize: Parallelize) -> Result:
    """A dictionary for each row with tensors of any length, as detectors have them."""

    def make(seed: int) -> dict[str, Any]:
        boxes = [{"boxes": torch.ones(number, 4, dtype=torch.float64)} for number in (2, 1, 3, 5)]
        return {**batch(seed), "targets": boxes}

    def loss(output: Tensor, given: Any) -> Any:
        return weighted(output, given, [float(each["boxes"].sum()) / 4 for each in given["targets"]])

    return run(start(parallelize, loss=loss, example=make(0)), (make(step) for step in range(3)))


NUMBERS = {"dp": "as many as the batch has rows: is there one for each", "pp": "as many as the batch has rows"}


@program(NUMBERS, whole=True)
def a_list_of_numbers(parallelize: Parallelize) -> Result:
    """As long as the batch: it could be either."""
    return run(*_numbers(parallelize, lambda numbers: numbers))


@program(whole=True)
def a_list_of_numbers_that_are_rows(parallelize: Parallelize) -> Result:
    """`sw.rows` says that there is one for each row."""
    return run(*_numbers(parallelize, sw.rows))


def _numbers(parallelize: Parallelize, mark: Any) -> tuple[Any, Any]:
    def make(seed: int) -> dict[str, Any]:
        return {**batch(seed), "numbers": mark([1.0, 2.0, 0.5, 1.5])}

    def loss(output: Tensor, given: Any) -> Any:
        return weighted(output, given, given["numbers"])

    return start(parallelize, loss=loss, example=make(0)), (make(step) for step in range(3))


@program(whole=True)
def a_tuple_of_features(parallelize: Parallelize) -> Result:
    """Two tensors that both have all rows."""

    def make(seed: int) -> dict[str, Any]:
        extra = torch.linspace(0, 1, 4, dtype=torch.float64)
        return {**batch(seed), "features": (extra, extra.flip(0))}

    def loss(output: Tensor, given: Any) -> Any:
        first, second = given["features"]
        return cross_entropy(output, given) + (output.mean((1, 2)) * (first + 2 * second)).mean()

    return run(start(parallelize, loss=loss, example=make(0)), (make(step) for step in range(3)))


@program(whole=True)
def an_array_of_numpy(parallelize: Parallelize) -> Result:
    """Rows in an array that nobody made a tensor of."""

    def make(seed: int) -> dict[str, Any]:
        return {**batch(seed), "numbers": numpy.array([1.0, 2.0, 0.5, 1.5])}

    def loss(output: Tensor, given: Any) -> Any:
        return weighted(output, given, given["numbers"].tolist())

    return run(start(parallelize, loss=loss, example=make(0)), (make(step) for step in range(3)))


class Graph:
    """An object with tensors in it."""

    def __init__(self, nodes: Tensor) -> None:
        self.nodes = nodes


@program({"dp": "whose tensors are not seen", "pp": "whose tensors are not seen"}, whole=True)
def an_object_with_tensors(parallelize: Parallelize) -> Result:
    """Nobody knows which of it are rows."""

    def make(seed: int) -> dict[str, Any]:
        return {**batch(seed), "graph": Graph(torch.ones(4))}

    return run(start(parallelize, example=make(0)), (make(step) for step in range(3)))


def classes(seed: int, mark: Any = lambda each: each) -> dict[str, Any]:
    """Twelve rows and weights of twelve classes."""
    return {**batch(seed, 12), "weight": mark(torch.linspace(0.5, 2, 12, dtype=torch.float64))}


def by_class(output: Tensor, given: Mapping[str, Any]) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), given["labels"].flatten(), weight=given["weight"])


@program(whole=True)
def weights_of_as_many_classes_as_rows(parallelize: Parallelize) -> Result:
    """Half of them could not weigh all classes: that is tried, and they stay whole."""
    return run(start(parallelize, loss=by_class, example=classes(0)), (classes(step) for step in range(3)))


@program(whole=True)
def weights_of_classes_that_are_marked(parallelize: Parallelize) -> Result:
    """`sw.whole` says so."""
    engine = start(parallelize, loss=by_class, example=classes(0, sw.whole))
    return run(engine, (classes(step, sw.whole) for step in range(3)))


class Prototypes(Net):
    """Scores hang on a table that comes with the batch."""

    def forward(self, x: Tensor, table: Tensor) -> Tensor:  # type: ignore[override]
        scores = super().forward(x)
        return scores + table.square().sum(0)[: scores.shape[-1]]


def with_table(seed: int, mark: Any = lambda each: each) -> dict[str, Any]:
    table = torch.linspace(0, 1, 48, dtype=torch.float64).view(4, 12)
    return {**batch(seed), "table": mark(table)}


@program({"dp": "sw.whole", "pp": "sw.whole"}, whole=True)
def a_table_as_long_as_the_batch(parallelize: Parallelize) -> Result:
    """Half of the table computes something else without an error, and numbers tell."""
    engine = start(parallelize, Prototypes().double(), example=with_table(0))
    return run(engine, (with_table(step) for step in range(3)))


@program(whole=True)
def a_table_that_is_marked(parallelize: Parallelize) -> Result:
    """`sw.whole(table)`."""
    engine = start(parallelize, Prototypes().double(), example=with_table(0, sw.whole))
    return run(engine, (with_table(step, sw.whole) for step in range(3)))


@program(whole=True)
def a_table_as_long_as_a_later_batch(parallelize: Parallelize) -> Result:
    """It was seen not to be rows in the example, of another size."""
    model = Prototypes().double()
    example = {**batch(0, 8), "table": with_table(0)["table"]}
    return run(start(parallelize, model, example=example), (with_table(step) for step in range(3)))


@program(whole=True)
def a_table_before_all_else(parallelize: Parallelize) -> Result:
    """The first tensor of the batch has no rows."""

    def make(seed: int) -> dict[str, Any]:
        return {"table": torch.linspace(0, 1, 36, dtype=torch.float64).view(3, 12), **batch(seed)}

    return run(start(parallelize, Prototypes().double(), example=make(0)), (make(step) for step in range(3)))
