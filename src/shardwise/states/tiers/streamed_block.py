"""The weights of one block: the user's parameters on the host, and device parameters that replace them.

A parameter stays the same object, on the host, for its optimizer and for all other code. While its block runs, the
block's modules have another parameter in its place, on the device. Those of a block are views of one storage, which
exists as long as the block. When the weights leave, its memory is freed and the storage stays, empty; when they come
back it gets memory again. So what autograd saved of a weight in the forward is valid again in the backward.

    host      [ q_proj | k_proj | v_proj | ... ]      pinned, always there; or in files, if they stay on disk
    device    [ q_proj | k_proj | v_proj | ... ]      or nothing

    source           the parameters are          the block comes from
    pinned memory    views of it                 it
    scratch file     views of the mapped file    a buffer that the file is read into
    checkpoint       views of the mapped file    a buffer that the file is read into, in the module's own precision

A scratch file holds weights on disk that can be trained. It is allocated whole before it is used, and has no name, so
nothing is left of it.

    file      [ weights | gradients ]
    mapped      parameters  their grad         paged by the kernel; what is written is written back
    pinned    [ 3 ] [ 7 ] [ 11 ]              read ahead of their use, as blocks of a checkpoint are (`disk.py`)

The parameters are the mapped memory, so that an optimizer updates them in place, in its own order. Reads of the file
see what was written to the mapping: they are the same pages.
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
        """Return memory for the gradients of the block. Gradients to be added to others get a separate file."""
        found, self._gradients = self._gradients, None
        if found is not None:
            return found
        memory, file = _make_file(self._folder, self._num_bytes)
        os.close(file)
        return memory


class BlockParameter(NamedTuple):
    """A parameter, its replacement on the device, and the places of both in their buffers."""

    parameter: nn.Parameter
    on_device: nn.Parameter
    packed: Packed


class _Attribute(NamedTuple):
    """An attribute of a module that holds a parameter."""

    module: nn.Module
    name: str
    member: BlockParameter


class StreamedBlock:
    """Weights that move together. Their source has `num_bytes_of(parameters)` bytes: pinned memory, or a file of ours;
    None if they are read from another file."""

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
        """The bytes on the device, and at its source."""
        return self.packing.num_bytes

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters."""
        return [member.parameter for member in self.members]

    @property
    def is_on_disk(self) -> bool:
        """Whether its weights are in a file, which has to be read for them."""
        return self.host is None or self.scratch is not None

    @property
    def version(self) -> int:
        """A number that grows with every write to a parameter."""
        return sum(version_of(member.parameter) for member in self.members)

    @property
    def is_gathered(self) -> bool:
        """Whether its parameters still have the memory that they were given."""
        if self.host is None:
            return True
        base = self.host.data_ptr()
        return all(each.parameter.data_ptr() == base + each.packed.start for each in self.members)

    def gather(self) -> None:
        """Make every parameter point into the host's buffer: one with other memory is copied there."""
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
        """Let the block's modules use the parameters on the device."""
        for module, name, (parameter, on_device, _) in self._attributes:
            if on_device.requires_grad != parameter.requires_grad:
                on_device.requires_grad_(parameter.requires_grad)
            _put(module, name, on_device)

    def bind_host(self) -> None:
        """Give the block's modules their own parameters back."""
        for module, name, member in self._attributes:
            _put(module, name, member.parameter)

    def views(self, memory: Tensor) -> dict[nn.Parameter, Tensor]:
        """Return each parameter's part of a buffer that is packed like the block."""
        return dict(zip(self.parameters, self.packing.views(memory), strict=True))


def num_bytes_of(parameters: Sequence[nn.Parameter]) -> int:
    """Return the bytes of a block of these parameters."""
    return Packing.of(parameters).num_bytes


def _on_device(parameter: nn.Parameter, memory: Tensor) -> nn.Parameter:
    found = nn.Parameter(torch.empty(0, dtype=parameter.dtype, device=memory.device), parameter.requires_grad)
    # Through `data`: for autograd, copies into the memory are not changes of the parameter.
    found.data = memory
    return found


def _put(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    if type(module).__setattr__ is nn.Module.__setattr__:
        parameter_slots(module)[name] = parameter
    else:
        setattr(module, name, parameter)  # Recurrent layers keep lists of their weights, too.


def _make_file(folder: Path, num_bytes: int) -> tuple[Tensor, int]:
    """Return a new file of this many bytes as mapped memory, and its descriptor. It has no name; the mapping keeps
    it."""
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
        f"{format_bytes(num_bytes)} for weights that are trained cannot be reserved in {folder}:"
        f" {getattr(error, 'strerror', None) or error}",
        remedy="a folder on a disk with room for what the host has none for, or a larger budget for the host",
    )
