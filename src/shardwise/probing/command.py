"""`shardwise probe`: measure this machine, or all machines of a launcher, into a cluster.toml."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.answer import Answer, Canvas, table
from shardwise.errors import ShardwiseError, unknown
from shardwise.output import check_output, save_outputs
from shardwise.units import format_bytes, format_flops, format_percent, format_seconds
from shardwise.working import step_aside

if TYPE_CHECKING:
    from shardwise.cluster.probe import Probe
    from shardwise.ranks.gpus import Gpus

DESCRIPTION = """
Measure devices (matmuls by type, memory, host link, disk), every pair of
devices, and every collective by size, over the groups that plans use. Find
neighbours, and name slow links and devices. Measurements stop early once they
are stable.

Run it under torchrun to measure several machines. --save writes a cluster.toml
for the --cluster option of other commands, and a page with heat maps.
"""

EXAMPLE = """
shardwise probe devices --devices 1
"""

_SUBJECTS = ("devices", "links", "collectives")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("subjects", nargs="*", metavar="WHAT", help=f"{', '.join(_SUBJECTS)} (default: all)")
    parser.add_argument(
        "--devices", type=int, metavar="N", help="number of ranks (default: all GPUs, or up to 4 processes)"
    )
    parser.add_argument("--share-gpus", action="store_true", help="allow more ranks than GPUs; slow, for trying it out")
    parser.add_argument("--save", metavar="FILE", help="write a cluster.toml, and an HTML page next to it")


def run(arguments: argparse.Namespace) -> Answer:
    subjects = [each for each in _SUBJECTS if each in (arguments.subjects or _SUBJECTS)]
    for word in arguments.subjects:
        if word not in _SUBJECTS:
            raise unknown("thing to measure", word, _SUBJECTS)
    if arguments.devices is not None and arguments.devices < 1:
        raise ShardwiseError(f"--devices {arguments.devices}: it must be at least 1", remedy="--devices 2")
    save = _save_path(arguments.save, subjects)
    from shardwise.probing.measure import probe  # Loads torch.
    from shardwise.training.run import count_devices

    num_devices = _count(arguments.devices, count_devices(), subjects)
    gpus: Gpus = "shared" if arguments.share_gpus else "own"
    step_aside()  # The first rank prints how long it takes.
    found = probe(subjects, num_devices, gpus)
    if found is None:  # Under torchrun, only the first rank prints.
        return Answer(data={}, render=lambda _: None)
    written = [] if save is None else _write(found, save)
    return Answer(data={**_data(found), "written": written}, render=lambda canvas: _draw(canvas, found, written))


def _count(asked: int | None, here: int, subjects: list[str]) -> int:
    from shardwise import environment

    launched = environment.find_world_size()
    if launched is not None and asked not in (None, launched):
        raise ShardwiseError(
            f"--devices {asked}, and torchrun has started {launched} processes: each is one device",
            remedy="no --devices under torchrun",
        )
    count = launched or asked or here
    if count == 1 and "devices" not in subjects:
        raise ShardwiseError(
            f"{' and '.join(subjects)} are between devices, and there is 1",
            remedy="--devices 2, or torchrun --nnodes 2 ... -m shardwise probe",
        )
    return count


def _save_path(word: str | None, subjects: list[str]) -> Path | None:
    if word is None:
        return None
    path = Path(word)
    if path.suffix != ".toml":
        raise ShardwiseError(f"--save {word}: a cluster's file ends in .toml", remedy=f"--save {path.stem}.toml")
    if "devices" not in subjects:
        raise ShardwiseError(
            f"--save {word} of {' and '.join(subjects)} alone: a cluster has devices too",
            remedy=f"shardwise probe --save {word}",
        )
    for each in (path, path.with_suffix(".html")):
        check_output(each, remedy="--save cluster.toml")
    return path


def _write(found: "Probe", path: Path) -> list[str]:
    from shardwise.cluster.file import to_toml
    from shardwise.cluster.probed import cluster_of
    from shardwise.probing.page import make_probe_page

    page = path.with_suffix(".html")
    save_outputs({path: to_toml(cluster_of(found)), page: make_probe_page(found)})
    return [str(path), str(page)]


def _data(found: "Probe") -> dict[str, object]:
    from dataclasses import asdict

    from shardwise.cluster.pairs import neighbours

    pairs = found.pairs
    return {
        "backend": found.backend,
        "seconds": found.seconds,
        "versions": dict(found.versions),
        "devices": [asdict(each) for each in found.devices],
        "links": None if pairs is None else asdict(pairs),
        "neighbours": [] if pairs is None else neighbours(pairs),
        "collectives": [
            {
                **asdict(curve),
                "algorithm_bytes_per_second": curve.algorithm_rates(),
                "bus_bytes_per_second": curve.bus_rates(),
                "fit": asdict(curve.fit()),
            }
            for curve in found.curves
        ],
        "slow_links": [asdict(each) for each in found.slow_links()],
        "slow_devices": [asdict(each) for each in found.slow_devices()],
    }


def _draw(canvas: Canvas, found: "Probe", written: list[str]) -> None:
    from shardwise.probing.words import findings, title

    canvas.print(canvas.paint(title(found), "bold"))
    for sentence in findings(found):
        canvas.print(f"  {sentence}")
    if found.devices[0].flops_per_second:
        canvas.print()
        _draw_devices(canvas, found)
    if found.pairs is not None:
        canvas.print()
        _draw_pairs(canvas, found)
    if found.curves:
        canvas.print()
        _draw_curves(canvas, found)
    if written:
        canvas.print(f"\nwritten: {', '.join(written)}")


def _rate(rate: float) -> str:
    return f"{format_bytes(rate, decimal=True)}/s" if rate else "-"


def _draw_devices(canvas: Canvas, found: "Probe") -> None:
    kinds = list(found.devices[0].flops_per_second)
    names = ["device", *kinds, "copy", "to device", "to host", "both, each", "disk write", "read", "spread"]
    rows = [
        [
            each.name,
            *(f"{format_flops(each.flops_per_second[kind])}/s" for kind in kinds),
            *map(_rate, (each.copied, each.to_device, each.to_host, each.both_ways, each.disk_write, each.disk_read)),
            format_percent(each.spread),
        ]
        for each in found.devices
    ]
    table(names, rows, canvas)


def _draw_pairs(canvas: Canvas, found: "Probe") -> None:
    """Draw the matrix if it is narrow enough to read; otherwise its kinds of links."""
    from shardwise.cluster.pairs import kinds_of_links

    assert found.pairs is not None, "no pairs to draw"
    rates, kinds = found.pairs.rates(), kinds_of_links(found.pairs)
    if len(rates) <= 8:
        rows = [[i, *(_rate(float(rate)) for rate in row)] for i, row in enumerate(rates)]
        table(["from, to", *map(str, range(len(rates)))], rows, canvas)
        return
    import numpy as np

    rows = []
    for kind in range(int(kinds.max()) + 1):
        mine = np.sort(rates[kinds == kind])
        rows.append([kind, len(mine), *(_rate(float(value)) for value in (mine[0], np.median(mine), mine[-1]))])
    table(["kind of link", "links", "slowest", "median", "fastest"], rows, canvas)


def _draw_curves(canvas: Canvas, found: "Probe") -> None:
    rows = []
    for curve in found.curves:
        fit = curve.fit()
        rows.append([
            curve.collective, f"{curve.scope} {curve.num_devices}", format_bytes(curve.sizes[-1]),
            _rate(curve.algorithm_rates()[-1]), _rate(curve.bus_rates()[-1]), _rate(fit.bytes_per_second),
            format_percent(fit.rate_spread), format_seconds(fit.latency_seconds),
        ])  # fmt: skip
    names = ["collective", "over", "largest", "algorithm", "bus", "fitted bus", "spread", "latency"]
    table(names, rows, canvas)
