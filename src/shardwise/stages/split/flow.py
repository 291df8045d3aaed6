"""Find the data flow between units: one run of the module on the example, watched operation by operation.

A materialised module is run as it is. One on the meta device is run as far as possible: glue on the real example, each
unit on the meta device.
"""

from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry, sdpa_flop

from shardwise.errors import ShardwiseError
from shardwise.stages.batch import home_of
from shardwise.stages.checkpoints import nothing_recomputed
from shardwise.stages.split.arguments import Signature
from shardwise.stages.split.filled_containers import Filling, containers_in, opened, taken_apart
from shardwise.stages.split.lines import checkpoint_around, compiled_around, line_of, line_of_error
from shardwise.stages.split.meta import (
    Guesses,
    call_on_meta,
    depends_on_data,
    has_meta,
    on_meta,
    shapes_by_data,
    tensors_of,
)
from shardwise.stages.split.outline import (
    NumberOutline,
    TensorOutline,
    open_dataclasses,
    outline_of,
    signature_of,
)
from shardwise.stages.split.python_state import PythonState, held_now
from shardwise.stages.split.settled_writes import write_again
from shardwise.stages.split.sources import NOTHING, Drawn, HeldTensor, Hidden, Ledger, Made, Source, Sources, storage_of
from shardwise.stages.split.switch import Inner, uncompiled, undisturbed
from shardwise.stages.split.unit_flow import Left, UnitCall, UnitFlow
from shardwise.stages.stage import Batch
from shardwise.torch_private import EagerDispatchMode, pytree, schema_of

#: FLOPs in the time of one byte: between a CPU core (about 5) and an H200 (792 TFLOP/s over 4.24 TB/s: 187). It only
#: has to give lookups and norms, which have next to no FLOPs, a small share.
FLOPS_OF_A_BYTE = 20.0


class FlowWatch(EagerDispatchMode):  # type: ignore[no-untyped-call]
    """Records every operation of a run, and every call of a unit."""

    def __init__(self, module: nn.Module, home: torch.device, *, records: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ledger = Ledger(module)
        self.left: list[Left] = []
        self._recorded = module if records else None
        self.calls: list[UnitCall] = []
        self.in_glue: set[str] = set()
        self.leaks: dict[int, str] = {}
        self.shapes_by_data = False
        self.compiled: str | None = None
        self._times_called: dict[str, int] = {}
        self._on_meta = has_meta(module)
        self._home = home
        #: The sources of values that glue has read and may have branched on: everything after it depends on them.
        self._decided_by: Sources = NOTHING
        self._inside: _Inside | None = None
        #: The checkpoint around the last call of a unit, and its first call.
        self._checkpoint: tuple[FrameType | None, int] = (None, 0)
        #: The state before the run, if flags are recorded; and the holder and key of each flag, by name.
        self.start: PythonState | None = None
        self.flags: dict[str, tuple[dict[Any, Any], Any]] = {}
        #: Whether to look if glue puts something into an attribute, a list or a closure, and calls a unit then; whether
        #: it did; and what calls of units have left there.
        self.notes_glue = self.assigns = False
        self._left_by_calls: set[tuple[int, Any, int]] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        if self._inside is not None:
            return self._inside.operation(func, args, kwargs)
        tensors = tensors_of((args, kwargs))
        sources = self.ledger.of_all(tensors) | self._decided_by
        self.in_glue.update(each.name for each in sources if isinstance(each, HeldTensor))
        note_leaks(func, sources, self.leaks)
        if self._on_meta:
            args, kwargs = self._with_numbers(func, args, kwargs)
        if draws(func, args, kwargs):
            sources |= {Drawn(line_of())}
        returned = func(*args, **kwargs)
        self.shapes_by_data = self.shapes_by_data or shapes_by_data(func, args)
        if isinstance(returned, (bool, int, float, complex)):
            self.look(sources)
            self.shapes_by_data = self.shapes_by_data or type(returned) is int  # It may be a length.
        self._settle(func, args, kwargs, returned, sources)
        return returned

    def look_at(self, tensor: Tensor) -> None:
        """Record that the values of a tensor were read without an operation."""
        if self._inside is not None:
            self._inside.looks = True
            self._inside.reads_integers |= is_of_integers(tensor)
        else:
            self.look(self.ledger.of(tensor))
            self.shapes_by_data = self.shapes_by_data or is_of_integers(tensor)

    def look(self, sources: Sources) -> None:
        """Record that glue read values. It may branch on them, so everything that follows depends on them.

        A number drawn for a branch (layer drop) is not counted, although each stage would draw another. If it has an
        effect, other units are called, and the run detects that.
        """
        self._decided_by |= {each for each in sources if not isinstance(each, Drawn)}

    def needs_of(self, leaves: list[Any]) -> Sources:
        """Return the sources of these values and of the branches taken so far.

        After a branch, another batch may take another path from here, on which any live value may be used.
        """
        found = self.ledger.of_all(each for each in leaves if isinstance(each, Tensor)) | self._decided_by
        return found | self.ledger.made_and_alive() if self._decided_by else found

    def _settle(self, func: Any, args: Any, kwargs: Any, returned: Any, sources: Sources) -> None:
        """Record what an operation wrote to, and what it created."""
        for written in written_by(func, args, kwargs):
            self._overwrite(written, sources)
        for each in tensors_of(returned):
            self.ledger.set(each, sources)

    def _overwrite(self, written: Tensor, sources: Sources) -> None:
        made = self.ledger.write(written, sources)
        if made is not None:
            self.calls[made.call].overwritten.add(made.leaf)

    def _with_numbers(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Replace meta tensors, which are weights that glue uses, by zeros."""

        writable = schema_of(func).is_mutable
        return pytree.tree_map(lambda each: self._real(each, writable=writable), (args, kwargs))

    def _real(self, each: Any, *, writable: bool = False) -> Any:
        if isinstance(each, Tensor) and each.is_meta:
            return TensorOutline(tuple(each.shape), each.dtype).placeholder(self._home, writable=writable)
        return each

    def call(self, unit: str, inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a unit, and record what it needed and what it returned."""
        self.compiled = self.compiled or compiled_around()
        open_dataclasses((args, kwargs))
        if self.start is not None:
            self.flags.update((name, (holder, key)) for name, holder, key in self.start.set_now())
        if self.notes_glue and self.start is not None:
            self.assigns = self.assigns or bool(held_now(self.start) - self._left_by_calls)
        arguments, tree = pytree.tree_flatten(opened(args, kwargs))
        index, times = len(self.calls), self._times_called.get(unit, 0)
        self._times_called[unit] = times + 1
        name = f"{unit}#{times}" if times else unit
        needs = self.needs_of(arguments)
        given = on_meta(arguments) if self._on_meta else arguments
        self._inside = inside = _Inside(self.ledger, index, given, self.leaks)
        looks = bool(self._decided_by)  # A number read earlier may be passed on by this call.
        before = None if self._recorded is None else PythonState(self._recorded)
        filling = Filling(inner)
        try:
            returned = self._run_on_meta(name, filling, given, tree) if self._on_meta else filling(*args, **kwargs)
        finally:
            self._inside = None
        if self.notes_glue and self.start is not None and not self.assigns:
            self._left_by_calls = held_now(self.start)
        if before is not None:
            self.left += self._left_by(index, before, looks=looks or inside.looks)
        open_dataclasses(returned)
        self._note_lengths(inside, given, pytree.tree_leaves(returned))
        outline = outline_of(returned, given, inside.changed, sends_numbers=looks or inside.looks)
        if outline.strange and filling.filled:  # Something else is in them, which cannot be handed on.
            (returned, _), filling.filled = returned, ()
            outline = outline_of(returned, given, inside.changed, sends_numbers=looks or inside.looks)
        if outline.strange:
            raise ShardwiseError(
                f"{name} returns a {outline.strange[0]}, and what is inside it cannot be followed to other stages",
                remedy="return tensors, tuples, lists or dictionaries, "
                f"or register {outline.strange[0]} with torch.utils._pytree",
            )
        for changed in inside.changed:
            self._overwrite(arguments[changed], frozenset([Hidden(index)]))
        if self._on_meta:
            made = {leaf: each.placeholder(self._home, writable=True) for leaf, each in outline.tensors.items()}
            returned = outline.filled(made, arguments)
        leaves = pytree.tree_leaves(returned)
        for leaf, each in outline.tensors.items():
            if isinstance(each, NumberOutline):
                # The use of a Python number cannot be tracked, so everything after it depends on it.
                self._decided_by |= {Made(index, leaf)}
            else:
                self.ledger.set_made(leaves[leaf], Made(index, leaf))
        self.calls.append(
            UnitCall(
                name=name,
                unit=unit,
                outline=outline,
                signature=signature_of(arguments),
                needs=needs | {each for each in inside.sources if not isinstance(each, HeldTensor)},
                flops=inside.flops,
                bytes=inside.bytes,
                touched=frozenset(each.name for each in inside.sources if isinstance(each, HeldTensor)),
                filled=filling.filled,
                checkpoint=self._first_in_checkpoint(index),
            )
        )
        return taken_apart(returned, containers_in(args, kwargs), filling.filled)

    def _note_lengths(self, inside: "_Inside", given: list[Any], leaves: list[Any]) -> None:
        """Record whether a call has made lengths that may depend on values."""
        if inside.shapes_by_data or inside.reads_integers:
            dims = slice(None) if inside.reads_integers else slice(1)
            before, after = (
                {size for each in tensors_of(some) for size in each.shape[dims]} for some in (given, leaves)
            )
            self.shapes_by_data = self.shapes_by_data or bool(after - before)

    def _first_in_checkpoint(self, index: int) -> int | None:
        frame = checkpoint_around()
        if frame is not self._checkpoint[0]:
            self._checkpoint = frame, index
        return None if frame is None else self._checkpoint[1]

    def _left_by(self, call: int, before: PythonState, *, looks: bool) -> list[Left]:
        found = [(name, holder, key, holder[key]) for name, holder, key in before.assigned()]
        return [
            Left(call, name, holder, key, self._real(each), looks and isinstance(each, (bool, int, float)))
            for name, holder, key, each in found
        ]

    def _run_on_meta(self, name: str, inner: Inner, given: list[Any], tree: pytree.TreeSpec) -> Any:
        """Run a unit on the meta device."""
        guesses = Guesses(recalls=False)  # This mode would neither see nor count cached results.
        try:
            return call_on_meta(inner, given, tree, guesses)
        except Exception as error:
            raise ShardwiseError(
                f"{name} does not run on the meta device, at {line_of_error(error)}: {error}",
                remedy="build the module on the CPU instead of under torch.device('meta')",
            ) from error
        finally:
            if self._inside is not None:
                self._inside.looks |= guesses.were_asked


class _Looks(TorchFunctionMode):
    """Records reads of values that do not show as operations."""

    def __init__(self, watcher: FlowWatch) -> None:
        super().__init__()
        self._watcher = watcher

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        if func in (Tensor.tolist, Tensor.numpy, Tensor.__array__):
            self._watcher.look_at(args[0])
        return func(*args, **(kwargs or {}))


class _Inside:
    """One call of a unit, from inside: what it uses, and what it costs."""

    def __init__(self, ledger: Ledger, call: int, arguments: list[Any], leaks: dict[int, str]) -> None:
        self._ledger, self._hidden, self._leaks = ledger, frozenset([Hidden(call)]), leaks
        self._places = {storage_of(each): at for at, each in enumerate(arguments) if isinstance(each, Tensor)}
        #: Whether it reads values out of tensors, and integers among them; and whether shapes in it depend on values.
        self.looks = self.reads_integers = self.shapes_by_data = False
        #: The indices of arguments that it wrote to.
        self.changed: set[int] = set()
        self.sources: set[Source] = set()
        self.flops = self.bytes = 0.0

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = tensors_of((args, kwargs))
        sources = self._ledger.of_all(tensors) - self._hidden
        self.sources |= sources
        note_leaks(func, sources, self._leaks)
        self.looks = self.looks or depends_on_data(func)
        self.shapes_by_data = self.shapes_by_data or shapes_by_data(func, args)
        returned = func(*args, **kwargs)
        self.reads_integers = self.reads_integers or type(returned) is int
        made = tensors_of(returned)
        self.flops += flops_of(func, args, kwargs, returned)
        # Views count as if they were written. They cost little, but are few.
        self.bytes += sum(each.numel() * each.element_size() for each in made)
        for each in made:
            # Existing tensors keep their sources: an in-place operation returns its argument.
            if not self._ledger.of(each):
                self._ledger.set(each, self._hidden)
        for written in written_by(func, args, kwargs):
            if storage_of(written) in self._places:
                self.changed.add(self._places[storage_of(written)])
        return returned


def flops_of(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], returned: Any) -> float:
    """Return the FLOPs of an operation that has been run; 0 for those that only move bytes."""
    packet = getattr(operation, "overloadpacket", None)
    name = getattr(packet, "__name__", "")
    if name.startswith("_scaled_dot_product") and not name.endswith("backward"):
        # Grouped-query heads cost as much as heads with keys and values of their own. Not every torch counts them so.
        query, key, value = (tuple(each.shape) for each in args[:3])
        return float(sdpa_flop(query, (key[0], query[1], *key[2:]), (value[0], query[1], *value[2:])))
    if name == "_grouped_mm" and args[0].dim() == 2:
        return float(2 * args[0].shape[0] * args[0].shape[1] * args[1].shape[-1])
    formula = flop_registry.get(packet)
    return 0.0 if formula is None else float(formula(*args, **kwargs, out_val=returned))


def note_leaks(func: Any, sources: Sources, leaks: dict[int, str]) -> None:
    """Record the operation and the line that first use a value from inside a call that did not return it."""
    for each in sources:
        if isinstance(each, Hidden) and each.call not in leaks:
            leaks[each.call] = f"{func.overloadpacket.__name__} at {line_of()}"


def written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that an operation writes to."""
    if not schema_of(func).is_mutable:
        return []
    written: list[Tensor] = []
    for position, argument in enumerate(schema_of(func).arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = args[position] if position < len(args) else kwargs.get(argument.name)
        written += [each for each in pytree.tree_leaves(given) if isinstance(each, Tensor)]
    return written


def draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operation draws random numbers. Attention is tagged so even without dropout."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    for position, argument in enumerate(schema_of(func).arguments):
        if argument.name == "dropout_p":
            given = args[position] if position < len(args) else kwargs.get(argument.name, argument.default_value)
            return bool(given)
    return True


def is_of_integers(tensor: Tensor) -> bool:
    """Whether what is read from a tensor may be lengths."""
    return not (tensor.dtype is torch.bool or tensor.is_floating_point() or tensor.is_complex())


def watch(
    module: nn.Module,
    units: Mapping[str, nn.Module],
    example: Batch,
    probe: Callable[[Any], None] | None = None,
    *,
    records: bool = False,
    notes_flags: bool = False,
    notes_glue: bool = False,
    with_gradients: bool = False,
) -> UnitFlow:
    """Run the module once on the example and return the data flow. The module is unchanged afterwards.

    `probe` gets the module's output; its values mean nothing if the module is on the meta device. `records`: also
    record what each call stores in attributes. `notes_flags`: also record what differed from its initial value while a
    unit was called, even if it is restored afterwards; with `notes_glue`, whether glue assigned any. Gradients are off,
    unless it is run `with_gradients`.
    """
    signature = Signature(module)
    signature.check(example)
    args, kwargs = signature.arguments(example)
    watcher = FlowWatch(module, home_of(example), records=records)
    with undisturbed(module, units, tells_writes=True, draws_alike=True) as switch:
        assert switch.noted is not None, "it is known what was there before"
        watcher.start, watcher.notes_glue = switch.noted.state if notes_flags else None, notes_glue
        graded = torch.set_grad_enabled(with_gradients)
        with uncompiled(), nothing_recomputed(), watcher, _Looks(watcher), switch.visited_by(watcher), graded:
            output = module(*args, **kwargs)
        traces, draws = bool(switch.noted.state.changed()), switch.noted.state.have_drawn()
        written = switch.noted.guard.written
        again = write_again(module, signature, example, written)
        rewritten = {
            name: each._replace(
                in_glue=name in watcher.in_glue,
                settles=each.how == "data" and name in again.settled,
                moves=name in again.moving,
            )
            for name, each in written.items()
        }
        slots = {name: (holder, key) for name, holder, key in switch.noted.state.assigned()} if records else {}
        slots.update(watcher.flags)
        if probe is not None:
            probe(output)
    sizes = {name: each.numel() * each.element_size() for name, each in module.named_parameters()}
    for call in watcher.calls:
        call.weight_bytes = sum(sizes.get(name, 0) for name in call.touched)
    open_dataclasses(output)
    leaves = pytree.tree_leaves(output)
    return UnitFlow(
        calls=tuple(watcher.calls),
        output_needs=watcher.needs_of(leaves),
        in_glue=frozenset(watcher.in_glue),
        leaks=watcher.leaks,
        traces=traces,
        left=tuple(watcher.left),
        slots=slots,
        rewritten=rewritten,
        shapes_by_data=watcher.shapes_by_data,
        draws_in_python=draws,
        compiled=watcher.compiled,
        assigns=watcher.assigns,
    )
