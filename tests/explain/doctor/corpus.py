"""Faults, each with the word that the doctor must have for it; and runs that nothing is wrong with."""

from shardwise.trace.events import Lane, Traffic
from tests.explain.doctor.patients import (
    GIB,
    Make,
    a_run,
    as_measured,
    played,
    replicated,
    stretched,
    with_bytes,
    with_data_wait,
    with_end,
    with_recomputation,
    with_traffic,
    with_waits_inside,
)

_EVEN = {"parameters": 2 * GIB, "gradients": 2 * GIB, "optimizer": 4 * GIB, "activations": 2 * GIB}


def _sums(count: int, num_bytes: float) -> tuple[Traffic, ...]:
    return tuple(Traffic(rank, None, "all_reduce", count, num_bytes) for rank in range(2))


FAULTS: dict[str, tuple[str, Make]] = {
    # A stage with three more layers than the others' six; a head as dear as two layers; all in different places.
    "three more layers in the middle": (
        "slow stage",
        lambda: a_run(played("1f1b", 4, 16, slower={1: 1.5}), "pp=4,layers=6+9+6+6"),
    ),
    "three more layers at the end": ("slow stage", lambda: a_run(played("1f1b", 4, 16, slower={3: 1.5}))),
    "a heavy first stage": ("slow stage", lambda: a_run(played("zb-h1", 4, 16, slower={0: 1.4}))),
    "a heavy head": ("slow stage", lambda: a_run(played("gpipe", 4, 16, slower={3: 1.33}))),
    "a heavy chunk": ("slow stage", lambda: a_run(played("interleaved", 4, 16, slower={2: 1.4, 6: 1.4}))),
    "a heavy turn of the vee": ("slow stage", lambda: a_run(played("zb-v", 4, 16, slower={3: 1.5, 4: 1.5}))),
    "a heavy stage, measured": ("slow stage", lambda: a_run(as_measured(played("1f1b", 4, 16, slower={2: 1.5})))),
    # Devices.
    "a slow replica": (
        "straggler",
        lambda: a_run(
            replicated(
                [
                    as_measured(played("1f1b", 2, 16)),
                    as_measured(played("1f1b", 2, 16, slower={0: 1.4})),
                ]
            ),
            "dp=2,pp=2",
        ),
    ),
    "a slow rank of data parallelism": (
        "straggler",
        lambda: a_run(
            replicated([as_measured(played("1f1b", 1, 8)), as_measured(played("1f1b", 1, 8, slower={0: 1.3}))]), "dp=2"
        ),
    ),
    "a device slower than predicted": (
        "straggler",
        lambda: a_run(
            as_measured(played("1f1b", 4, 16, slower={2: 1.5})), predicted=as_measured(played("1f1b", 4, 16))
        ),
    ),
    "a device slower than predicted, zb-v": (
        "straggler",
        lambda: a_run(
            as_measured(played("zb-v", 4, 16, slower={1: 1.6, 6: 1.6})), predicted=as_measured(played("zb-v", 4, 16))
        ),
    ),
    # Ranks that sleep.
    "one sleep in a forward": ("stalls", lambda: a_run(as_measured(played("1f1b", 4, 8, late={"1F3": 9.0})))),
    "one sleep in a backward": ("stalls", lambda: a_run(as_measured(played("zb-h1", 4, 8, late={"2I5": 7.0})))),
    "three sleeps": (
        "stalls",
        lambda: a_run(played("1f1b", 2, 16, late={"0F3": 5.0, "0F9": 5.0, "0B12": 9.0})),
    ),
    # Bubbles.
    "gpipe with few microbatches": ("bubble", lambda: a_run(played("gpipe", 4, 4))),
    "1f1b over many ranks": ("bubble", lambda: a_run(played("1f1b", 8, 16))),
    "1f1b, measured": ("bubble", lambda: a_run(as_measured(played("1f1b", 4, 8)))),
    # Transfers.
    "chunks over a slow link": ("many transfers", lambda: a_run(played("interleaved", 4, 8, hop=1.5))),
    "messages of a few kilobytes": (
        "small messages",
        lambda: a_run(
            with_traffic(as_measured(played("1f1b", 4, 16, hop=0.8)), Traffic(0, 1, "values", 64, 64 * 4096.0))
        ),
    ),
    "a slow link": ("slow link", lambda: a_run(played("1f1b", 4, 16, hop=0.8))),
    # Replicas.
    "an exposed sum": (
        "exposed sum",
        lambda: a_run(
            with_traffic(
                with_end(as_measured(played("1f1b", 2, 32)), ("a sum of gradients", Lane.WAIT, 9.0)),
                *_sums(2, 2 * 64 * 2**20),
            ),
            "dp=2,pp=2",
        ),
    ),
    "buckets of 4 kilobytes": (
        "small buckets",
        lambda: a_run(
            with_traffic(
                with_end(as_measured(played("1f1b", 2, 32)), ("a sum of gradients", Lane.WAIT, 9.0)),
                *_sums(2000, 2000 * 4096.0),
            ),
            "dp=2,pp=2",
        ),
    ),
    "gathers that are waited for": (
        "exposed gather",
        lambda: a_run(
            with_waits_inside(as_measured(played("1f1b", 2, 32)), "a gather of parameters", 0.2), "dp=2,pp=2,zero=3"
        ),
    ),
    "tensor parallelism over a slow link": (
        "exposed layers",
        lambda: a_run(with_waits_inside(as_measured(played("1f1b", 1, 8)), "all_reduce of ranks 0 1", 0.3), "tp=4"),
    ),
    "experts over a slow link": (
        "exposed layers",
        lambda: a_run(
            with_waits_inside(as_measured(played("1f1b", 1, 8)), "all_to_all of ranks 0 1", 0.3), "ep=4,dp=4"
        ),
    ),
    "a norm that all wait for": (
        "synchronisation",
        lambda: a_run(
            with_end(as_measured(played("1f1b", 2, 32)), ("the norm of the gradients", Lane.WAIT, 8.0)), "pp=2"
        ),
    ),
    # Batch, host, optimizer.
    "a slow loader": ("data wait", lambda: a_run(with_data_wait(as_measured(played("1f1b", 2, 32)), 6.0))),
    "a very slow loader": ("data wait", lambda: a_run(with_data_wait(as_measured(played("zb-v", 2, 16)), 50.0))),
    "short instructions": ("host overhead", lambda: a_run(stretched(played("1f1b", 1, 32), 0.6))),
    "every replica steps with all weights": (
        "long optimizer",
        lambda: a_run(with_end(as_measured(played("1f1b", 2, 32)), ("", Lane.STEP, 20.0)), "dp=4,pp=2"),
    ),
    "the optimizer on the host": (
        "optimizer state offloaded",
        lambda: a_run(
            with_bytes(with_end(as_measured(played("1f1b", 2, 32)), ("", Lane.STEP, 30.0)), _EVEN),
            "pp=2,offload.optimizer=1",
            memory_bytes=80 * GIB,
        ),
    ),
    # Predictions.
    "predicted too quick": (
        "wrong prediction",
        lambda: a_run(
            as_measured(played("1f1b", 2, 32, slower={0: 2, 1: 2})), predicted=as_measured(played("1f1b", 2, 32))
        ),
    ),
    "predicted too slow": (
        "wrong prediction",
        lambda: a_run(
            as_measured(played("1f1b", 2, 32)), predicted=as_measured(played("1f1b", 2, 32, slower={0: 2, 1: 2}))
        ),
    ),
    # Memory.
    "an embedding on the first rank": (
        "memory imbalance",
        lambda: a_run(
            with_bytes(as_measured(played("1f1b", 4, 64)), {**_EVEN, "parameters": 9 * GIB}, _EVEN),
            "pp=4,layers=4+4+4+4",
            memory_bytes=18 * GIB,
        ),
    ),
    "a head's optimizer on the last rank": (
        "memory imbalance",
        lambda: a_run(
            with_bytes(as_measured(played("1f1b", 3, 64)), _EVEN, _EVEN, {**_EVEN, "optimizer": 12 * GIB}),
            "pp=3",
            memory_bytes=19 * GIB,
        ),
    ),
    "full of activations": (
        "nearly full",
        lambda: a_run(
            with_bytes(as_measured(played("1f1b", 2, 64)), {**_EVEN, "activations": 68 * GIB}), memory_bytes=80 * GIB
        ),
    ),
    "full of optimizer": (
        "nearly full",
        lambda: a_run(
            with_bytes(as_measured(played("1f1b", 1, 8)), {**_EVEN, "optimizer": 70 * GIB}),
            "dp=4",
            memory_bytes=80 * GIB,
        ),
    ),
    "recomputation with room to spare": (
        "needless recomputation",
        lambda: a_run(
            with_bytes(with_recomputation(as_measured(played("1f1b", 2, 64)), 0.33), _EVEN), memory_bytes=80 * GIB
        ),
    ),
}

HEALTHY: dict[str, Make] = {
    "zero bubble": lambda: a_run(played("zb-v", 4, 32)),
    "zero bubble, measured": lambda: a_run(as_measured(played("zb-v", 4, 32, jitter=0.03))),
    "many microbatches": lambda: a_run(as_measured(played("1f1b", 2, 64, jitter=0.04, hop=0.02)), "pp=2"),
    "many microbatches over four ranks": lambda: a_run(as_measured(played("1f1b", 4, 64)), "pp=4"),
    "chunks": lambda: a_run(played("interleaved", 4, 64, hop=0.01)),
    "two pipes overlapped": lambda: a_run(played("dualpipe-v", 4, 64)),
    "one device": lambda: a_run(as_measured(played("1f1b", 1, 8, jitter=0.05))),
    "replicas": lambda: a_run(
        replicated([as_measured(played("1f1b", 1, 16, jitter=0.02)), as_measured(played("1f1b", 1, 16, jitter=0.04))]),
        "dp=2,zero=1",
    ),
    "as predicted": lambda: a_run(
        with_end(as_measured(played("zb-h1", 2, 32, jitter=0.02)), ("", Lane.STEP, 1.5)),
        predicted=as_measured(played("zb-h1", 2, 32)),
    ),
    "recomputation for want of room": lambda: a_run(
        with_bytes(with_recomputation(as_measured(played("1f1b", 2, 64)), 0.33), {**_EVEN, "activations": 50 * GIB}),
        memory_bytes=80 * GIB,
    ),
    "hidden sums and a quick loader": lambda: a_run(
        with_data_wait(
            with_end(
                as_measured(played("1f1b", 2, 64, jitter=0.02)),
                ("a sum of gradients", Lane.WAIT, 2.0),
                ("", Lane.STEP, 2.0),
            ),
            1.0,
        ),
        "dp=2,pp=2,zero=1",
    ),
    "tensor parallelism beside each other": lambda: a_run(
        with_waits_inside(as_measured(played("1f1b", 1, 8)), "all_reduce of ranks 0 1", 0.05), "tp=2"
    ),
}
