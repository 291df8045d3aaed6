"""`place`: a module, and the devices that it is to lie on."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from torch import nn

from shardwise.errors import ShardwiseError, unknown
from shardwise.fusion.fuse import settle_placed
from shardwise.placing.host import divide
from shardwise.placing.layout import no_room
from shardwise.placing.loads import loads_without_example, state_bytes, trains
from shardwise.placing.placed import Placed
from shardwise.placing.places import PlaceOptions, find_places, multiplied
from shardwise.stages.stage import Batch

#: What the host beside GPUs is for.
HOSTS = ("auto", "stream", "compute")


def place(
    module: nn.Module,
    devices: Sequence[str],
    *,
    microbatches: int = 1,
    schedule: str = "1f1b",
    chunks: int | None = None,
    example: Batch | None = None,
    budget: Mapping[str, str | int] | None = None,
    speeds: Mapping[str, float] | None = None,
    moments: int = 2,
    through_blocks: bool = False,
    host: Literal["auto", "stream", "compute"] = "auto",
    folder: Path | str | None = None,
    activations_on_host: float | None = None,
    kernels: bool = True,
) -> Placed:
    """Return a module like the one given, over several devices of this process.

    On a machine without GPUs devices are `cpu:0`, `cpu:1` and so on: threads. With one microbatch the module runs layer
    by layer, as written. With several, each device has a stage of it, and microbatches go through them under any
    schedule: its forwards, then, when `backward()` is called, its backwards. Outputs are joined along the batch, and a
    number, like a loss, is the mean; they are where the inputs were.

    Weights are laid out by room and speed, which are found out, or given: `budget={"cuda:0": "40 GiB"}`,
    `speeds={"cuda:0": 2.0}`. In training mode gradients count too, the optimizer's `moments` (2 for Adam, 1 for SGD
    with momentum) and activations, as measured on `example`, a batch by the names of forward's arguments. Without one,
    pipelines are laid out at the first forward, from its batch. `through_blocks` is that of `parallelize`.

    With `"cpu"` beside GPUs, what these have no room for lives on the host: its weights come to them ahead of their use
    (`host="stream"`), or the host computes it (`"compute"`), or whichever takes less time (`"auto"`). What has no room
    on the host either is on disk, in `folder`: in its safetensors, or, if it is trained, in files of our own.
    Activations that have no room on a device go to the host too, where that takes less time: `activations_on_host` is
    the part of them, from 0 to 1, or what is found out. `reason` says what was compared.

    On GPUs kernels compute what they compute alike (`docs/kernels.md`), unless `kernels=False`.
    """
    _check(module, host, microbatches, activations_on_host)
    sizes = state_bytes(module, moments=moments)
    held = sum(each.numel() * each.element_size() for each in module.parameters() if each.device.type == "cpu")
    places = find_places(devices, budget=budget, speeds=speeds, held_bytes=held, dtype=multiplied(module))
    computing, memory = divide(places, host)
    may_stay_on_disk = bool(memory) and (not trains(module) or folder is not None)
    if sum(sizes.values()) > sum(each.room_bytes for each in places) and not may_stay_on_disk:
        loads = loads_without_example(module, moments=moments)
        raise no_room(loads, places, range(len(places)), num_in_flight=1)
    options = PlaceOptions(
        microbatches=microbatches,
        schedule=schedule,
        chunks=chunks,
        moments=moments,
        through_blocks=through_blocks,
        host=host,
        folder=folder,
        activations_on_host=activations_on_host,
    )
    fused = settle_placed(module, [each.device for each in places], kernels=kernels)
    placed = Placed(module, places, options, fused)
    if example is not None or microbatches == 1 or (memory and len(computing) == 1):
        placed.lay_out(example)
    return placed


def _check(module: nn.Module, host: str, microbatches: int, activations_on_host: float | None) -> None:
    """Refuse what cannot be placed, before anything is done."""
    if activations_on_host is not None and not 0.0 <= activations_on_host <= 1.0:
        raise ShardwiseError(
            f"activations_on_host={activations_on_host}: it is a part of them, from 0 to 1",
            remedy="activations_on_host=0.5, or nothing: then it is found out",
        )
    if host not in HOSTS:
        raise unknown("host", host, HOSTS)
    if microbatches < 1:
        raise ShardwiseError(f"microbatches={microbatches}: a batch has at least one", remedy="microbatches=1")
    if any(each.is_meta for each in module.parameters()):
        raise ShardwiseError(
            f"{type(module).__name__} is on the meta device, so there are no weights to place",
            remedy='build it on the CPU, or module.to_empty(device="cpu") and load its weights',
        )
