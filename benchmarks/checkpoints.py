"""What a save costs the steps around it, what a rank reads to go on under another plan, and how fast files are.

The first: the recipe `bytes` on two processes, with a checkpoint every 10 steps and with none, turn about; the time of
a step is the median over the run, the cost is the time that a step's loop takes beside it. The second: bytes asked of
the files by each rank, over the bytes that it keeps. The third: 256 MiB in memory, written and read by one thread,
whole and in parts, all of it with checksums; the time is the processor's, so that neither a disk nor others count.
`python checkpoints.py files` measures this one alone.
"""

import sys
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter, process_time

import torch
from record import kept, record

from shardwise.planner.plan import Plan
from shardwise.ranks.spawn import Ranks
from shardwise.training.checkpoint.boxes import Box
from shardwise.training.checkpoint.index import find_last, folder_of
from shardwise.training.checkpoint.parts import Part, random_parts
from shardwise.training.checkpoint.read import Reader, load
from shardwise.training.checkpoint.write import Writer
from shardwise.training.folder import CHECKPOINTS
from shardwise.training.job import Job
from shardwise.training.recipe import Recipe, get_recipe
from shardwise.training.run import train_rank
from shardwise.training.setup import make_ready, on_device
from shardwise.training.world import World

EVERY, NUM_STEPS = 10, 60
MOST_SAVING, MOST_READ = 0.02, 1.05
PLANS = ("dp=4,zero=3", "tp=2,dp=2,zero=1", "pp=2,tp=2,microbatches=2", "pp=4,microbatches=4")


def recipe() -> Recipe:
    return get_recipe("bytes").changed(
        {"steps": 2, "checkpoint.every": 0, "evaluation.every": 0, "evaluation.sample": 0}, source="here"
    )


def timed(job: Job) -> tuple[list[float], list[float], list[float]]:
    """Seconds of steps without a writer at work, of steps beside one, and of what stops training at each save."""
    world = World()
    setup = make_ready(job, world)
    writer = Writer(job.folder / "timed", rank=world.rank, num_ranks=world.size, keep=2, gather=world.gather)
    alone, beside, stopped = [], [], []
    for step in range(NUM_STEPS):
        batch = on_device(setup.batches.at(step), world)
        start = perf_counter()
        setup.engine.train_step(batch)
        (beside if 0 < step % EVERY <= 3 and step > EVERY else alone).append(perf_counter() - start)
        if step % EVERY == 0 and step:
            world.wait()
            start = perf_counter()
            setup.held.settle()
            parts = [*setup.held.weights(), *setup.held.optimizer_states(), *random_parts(world)]
            writer.save(step, parts, {})
            stopped.append(perf_counter() - start)
    writer.finish()
    writer.close()
    setup.engine.close()
    world.close()
    return alone, beside, stopped


def reading(job: Job) -> tuple[int, int]:
    """Bytes asked for, and bytes kept, on this rank."""
    world = World()
    setup = make_ready(job, world)
    last = find_last(job.folder / CHECKPOINTS)
    assert last is not None, "a checkpoint was made"
    with Reader(last) as reader:
        load(reader, setup.held)
    setup.engine.close()
    world.close()
    return reader.bytes_read, reader.bytes_kept


#: Of the boxes for which files are timed, and how many there are.
SHAPE, COUNT = (2048, 4096), 8
#: What is read of each: where it begins, and its size.
READ = {
    "whole": ((0, 0), SHAPE),
    "half of the rows": ((1024, 0), (1024, 4096)),
    "half of the columns": ((0, 2048), (2048, 2048)),
    "an eighth of the columns": ((0, 512), (2048, 512)),
}


def seconds_of(root: Path) -> dict[str, float]:
    """Processor seconds to write boxes, and to read them or parts of them: the least of four times."""
    torch.set_num_threads(1)
    whole = Box((0, 0), SHAPE)
    parts = [Part(str(number), SHAPE, whole, torch.randn(SHAPE)) for number in range(COUNT)]
    writer, found = Writer(root, rank=0, num_ranks=1, keep=1, gather=lambda given: [given]), dict[str, float]()

    def note(name: str, start: float) -> None:
        found[name] = min(found.get(name, float("inf")), process_time() - start)

    for step in range(1, 5):
        start = process_time()
        writer.save(step, parts, {})
        assert writer.finish() is None, "there is room"
        note("save", start)
        for name, (begin, size) in READ.items():
            start = process_time()
            with Reader(folder_of(root, step)) as reader:
                for part in parts:
                    reader.fill(Part(part.entry, SHAPE, Box(begin, size), torch.empty(size)))
            note(f"read {name}", start)
    writer.close()
    return found


def measured_files() -> dict[str, float]:
    """The third."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        seconds = seconds_of(Path(name))
    for what, each in seconds.items():
        print(f"{what:30} {each:.3f} s")
    return seconds


def main() -> int:
    if sys.argv[1:] == ["files"]:
        record("checkpoints", {**kept("checkpoints"), "processor_seconds_of_256_mib": measured_files()})
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with Ranks(2) as ranks:
            told = ranks.run(timed, Job(recipe=recipe(), plan=Plan(dp=2), folder=folder / "timed", command=""))
        alone, beside, stopped = (max(median(each[place]) for each in told) for place in range(3))
        saving = stopped / (EVERY * alone)
        print(f"a step {alone:.4f} s, beside the writer {beside:.4f} s, stopped for a save {stopped:.4f} s")
        print(f"saving costs {saving:.2%} of the steps' time at one every {EVERY} (at most {MOST_SAVING:.0%})")
        worst = {}
        with Ranks(4) as ranks:
            for number, plan in enumerate(PLANS):
                job = Job(recipe=recipe(), plan=Plan.parse(plan), folder=folder / str(number), command="")
                ranks.run(train_rank, job)
                for other in PLANS:
                    there = Job(recipe=recipe(), plan=Plan.parse(other), folder=job.folder, command="")
                    shares = [read / kept for read, kept in ranks.run(reading, there)]
                    worst[f"{plan} -> {other}"] = max(shares)
    for pair, share in worst.items():
        print(f"{pair:60} reads {share:.4f} of what it keeps (at most {MOST_READ})")
    record(
        "checkpoints",
        {
            "step_seconds": alone,
            "step_seconds_beside_the_writer": beside,
            "stopped_seconds": stopped,
            "share_of_step_time": saving,
            "read_over_kept": worst,
            "processor_seconds_of_256_mib": measured_files(),
        },
    )
    return 0 if saving <= MOST_SAVING and max(worst.values()) <= MOST_READ else 1


if __name__ == "__main__":
    sys.exit(main())
