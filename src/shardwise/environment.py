"""The environment variables, and the machine that we run on. No other file reads the environment, so that everything a
run depends on is in one place."""

import os
import platform
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

# The width for a pipe or a file, which have none: that of our own source lines.
WIDTH_WITHOUT_TERMINAL = 120
#: If set to 1, 8-bit products are emulated on devices without them.
EMULATE_FP8 = "SHARDWISE_EMULATE_FP8"
# The device (seat) of each rank, for processes that a command has started.
_SEATS = "SHARDWISE_SEATS"
#: The folder for copies of runs, instead of `/dev/shm`. Its files must be in memory.
COPIES_ROOT = "SHARDWISE_COPIES"
# The name of this attempt that ranks have agreed on.
_AGREED = "SHARDWISE_AGREED_ATTEMPT"
# The id of a process that was forked from the standby server: it does not request another.
_STANDBY = "SHARDWISE_STANDBY"
# The number of threads of a process, which torch reads when it is loaded.
_THREADS = "OMP_NUM_THREADS"
#: The name that a launcher's script gives to the attempt that it starts.
ATTEMPT = "SHARDWISE_ATTEMPT"


#: The variables in which launchers describe the other processes.
_OF_RANKS = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS")


@contextmanager
def without_ranks() -> Iterator[None]:
    """Remove the variables about other processes within this context."""
    said = {key: os.environ.pop(key) for key in _OF_RANKS if key in os.environ}
    try:
        yield
    finally:
        os.environ.update(said)


def wants_colour(stream: TextIO) -> bool:
    """Whether to colour what goes to `stream`.

    `NO_COLOR` (no-color.org) wins over `FORCE_COLOR` (force-color.org); both count when set and not empty.
    """
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR", "") not in ("", "0"):
        return True
    return os.environ.get("TERM") != "dumb" and stream.isatty()


def is_live(stream: TextIO) -> bool:
    """Return whether output on `stream` can be redrawn: it is a terminal, and not a dumb one."""
    return os.environ.get("TERM") != "dumb" and stream.isatty()


def width_of(stream: TextIO) -> int:
    """Columns to fill: `COLUMNS` if it is a positive number, else the terminal's, else `WIDTH_WITHOUT_TERMINAL`."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns) > 0:
        return int(columns)
    try:
        # A terminal that was never told its size says 0.
        return os.get_terminal_size(stream.fileno()).columns or WIDTH_WITHOUT_TERMINAL
    except (OSError, ValueError):  # No terminal; no file descriptor at all.
        return WIDTH_WITHOUT_TERMINAL


def all_variables() -> dict[str, str]:
    """Return the current environment, for a process that was not started with it."""
    return dict(os.environ)


def replace_all(variables: dict[str, str]) -> None:
    """Replace the whole environment."""
    os.environ.clear()
    os.environ.update(variables)


@contextmanager
def changed(variables: dict[str, str]) -> Iterator[None]:
    """Set these variables within this context, and restore them after it."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def threads_limited(num_threads: int) -> Iterator[None]:
    """Limit the threads of processes that start within this context, unless the user has set another number.

    `torch.set_num_threads` does not affect oneDNN's own threads (torch 2.13 on aarch64): their number is fixed when
    torch is loaded. Ranks with one for each core competed for cores (a pipeline of 2 on 2 cores was 15 % slower).
    """
    with changed({} if _THREADS in os.environ else {_THREADS: str(max(1, num_threads))}):
        yield


def num_threads(otherwise: int) -> int:
    """Return how many threads this process may compute with: what the user or `threads_limited` has set."""
    said = os.environ.get(_THREADS, "").partition(",")[0].strip()  # It may be a list, for loops within loops.
    return int(said) if said.isdecimal() and int(said) else max(1, otherwise)


def find_variable(name: str) -> str | None:
    """Return the value of a variable, for a sentence that shows it."""
    return os.environ.get(name)


def leave_faults_to_watch() -> None:
    """Keep torch from ending this process at an NCCL error, unless the user has set that. Call it before NCCL starts.

    By default torch's watchdog aborts the process as soon as another rank's connection breaks (exit status -6), before
    we can report which rank is gone and where all ranks stood. `ranks/faults.py` does that, and aborts communicators.
    """
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")


def wants_shared_gpus() -> bool:
    """Return whether ranks of `torchrun` may share GPUs: `SHARDWISE_SHARE_GPUS=1`."""
    return os.environ.get("SHARDWISE_SHARE_GPUS", "") not in ("", "0")


def wants_emulated_fp8() -> bool:
    """Return whether to emulate 8-bit products on devices without them: `SHARDWISE_EMULATE_FP8=1`."""
    return os.environ.get(EMULATE_FP8, "") not in ("", "0")


def ask_for_shared_gpus() -> None:
    """Let ranks of `torchrun` share GPUs from now on."""
    os.environ["SHARDWISE_SHARE_GPUS"] = "1"


def keep_streams_apart() -> None:
    """Keep streams of a GPU from blocking each other, unless the user has set that. Call it before CUDA starts.

    A receive over NCCL is a kernel that runs until the other rank has sent. These must not wait for it:

    - Other streams in its hardware queue. By default there are 8 queues for all streams, and two streams in one queue
      wait for each other's events: a pipeline deadlocked, with a send queued behind the wait for its own result.
    - Kernels at their first use. By default each is loaded then, which waits for all running work: two pipelines with
      experts, whose shapes change, deadlocked (both seen on an H200, torch 2.11).
    """
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")


def share_gpu(rank: int, *, is_one_network: bool) -> None:
    """Let this rank communicate over NCCL with other ranks on the same GPU. Call it before NCCL starts.

    NCCL refuses two ranks on one device of a machine. If each rank claims to be a machine of its own, NCCL uses
    sockets, which is slow but correct: loopback if all ranks can reach each other so, else those that NCCL chooses.
    """
    os.environ.update(NCCL_HOSTID=f"host{rank}", NCCL_IB_DISABLE="1", NCCL_SHM_DISABLE="1", NCCL_P2P_DISABLE="1")
    if is_one_network:
        os.environ["NCCL_SOCKET_IFNAME"] = "lo"


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def place_under_torchrun() -> tuple[int, int] | None:
    """Return this process's local rank and the local world size if `torchrun` has started it, else None."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    return int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])


def rank_under_torchrun() -> int:
    """Return this process's rank in the plan. `torchrun` numbers devices, and seats map them to ranks."""
    return rank_on(int(os.environ["RANK"]))


@contextmanager
def seated(devices: Sequence[int] | None) -> Iterator[None]:
    """Use these devices for processes that start or join within this context: `devices[rank]` of all devices."""
    with changed({} if devices is None else {_SEATS: ",".join(map(str, devices))}):
        yield


def device_of(rank: int) -> int:
    """Return the number of a rank's device; in plain order it is the rank."""
    seats = os.environ.get(_SEATS)
    return int(seats.split(",")[rank]) if seats else rank


def rank_on(device: int) -> int:
    """Return the rank of a device."""
    seats = os.environ.get(_SEATS)
    return seats.split(",").index(str(device)) if seats else device


def find_master() -> tuple[str, int] | None:
    """Return the address of `torchrun`'s store for all processes, or None if it has not started this one."""
    if not {"TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        return None
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


def find_world_size() -> int | None:
    """Return the world size under `torchrun`, or None if it has not started this process."""
    return int(os.environ["WORLD_SIZE"]) if "TORCHELASTIC_RUN_ID" in os.environ else None


def node_name() -> str:
    """Return the name that Slurm or another launcher has for this machine, or else its own host name."""
    return os.environ.get("SLURMD_NODENAME") or os.environ.get("NODE_NAME") or platform.node()


def find_attempt() -> str | None:
    """Return the job and attempt of this process if `shardwise launch` has started it, else None."""
    return os.environ.get(ATTEMPT)


def come_from_standby() -> None:
    """Mark this process as forked from the standby server. Its own child processes are not."""
    os.environ[_STANDBY] = str(os.getpid())


def is_from_standby() -> bool:
    return os.environ.get(_STANDBY) == str(os.getpid())


def memory_root() -> Path:
    """Return a folder whose files are in this machine's memory."""
    return Path(os.environ.get(COPIES_ROOT) or "/dev/shm")


def name_attempt(word: str) -> None:
    """Set the name of this attempt that all ranks have agreed on."""
    os.environ[_AGREED] = word


def attempt_name() -> str:
    """Return the name of this attempt among the ranks of `torchrun`: the agreed one, or else the number of restarts,
    empty for none."""
    return os.environ.get(_AGREED) or (str(num_restarts()) if num_restarts() else "")


def num_restarts() -> int:
    """Return how often `torchrun` has restarted this process."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def processor_name() -> str:
    """Return the CPU's model name, or its architecture on Arm, where it has none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def versions_of(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of Python and of those packages that are installed."""
    from importlib.metadata import PackageNotFoundError, version  # Slow to load, and wanted at the end of a run.

    found = {"python": platform.python_version()}
    for package in packages:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found
