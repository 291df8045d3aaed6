"""Questions that somebody might ask: a model of the catalogue on some cluster, drawn from a number."""

from collections.abc import Iterator
from random import Random

from shardwise.errors import ShardwiseError
from shardwise.model.catalogue import CATALOGUE
from shardwise.planner.account import Account, account
from shardwise.planner.composition import composes
from shardwise.planner.plan import Plan
from shardwise.planner.question import Question, make_question

_DEVICES = ("h100", "a100-80g", "a100-40g", "h200", "b200", "gb200", "mi300x", "l40s", "rtx4090", "v100-32g", "cpu")
_SMALL = ("", "2x", "4x", "8x", "2x4x", "2x8x", "4x8x")
_LARGE = (*_SMALL, "3x8x", "8x8x", "16x8x", "32x8x")
_BATCHES = (1, 3, 8, 16, 64, 96, 256, 1024)
_SEQUENCES = (128, 512, 2048, 4096, 8192, 32768)


def draw(seed: int, *, large: bool) -> tuple[str, str, int, int, int | None]:
    """A model, a cluster, a batch, a sequence, and the rank of adapters, if there are any."""
    chance = Random(seed)
    model = chance.choice(sorted(CATALOGUE))
    size = chance.choice(_LARGE if large else _SMALL)
    cluster = f"{size or '1x'}{chance.choice(_DEVICES)}"
    lora = chance.choice((None, None, None, 16))
    return model, cluster, chance.choice(_BATCHES), chance.choice(_SEQUENCES), lora


def ask(seed: int, *, large: bool) -> Question:
    """The question; an error that says what is wrong with it, if something is."""
    model, cluster, batch, sequence, lora = draw(seed, large=large)
    return make_question(model, cluster=cluster, batch=batch, sequence=sequence, lora=lora)


def simple_plans(question: Question) -> Iterator[Account]:
    """Plans that anybody would try first, as far as they are for this question: all that run and fit, priced."""
    devices = question.cluster.num_devices
    precision = question.precisions[0]
    for axes in ({"dp": devices}, {"tp": devices}, {"pp": devices}, {"dp": devices // 8, "tp": 8}):
        if any(size < 1 for size in axes.values()) or (axes.get("tp", 1) > 1 and question.heads % axes["tp"]):
            continue
        replicas = axes.get("dp", 1)
        if question.batch % replicas or axes.get("pp", 1) > question.model.num_layers:
            continue
        for zero in (0, 1, 3) if replicas > 1 else (0,):
            for recompute in ("none", "full"):
                for microbatches in {1, question.batch // replicas}:
                    keys = {"zero": zero, "recompute": recompute, "microbatches": microbatches, "precision": precision}
                    try:
                        found = account(question, Plan(**axes, **keys))  # type: ignore[arg-type]
                    except ShardwiseError:
                        continue
                    if found.fits and composes(found.plan):
                        yield found
