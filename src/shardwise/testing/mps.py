"""Ranks that share a GPU, at once and not in turns: NVIDIA's Multi-Process Service, started here and ended here.

Without it the GPU goes from process to process by the clock, and a collective of 8 ranks waits for 8 turns. Commands do
without it: the service deals queues of the GPU out of one pool, 4 processes of 32 queues ended with "out of memory"
(H200), and with fewer a pipeline may stand still. `tests/gpu/mps_trial.py` is to show how many do.
"""

import contextlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from shardwise import environment

_CONTROL = "nvidia-cuda-mps-control"
_SECONDS = 10.0


@contextlib.contextmanager
def shared_at_once(connections: int | None = None) -> Iterator[bool]:
    """Within it, ranks that are started share GPUs at once, if the service can be started: that is what it gives.

    `connections` are the queues of each; if not given, there is no service.
    """
    control = shutil.which(_CONTROL)
    if connections is None or control is None or environment.find_variable("CUDA_MPS_PIPE_DIRECTORY") is not None:
        yield False
        return
    with tempfile.TemporaryDirectory(prefix="shardwise-mps-") as folder:
        variables = {
            "CUDA_MPS_PIPE_DIRECTORY": str(Path(folder) / "pipe"),
            "CUDA_MPS_LOG_DIRECTORY": str(Path(folder) / "log"),
            "CUDA_DEVICE_MAX_CONNECTIONS": str(connections),
        }
        for name in ("pipe", "log"):
            (Path(folder) / name).mkdir()
        with environment.changed(variables):
            is_up = _tell(control, "-d")
            if is_up:
                try:
                    yield True
                finally:
                    _tell(control, words="quit\n")
        if not is_up:
            yield False


def _tell(control: str, *options: str, words: str = "") -> bool:
    """Whether the service's control program took what it was told."""
    try:
        done = subprocess.run(
            [control, *options], input=words, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
