"""Compiled units whose backward computes only the requested gradients.

`torch.compile` makes one node of a unit's backward. Torch's own nodes check which of their gradients a pass of autograd
needs; such a node does not. Under a zero-bubble schedule it would compute the weight gradients with the input gradient
in I, discard them, and compute everything again in W. Here the node checks too: if a pass needs only some gradients,
the backward graph is cut in two, and intermediate results that both halves need are kept at the node between passes.
The first half computes the gradients needed now, and also returns the intermediate results that the second half needs.
The second half continues from there to the other gradients:

      gradient of the output                 gradient of the output      kept
            |          \\                           |       \\              |
        [matmul]    [matmul]                    [matmul]    kept       [matmul]
            |           |                           |                      |
          input       weight                      input                  weight

An operation that makes gradients of both kinds at once, such as convolution's, is in both halves if it has an argument
that selects its outputs (`output_mask`), and otherwise in the first.
"""

import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd import graph as autograd_graph
from torch.fx import Graph, GraphModule, Node
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from shardwise.errors import ShardwiseError, unknown
from shardwise.stages.split.module_stage import ModuleStage
from shardwise.stages.split.switch import Inner
from shardwise.stages.stage import Split
from shardwise.torch_private import (
    RECOMPILE_LIMITS,
    CompileContext,
    OpOverload,
    TracingContext,
    aot_eager,
    compile_context,
    current_node,
    detect_fake_mode,
    donate_nothing,
    has_cpp_compiler,
    has_triton,
    inductor,
    is_wanted,
    schema_of,
    takes_a_list,
    tracing,
)

#: From Triton or C++ kernels to no compilation; `aot_eager` runs the same graphs as `inductor`, uncompiled.
BACKENDS = ("inductor", "aot_eager", "eager")

# Runs a graph on a list of inputs, which it may clear.
_Compiled = Callable[[list[Any]], Sequence[Any]]
_Compile = Callable[[GraphModule, list[Any]], _Compiled]
_KEPT = "shardwise.kept"


def check_backend(compile: bool | str, device: torch.device) -> str | None:
    """Return the requested backend, None for no compilation. Refuse one that cannot work here."""
    if not compile:
        return None
    backend = "inductor" if compile is True else compile
    if backend not in BACKENDS:
        raise unknown("backend to compile with", backend, BACKENDS)
    if backend == "inductor":
        missing = find_missing(device)
        if missing is not None:
            raise ShardwiseError(
                f"compile='inductor' needs {missing} for {device.type}, and none is found", remedy="compile='aot_eager'"
            )
    return backend


def find_missing(device: torch.device) -> str | None:
    """Return what inductor needs for a device and does not find; None if nothing is missing."""
    if device.type == "cpu":
        return None if has_cpp_compiler() else "a C++ compiler"
    if device.type == "cuda":
        return None if has_triton() else "Triton"
    return None


def compile_units(split: Split, backend: str) -> None:
    """Compile each unit of this process's stages at its first call. Units of one kind share compiled code.

    Evaluation runs them uncompiled: it is rare, and each kind of unit would be compiled once more for it.
    """
    # All units are called from one line (`_calling`), and each kind, mode and shape of them counts against its limit.
    most = 8 * sum(map(len, split.units))
    chosen: Any = {"inductor": _inductor, "aot_eager": _aot_eager, "eager": "eager"}[backend]
    for stage in split.stages:
        if isinstance(stage, ModuleStage):
            RECOMPILE_LIMITS.raise_for(stage, most)
            stage.wrap(partial(_around, chosen))


def _around(backend: Any, unit: str, call: Inner) -> Inner:
    """Return the compiled call of a unit, or its own call if it has `keeps_eager` set, like the head of `nets`."""
    del unit
    if getattr(getattr(call, "__self__", None), "keeps_eager", False):
        return call
    return _in_training(torch.compile(_calling(call), backend=backend), call)


def _in_training(compiled: Inner, plain: Inner) -> Inner:
    def run(*args: Any, **kwargs: Any) -> Any:
        return (compiled if torch.is_grad_enabled() else plain)(*args, **kwargs)

    return run


def _calling(call: Inner) -> Inner:
    """Wrap a call in a function of ours: torch traces into calls made there, even of torch's own modules."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    return run


def _aot_eager(graph: GraphModule, inputs: list[Any]) -> Any:
    return aot_eager(graph, inputs, _compile_backward)


def _inductor(graph: GraphModule, inputs: list[Any]) -> Any:
    def part_of(compile: Callable[..., Any], part: GraphModule, given: list[Any], **options: Any) -> Any:
        if not options.get("is_backward"):
            return compile(part, given, **options)
        # Which inputs are static is known for the whole backward, not for its halves.
        plain = {**options, "static_input_idxs": (), "cudagraphs": None}
        return _compile_backward(partial(compile, **plain), part, given)

    return inductor(graph, inputs, part_of)


class _Part(NamedTuple):
    """A compiled half of a backward, and the positions of the whole's inputs that it takes."""

    run: _Compiled
    inputs: tuple[int, ...]


class _Kept(NamedTuple):
    """The state that a first half leaves for the second: the gradients already computed, and values for the others."""

    done: frozenset[int]
    values: tuple[Any, ...]


def _compile_backward(compile: _Compile, graph: GraphModule, examples: list[Any]) -> _Compiled:
    """Compile a backward for AOTAutograd. Halves are compiled when they are first needed."""
    backward = _Backward(compile, graph, examples)

    def run(args: list[Any]) -> Sequence[Any]:
        return backward.run(args)

    return takes_a_list(run)


class _Backward:
    """A compiled backward that computes only the gradients that the current pass needs."""

    def __init__(self, compile: _Compile, graph: GraphModule, examples: list[Any]) -> None:
        self._compile, self._graph, self._examples = compile, graph, examples
        self._contexts = TracingContext.try_get(), CompileContext.try_get()
        donate_nothing(self._contexts[0])
        *_, last = graph.graph.nodes
        returned = last.args[0]
        assert isinstance(returned, (list, tuple)), "a backward returns a gradient for each input"
        self._num_gradients = len(returned)
        self._gradients = frozenset(place for place, each in enumerate(returned) if each is not None)
        self._edges = self._find_edges(returned)
        self._parts: dict[frozenset[int], tuple[_Part, _Part]] = {}

    def _find_edges(self, returned: Sequence[Any]) -> list[int]:
        """Return the gradient that goes along each outgoing edge of the node.

        An input that nothing depends on keeps its edge only if it is a leaf.
        """
        context = self._contexts[0]
        metadata = None if context is None else context.fw_metadata
        if metadata is None:
            return sorted(self._gradients)
        return [
            place
            for place, info in enumerate(metadata.input_info)
            if info.requires_grad and (info.is_leaf or returned[place] is not None)
        ]

    def run(self, args: list[Any]) -> Sequence[Any]:
        """Compute the gradients that this pass of autograd needs; return None in place of the others."""
        node: Any = current_node()
        wanted = self._find_wanted(node)
        kept: _Kept | None = node.metadata.pop(_KEPT, None)
        if kept is not None and wanted.isdisjoint(kept.done):
            _, second = self._get_parts(kept.done)
            return self._spread(self._gradients - kept.done, _run(second, args, kept.values))
        first, _ = self._get_parts(wanted)
        made = _run(first, args)
        if wanted != self._gradients:
            node.metadata[_KEPT] = _Kept(wanted, tuple(made[len(wanted) :]))
        return self._spread(wanted, made)

    def _find_wanted(self, node: autograd_graph.Node) -> frozenset[int]:
        targets = [target for target, _ in node.next_functions if target is not None]
        if len(targets) != len(self._edges) or not self._gradients.issubset(self._edges):
            return self._gradients
        asked = {place for place, target in zip(self._edges, targets, strict=True) if is_wanted(target)}
        return self._gradients & asked

    def _spread(self, places: frozenset[int], made: Sequence[Any]) -> Sequence[Any]:
        found = dict(zip(sorted(places), made, strict=False))
        return [found.get(place) for place in range(self._num_gradients)]

    def _get_parts(self, wanted: frozenset[int]) -> tuple[_Part, _Part]:
        """Return the halves for the wanted gradients. If all are wanted, the first is the whole, the second empty."""
        if wanted not in self._parts:
            first, second = _halve(self._graph, wanted)
            given, later = ([self._examples[place] for place in half.inputs] for half in (first, second))
            made = FakeTensorProp(first.graph, detect_fake_mode(given)).propagate_dont_convert_inputs(*given)
            examples = given, [*later, *made[len(wanted) :]]
            with tracing(self._contexts[0]), compile_context(self._contexts[1]):
                runs = [self._compile(half.graph, each) for half, each in zip((first, second), examples, strict=True)]
            self._parts[wanted] = _Part(runs[0], first.inputs), _Part(runs[1], second.inputs)
        return self._parts[wanted]


def _run(part: _Part, args: list[Any], kept: Sequence[Any] = ()) -> Sequence[Any]:
    given = [*(args[place] for place in part.inputs), *kept]
    # Drop the references in the caller's list, so that each input can be freed after its last use.
    args.clear()
    return part.run(given)


class _Half(NamedTuple):
    """A part of a graph, to be compiled, and the inputs of the whole that it takes, by position.

    It returns its gradients in the order of the whole. The first half returns after them what it keeps for the second;
    the second takes that after its inputs.
    """

    graph: GraphModule
    inputs: tuple[int, ...]


def _halve(whole: GraphModule, wanted: Collection[int]) -> tuple[_Half, _Half]:
    """Cut a graph in two: the outputs at the `wanted` positions, and all others."""
    *nodes, last = whole.graph.nodes
    returned = [each if isinstance(each, Node) else None for each in last.args[0]]
    now = [each for position, each in enumerate(returned) if each is not None and position in wanted]
    later = [each for position, each in enumerate(returned) if each is not None and position not in wanted]
    early = _above([*now, *(each for each in nodes if each.op == "call_function" and each.is_impure())])
    # If an operation cannot make one of its outputs alone, the first half hands that output over.
    for node in nodes:
        if _is_item(node) and node.args[0] in early and _mask_place(node.args[0]) is None:
            early.add(node)
    late, kept = _beyond(later, early)
    inputs = [node for node in nodes if node.op == "placeholder"]
    first = _extract(whole, nodes, early, inputs, [], [*now, *kept])
    return first, _extract(whole, nodes, late, inputs, kept, later)


def _above(roots: Iterable[Node]) -> set[Node]:
    """Return the ancestors of some nodes, and the nodes themselves."""
    found: set[Node] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += node.all_input_nodes
    return found


def _beyond(roots: Iterable[Node], early: set[Node]) -> tuple[set[Node], list[Node]]:
    """Return the nodes still to compute for the roots, and the early nodes whose values they need."""
    late: set[Node] = set()
    kept: dict[Node, None] = {}
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node in late or node in kept:
            continue
        if node in early and not _costs_nothing(node):
            kept[node] = None
            continue
        late.add(node)
        for above in node.all_input_nodes:
            if _is_item(node) and above in early:
                # Run the operation again, without the outputs that the first half made.
                late.add(above)
                stack += above.all_input_nodes
            else:
                stack.append(above)
    return late, list(kept)


def _extract(
    whole: GraphModule,
    nodes: list[Node],
    part: set[Node],
    inputs: list[Node],
    kept: list[Node],
    returned: list[Node],
) -> _Half:
    """Extract the nodes of a part as a separate graph, whose inputs are those of the whole and the kept values."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    taken = [position for position, node in enumerate(inputs) if node in part]
    for node in [*(inputs[position] for position in taken), *kept]:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in nodes:
        if node in part and node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            place = _mask_place(node)
            if place is not None:
                items = {each.args[1] for each in node.users if each in part}
                mask = [made and number in items for number, made in enumerate(node.args[place])]  # type: ignore[arg-type]
                copies[node].update_arg(place, mask)
    output = graph.output([copies[each] for each in returned])
    # The other half and autograd rely on the strides, so outputs must keep them.
    output.meta["user_visible_output_idxs"] = list(range(len(returned)))
    return _Half(GraphModule(whole, graph), tuple(taken))


def _is_item(node: Node) -> bool:
    return node.op == "call_function" and node.target is operator.getitem


def _costs_nothing(node: Node) -> bool:
    """Whether a node costs nothing to have in both halves: an input, a shape, or a view."""
    if node.op in ("placeholder", "get_attr") or isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat)):
        return True
    return isinstance(node.target, OpOverload) and node.target.is_view


def _mask_place(node: Any) -> int | None:
    """Return the position of an operation's `output_mask` argument; None if it has none."""
    if not isinstance(node.target, OpOverload):
        return None
    names = [argument.name for argument in schema_of(node.target).arguments]
    return names.index("output_mask") if "output_mask" in names and len(node.args) == len(names) else None
