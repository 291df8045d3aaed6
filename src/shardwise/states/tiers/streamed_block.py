"""The weights of one block: the user's parameters on the host, and device parameters that stand for them.

A parameter stays what it was, on the host, for its optimizer and for everybody who looks at it. While its block runs,
the block's modules have another parameter in its place, on the device. Those of a block are views of one storage that
it keeps for as long as it lives. When the weights leave, the memory goes and the storage stays, empty; when they come
back it has memory again. So what autograd has kept of one in the forward is the weight again in the backward.

    host      [ q_proj | k_proj | v_proj | ... ]      pinned, always there; or in files, if they stay on disk
    device    [ q_proj | k_proj | v_proj | ... ]      or nothing

    source           the parameters are          the block comes from
    pinned memory    views of it                 it
    scratch file     views of the mapped file    a buffer that the file is read into
    checkpoint       views of the mapped file    a buffer that the file is read into, in the module's own precision

A scratch file has weights on disk that can be trained. It is reserved whole before it is used, and without a name:
nothing is left of it.

    file      [ weights | gradients ]
    mapped      parameters  their grad         pages come and go as the kernel likes; what is written is written back
    pinned    [ 3 ] [ 7 ] [ 11 ]              read ahead of their use, as blocks of a checkpoint are (`disk.py`)

The parameters are the mapped memory, so that an optimizer updates them where they are, in the order of its own. What is
read from the file is what was written to the mapping: they are the same pages.
"""

import os
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shardwise.dataflow.buffers import reserve_file
from shardwise.errors import ShardwiseError
from shardwise.states.tiers.packing import Packed, Packing
from shardwise.torch_private import parameter_slots, version_of
from shardwise.units import format_bytes

_PAGE_BYTES = 4096


class ScratchFile:
    """A file for the weights of one block and for their gradients."""

    def __init__(self, folder: Path, num_bytes: int) -> None:
        self._folder, self._num_bytes = folder, num_bytes
        pages = -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES
        memory, self.file = _make_file(folder, 2 * pages)
        weakref.finalize(self, os.close, self.file)
        self.weights = memory[:num_bytes]
        self._gradients: Tensor | None = memory[pages : pages + num_bytes]

    def take_memory(self) -> Tensor:
        """Memory for the gradients of the block. Those that are added to others take a file of their own."""
        found, self._gradients = self._gradients, None
        if found is not None:
            return found
        memory, file = _make_file(self._folder, self._num_bytes)
        os.close(file)
        return memory


class BlockParameter(NamedTuple):
    """A parameter, what stands for it on the device, and where both lie in their runs of bytes."""

    parameter: nn.Parameter
    on_device: nn.Parameter
    packed: Packed


class _Attribute(NamedTuple):
    """Where a module looks for a parameter."""

    module: nn.Module
    name: str
    member: BlockParameter


class StreamedBlock:
    """Weights that come and go together. Their source is of `num_bytes_of(parameters)` bytes: pinned memory, or a file
    that is ours; None if they are read from a file that is not."""

    def __init__(
        self,
        module: nn.Module,
        parameters: Sequence[nn.Parameter],
        source: Tensor | ScratchFile | None,
        device: torch.device,
    ) -> None:
        self.scratch = source if isinstance(source, ScratchFile) else None
        self.host = source.weights if isinstance(source, ScratchFile) else source
        self.packing = Packing.of(parameters)
        self.device = torch.empty(self.num_bytes, dtype=torch.uint8, device=device)
        self.members = [
            BlockParameter(parameter, _on_device(parameter, packed.of(self.device)), packed)
            for parameter, packed in zip(parameters, self.packing.tensors, strict=True)
        ]
        by_parameter = {member.parameter: member for member in self.members}
        self._attributes = [
            _Attribute(each, name, by_parameter[parameter])
            for each in module.modules()
            for name, parameter in parameter_slots(each).items()
            if parameter is not None and parameter in by_parameter
        ]
        self.gather()

    @property
    def num_bytes(self) -> int:
        """What it takes on the device, and on its source."""
        return self.packing.num_bytes

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Whose weights they are."""
        return [member.parameter for member in self.members]

    @property
    def is_on_disk(self) -> bool:
        """Whether its weights are in a file, which has to be read for them."""
        return self.host is None or self.scratch is not None

    @property
    def version(self) -> int:
        """Grows whenever a parameter is written to."""
        return sum(version_of(member.parameter) for member in self.members)

    @property
    def is_gathered(self) -> bool:
        """Whether its parameters lie where they were put: nobody has given one of them other memory."""
        if self.host is None:
            return True
        base = self.host.data_ptr()
        return all(each.parameter.data_ptr() == base + each.packed.start for each in self.members)

    def gather(self) -> None:
        """Have every parameter lie in the host's run of bytes: one that was given other memory is copied there."""
        if self.host is None:
            return
        for parameter, _, packed in self.members:
            host = packed.of(self.host)
            if parameter.data_ptr() == host.data_ptr():
                continue
            if parameter.dtype != packed.dtype or parameter.shape != packed.shape:
                raise ShardwiseError(
                    f"a weight of {list(packed.shape)} in {packed.dtype} has become {list(parameter.shape)} in"
                    f" {parameter.dtype} while its block is streamed",
                    remedy="the change before weights are streamed",
                )
            host.copy_(parameter.detach())
            parameter.data = host

    def bind_device(self) -> None:
        """Let the block's modules compute with what is on the device."""
        for module, name, (parameter, on_device, _) in self._attributes:
            if on_device.requires_grad != parameter.requires_grad:
                on_device.requires_grad_(parameter.requires_grad)
            _put(module, name, on_device)

    def bind_host(self) -> None:
        """Let the block's modules have their parameters again."""
        for module, name, member in self._attributes:
            _put(module, name, member.parameter)

    def views(self, memory: Tensor) -> dict[nn.Parameter, Tensor]:
        """Each parameter's part of a run of bytes that is packed as the block is."""
        return dict(zip(self.parameters, self.packing.views(memory), strict=True))


def num_bytes_of(parameters: Sequence[nn.Parameter]) -> int:
    """The bytes of a block of these parameters."""
    return Packing.of(parameters).num_bytes


def _on_device(parameter: nn.Parameter, memory: Tensor) -> nn.Parameter:
    found = nn.Parameter(torch.empty(0, dtype=parameter.dtype, device=memory.device), parameter.requires_grad)
    # As `data`: to autograd what is copied into the memory is no change of the parameter.
    found.data = memory
    return found


def _put(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    if type(module).__setattr__ is nn.Module.__setattr__:
        parameter_slots(module)[name] = parameter
    else:
        setattr(module, name, parameter)  # It keeps lists of its weights, as recurrent layers do.


def _make_file(folder: Path, num_bytes: int) -> tuple[Tensor, int]:
    """A file of so many bytes as memory, and open. The mapping keeps it alive, its name is gone."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file, name = tempfile.mkstemp(prefix="shardwise-", suffix=".scratch", dir=folder)
    except OSError as error:
        raise _refused(folder, num_bytes, error) from error
    try:
        reserve_file(file, max(num_bytes, 1))
        return torch.from_file(name, shared=True, size=num_bytes, dtype=torch.uint8), file
    except (OSError, RuntimeError) as error:
        os.close(file)
        raise _refused(folder, num_bytes, error) from error
    finally:
        Path(name).unlink()


def _refused(folder: Path, num_bytes: int, error: Exception) -> ShardwiseError:
    return ShardwiseError(
        f"{format_bytes(num_bytes)} for weights that are trained cannot be had in {folder}:"
        f" {getattr(error, 'strerror', None) or error}",
        remedy="a folder on a disk with room for what the host has none for, or a larger budget for the host",
    )
