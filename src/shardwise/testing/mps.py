"""Let ranks share a GPU concurrently: start and stop NVIDIA's Multi-Process Service.

Without it the GPU switches between processes by time slices, and a collective of 8 ranks waits for 8 slices. Commands
do not use it: the service assigns hardware queues from one pool, 4 processes of 32 queues ended with "out of memory"
(H200), and with fewer a pipeline may stall. `tests/gpu/mps_trial.py` finds how many work.
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
    """Let ranks started within it share GPUs concurrently; yield whether the service could be started.

    `connections` is the number of queues of each; without it, there is no service.
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
