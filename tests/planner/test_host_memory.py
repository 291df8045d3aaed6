"""What a plan keeps on the host, against what there is."""

from pathlib import Path

import pytest

from shardwise.cluster.local import available_bytes
from shardwise.errors import ShardwiseError
from shardwise.planner.host_memory import check_host_memory
from shardwise.planner.plan import Plan

GIB = 2**30


def test_what_fits_is_not_spoken_of() -> None:
    check_host_memory(Plan.parse("offload.optimizer=1"), GIB, num_ranks=1, available=GIB)


@pytest.mark.parametrize(
    ("plan", "num_ranks", "problem", "remedy"),
    [
        (
            "dp=2,offload.optimizer=1", 2,
            "offload.optimizer=1 of 2 ranks of this machine needs 1.5 GiB of pinned memory on its host, which has"
            " 1.0 GiB available (512.0 MiB short)",
            "offload.optimizer=0.66, or zero=1",
        ),
        (
            "offload.optimizer=0.5,offload.activations=1", 1,
            "offload.optimizer=0.5 and offload.activations=1 of 1 rank of this machine needs 1.5 GiB of pinned memory"
            " on its host, which has 1.0 GiB available (512.0 MiB short)",
            "offload.optimizer=0.33,offload.activations=0.66",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_what_would(plan: str, num_ranks: int, problem: str, remedy: str) -> None:
    with pytest.raises(ShardwiseError) as caught:
        check_host_memory(Plan.parse(plan), 1.5 * GIB, num_ranks=num_ranks, available=GIB)
    assert (caught.value.problem, caught.value.remedy) == (problem, remedy)
    Plan.parse(f"{plan.split(',offload')[0]},{remedy.split(', or')[0]}" if "dp" in plan else remedy)


def written(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_the_memory_that_is_available_is_linux_and_the_containers(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) == 2**62
    root = written(tmp_path, proc__meminfo="MemTotal: 100 kB\nMemAvailable:   80 kB\n")
    assert available_bytes(root) == 80 * 1024
    group = {"sys__fs__cgroup__memory_dot_max": "max\n", "sys__fs__cgroup__memory_dot_current": "50000\n"}
    assert available_bytes(written(tmp_path, **group)) == 80 * 1024
    group["sys__fs__cgroup__memory_dot_max"] = "60000\n"
    assert available_bytes(written(tmp_path, **group)) == 10_000
    group["sys__fs__cgroup__memory_dot_stat"] = "anon 1\ninactive_file 3000\n"
    assert available_bytes(written(tmp_path, **group)) == 13_000
