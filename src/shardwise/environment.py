"""The environment variables, and the machine that we run on. No other file reads the environment, so that everything a
run depends on is in one place."""

import os
import platform
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

# A pipe or a file has no width of its own; this is that of our own source lines.
WIDTH_WITHOUT_TERMINAL = 120
#: Set to 1, 8-bit products are emulated where a device has none.
EMULATE_FP8 = "SHARDWISE_EMULATE_FP8"
# Which device each rank sits on, for processes that a command has started.
_SEATS = "SHARDWISE_SEATS"
#: Where copies of runs are kept, instead of in `/dev/shm`: a folder whose files lie in memory.
COPIES_ROOT = "SHARDWISE_COPIES"
# What ranks have agreed to call this attempt.
_AGREED = "SHARDWISE_AGREED_ATTEMPT"
# The process that was forked from one on standby: it does not ask for another.
_STANDBY = "SHARDWISE_STANDBY"
# Threads of a process, counted when torch is loaded.
_THREADS = "OMP_NUM_THREADS"
#: What a launcher's script calls the attempt that it starts.
ATTEMPT = "SHARDWISE_ATTEMPT"


#: What launchers tell a process of the others.
_OF_RANKS = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS")


@contextmanager
def without_ranks() -> Iterator[None]:
    """Within it the environment says nothing of other processes."""
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
    """Whether what was written to `stream` can be drawn over: a terminal that is not a dumb one."""
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
    """The environment as it is now, for a process that was not started with it."""
    return dict(os.environ)


def replace_all(variables: dict[str, str]) -> None:
    """Make the environment this one."""
    os.environ.clear()
    os.environ.update(variables)


@contextmanager
def changed(variables: dict[str, str]) -> Iterator[None]:
    """Within it, these variables are so; after it, as they were."""
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
    """Processes that begin meanwhile have so many threads each, unless the user has said another number.

    `torch.set_num_threads` does not reach oneDNN's own threads (torch 2.13 on aarch64): they are counted when torch is
    loaded, and ranks with as many as there are cores took each other's (a pipeline of 2 on 2 cores was 15 % slower).
    """
    with changed({} if _THREADS in os.environ else {_THREADS: str(max(1, num_threads))}):
        yield


def find_variable(name: str) -> str | None:
    """What the environment says under a name, for a sentence that tells it."""
    return os.environ.get(name)


def leave_faults_to_watch() -> None:
    """Let torch not end this process when NCCL meets a fault, unless somebody has said otherwise. Before NCCL starts.

    By default its own watchdog aborts the process as soon as another rank's connection breaks (exit status -6), before
    it can be said which rank is gone and where everybody stood. `ranks/faults.py` does that, and aborts communicators.
    """
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")


def wants_shared_gpus() -> bool:
    """Whether ranks of `torchrun` may share GPUs: `SHARDWISE_SHARE_GPUS=1`."""
    return os.environ.get("SHARDWISE_SHARE_GPUS", "") not in ("", "0")


def wants_emulated_fp8() -> bool:
    """Whether 8-bit products may be emulated where a device has none: `SHARDWISE_EMULATE_FP8=1`."""
    return os.environ.get(EMULATE_FP8, "") not in ("", "0")


def ask_for_shared_gpus() -> None:
    """Let ranks of `torchrun` share GPUs from now on."""
    os.environ["SHARDWISE_SHARE_GPUS"] = "1"


def keep_streams_apart() -> None:
    """Let nothing in one stream of a GPU wait for another, unless somebody has said otherwise. Before CUDA starts.

    A receive over NCCL is a kernel that runs until the other rank has sent. What must not wait for it:

    - Streams in its queue. By default there are 8 for all streams, and two in one queue wait for each other's events:
      a pipeline stood still for good, whose next send was queued behind a wait for what it was to bring.
    - Kernels that are used for the first time. By default each is loaded then, which waits for all that runs: two
      pipelines with experts, whose shapes change, stood still (both seen on an H200, torch 2.11).
    """
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")


def share_gpu(rank: int, *, is_one_network: bool) -> None:
    """Let this rank, of all of a run, talk over NCCL with others on the same GPU. Before NCCL starts.

    It refuses two ranks on one device of a machine. Told that each is a machine of its own it goes over sockets, which
    is slow and right: those of the machine itself where all ranks reach each other so, else those that it chooses.
    """
    os.environ.update(NCCL_HOSTID=f"host{rank}", NCCL_IB_DISABLE="1", NCCL_SHM_DISABLE="1", NCCL_P2P_DISABLE="1")
    if is_one_network:
        os.environ["NCCL_SOCKET_IFNAME"] = "lo"


def num_cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def place_under_torchrun() -> tuple[int, int] | None:
    """Which of how many processes on this machine this is, if `torchrun` has started it."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    return int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])


def rank_under_torchrun() -> int:
    """Which of all ranks of the plan this process is: `torchrun` numbers devices, and seats say whose each is."""
    return rank_on(int(os.environ["RANK"]))


@contextmanager
def seated(devices: Sequence[int] | None) -> Iterator[None]:
    """Within it, processes that are started or joined take these devices: by rank, its number among all devices."""
    with changed({} if devices is None else {_SEATS: ",".join(map(str, devices))}):
        yield


def device_of(rank: int) -> int:
    """The number of the device that a rank sits on; in plain order, its own."""
    seats = os.environ.get(_SEATS)
    return int(seats.split(",")[rank]) if seats else rank


def rank_on(device: int) -> int:
    """The rank that sits on a device."""
    seats = os.environ.get(_SEATS)
    return seats.split(",").index(str(device)) if seats else device


def find_master() -> tuple[str, int] | None:
    """Where the store is that `torchrun` keeps for all processes, if it has started this one."""
    if not {"TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        return None
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


def find_world_size() -> int | None:
    """How many processes `torchrun` has started on all machines together, if it has started this one."""
    return int(os.environ["WORLD_SIZE"]) if "TORCHELASTIC_RUN_ID" in os.environ else None


def node_name() -> str:
    """What this machine is called by the system that has started this process, or else by itself."""
    return os.environ.get("SLURMD_NODENAME") or os.environ.get("NODE_NAME") or platform.node()


def find_attempt() -> str | None:
    """Which attempt of which job this is, where `shardwise launch` has started it."""
    return os.environ.get(ATTEMPT)


def come_from_standby() -> None:
    """This process was forked from the one on standby. Those that it starts itself were not."""
    os.environ[_STANDBY] = str(os.getpid())


def is_from_standby() -> bool:
    return os.environ.get(_STANDBY) == str(os.getpid())


def memory_root() -> Path:
    """A folder whose files are in this machine's memory."""
    return Path(os.environ.get(COPIES_ROOT) or "/dev/shm")


def name_attempt(word: str) -> None:
    """All ranks have agreed on a word for this attempt."""
    os.environ[_AGREED] = word


def attempt_name() -> str:
    """What ranks of `torchrun` call this attempt among themselves: empty at the first, if they have not agreed on any
    other word."""
    return os.environ.get(_AGREED) or (str(num_restarts()) if num_restarts() else "")


def num_restarts() -> int:
    """How often `torchrun` has started this process again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def processor_name() -> str:
    """What the processor calls itself; on Arm, where it has no name, its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def versions_of(packages: Iterable[str]) -> dict[str, str]:
    """Of Python, and of those of the packages that are installed."""
    from importlib.metadata import PackageNotFoundError, version  # Slow to load, and wanted at the end of a run.

    found = {"python": platform.python_version()}
    for package in packages:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found
