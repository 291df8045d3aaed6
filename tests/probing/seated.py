"""Training over shaped links, in plain order and where ranks sit best: python -m tests.probing.seated FOLDER

Four namespaces; the fast links join 0 with 2 and 1 with 3, and the plan's tensor groups are 0 1 and 2 3.
"""

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.cli import main
from shardwise.cluster.file import to_toml
from shardwise.cluster.probed import cluster_of
from tests.probing.namespaces import MEGABIT, Fabric
from tests.probing.shaped import measured

COUNT = 4
WORDS = ("train", "tiny", "--plan", "tp=2,dp=2", "--set", "steps=8", "--set", "batch=32", "--json")


def trained(_: int, words: tuple[str, ...]) -> dict[str, Any] | None:
    """What the first rank says of the run; the others say nothing."""
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        assert main(list(words)) == 0
    found: dict[str, Any] = json.loads(told.getvalue())
    return found or None


def run(folder: Path) -> dict[str, Any]:
    label = np.arange(COUNT) % 2
    rates = np.where(label[:, None] == label[None, :], 100 * MEGABIT, 5 * MEGABIT)
    with Fabric(rates.tolist()) as fabric:
        probe = fabric.run(measured, COUNT, fabric.address(0), ("devices", "links"))[0]
        (folder / "cluster.toml").write_text(to_toml(cluster_of(probe)))
        found = {}
        for name, more in (("plain", ()), ("seated", ("--cluster", str(folder / "cluster.toml")))):

            def launched(rank: int, name: str = name) -> dict[str, str]:
                return {
                    "TORCHELASTIC_RUN_ID": name, "RANK": str(rank), "WORLD_SIZE": str(COUNT), "LOCAL_RANK": "0",
                    "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": fabric.address(0), "MASTER_PORT": "29600",
                }  # fmt: skip

            words = (*WORDS, "--folder", str(folder / name), *more)
            told = fabric.run(trained, words, variables=launched)
            found[name] = next(each for each in told if each is not None)
    return {
        name: {"tokens_per_second": each["tokens_per_second"], "loss": each["loss"]} for name, each in found.items()
    }


if __name__ == "__main__":
    print(json.dumps(run(Path(sys.argv[1]))))
