"""A backward in two halves: first the gradients that other ranks wait for, later those of the weights.

The first half goes back through the graph to the stage's inputs and asks for nothing else, so that autograd computes no
weight gradient on the way. Where the way passes a node that also leads to parameters (a *cut*), the gradient that
arrives there is kept:

      output                              output
        |                                   |
     [matmul] --- weight                 [matmul] - - weight     I: down the spine, gradients kept at the cuts
        |                                   |
      [norm] ---- scale                   [norm] - - - scale     W: from each cut sideways, to its parameters
        |                                   |
      input                               input

The second half starts at each cut with what was kept there and goes only to the parameters beside it. This knows no
layer types: whatever autograd can differentiate is split. A parameter that several cuts of one stage lead to (a weight
used twice, say) would be reached from above as well and counted twice; those few are computed in the first half.

Where no input wants a gradient (the first stage of most models) nobody waits for the first half, and all is left to the
second: in a fixed order of instructions, time that moves from an I to its W can only let others start sooner.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from shardwise.errors import ShardwiseError
from shardwise.torch_private import PythonNode, engine_run_backward, num_outputs, run_in_thread

Gradients = Sequence[Tensor | None]


@dataclass(slots=True, eq=False)
class _Cut:
    """A way to parameters beside the spine: from which node, to which parameters, and where gradients arrive.

    Without a node it is the way from the outputs that no input matters to: they are outside the spine altogether.
    """

    node: Node | None
    parameters: list[Tensor]
    ways: list[GradientEdge] = field(default_factory=list)
    #: Keeps the node alive, if that is one written in Python.
    owner: object = None


def full_backward(outputs: Sequence[Tensor], gradients: Gradients) -> None:
    """Both halves at once: gradients are added to the `grad` of inputs and parameters."""
    _run_engine(outputs, _given(outputs, gradients), (), accumulates=True)


#: The node of a checkpoint that runs another backward inside of the one that it is called in.
_REENTRANT = "CheckpointFunctionBackward"


class _ReentrantError(Exception):
    """A graph has such a node."""


@dataclass(slots=True, eq=False)
class Halves:
    """A graph cut in two: found from its outputs and inputs alone, before any gradient is there."""

    cuts: list[_Cut]
    #: Parameters that several cuts lead to.
    at_once: list[Tensor]
    #: What the first half computes: gradients of inputs, then of those parameters, then all that arrives at cuts.
    targets: tuple[Tensor | GradientEdge, ...]
    #: The outputs outside the spine, by number: what they are given arrives at the last cut.
    apart: list[int]
    has_spine: bool
    #: Whether it cannot be cut: what `checkpoint(..., use_reentrant=True)` has left runs in a plain backward alone.
    is_one: bool = False
    #: What the first half has found on the ways of all cuts, one after the other. Held until the second has run.
    arrived: list[Tensor | None] = field(default_factory=list)

    def run(self) -> None:
        """The second half: add the gradients to the parameters' `grad`, and let go of the graph."""
        cuts, arrived = self.cuts, self.arrived
        while cuts:
            cut = cuts.pop()
            edges: list[GradientEdge] = []
            gradients: list[Tensor] = []
            for edge in reversed(cut.ways):
                gradient = arrived.pop()
                if gradient is not None:
                    edges.append(edge)
                    gradients.append(gradient)
            if edges:
                _run_engine(edges, gradients, cut.parameters, accumulates=True)


def find_halves(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Halves:
    """Find where to cut the graph of these outputs."""
    roots = [get_gradient_edge(output) for output in outputs]
    try:
        spine, cuts, at_once = _find_cuts([root.node for root in roots], set(map(id, inputs)))
    except _ReentrantError:
        return Halves([], [], (), [], has_spine=False, is_one=True)
    targets: list[Tensor | GradientEdge] = [*inputs, *at_once]
    apart: list[int] = []
    for cut in cuts:
        node = cut.node
        if node is None:
            apart = [number for number, root in enumerate(roots) if root.node not in spine]
            cut.ways = [roots[number] for number in apart]
        else:
            # One for each output that the forward had.
            cut.ways = [GradientEdge(node, number) for number in range(num_outputs(node))]
            targets += cut.ways
    if any(isinstance(cut.node, PythonNode) for cut in cuts):
        _keep_alive(cuts, roots)
    return Halves(cuts, at_once, tuple(targets), apart, bool(spine))


def input_gradients(
    outputs: Sequence[Tensor], gradients: Gradients, inputs: Sequence[Tensor], halves: Halves | None = None
) -> Halves:
    """Run the first half: gradients become the `grad` of `inputs`, to be read only. What is returned runs the second.

    `halves` is what `find_halves` gave for the same outputs and inputs, if it was asked before.
    """
    found = find_halves(outputs, inputs) if halves is None else halves
    if found.is_one:
        full_backward(outputs, gradients)
        return found
    given = _given(outputs, gradients)
    if found.has_spine:
        reached = _run_engine(outputs, given, found.targets, accumulates=False)
        place = len(inputs)
        for leaf, gradient in zip(inputs, reached, strict=False):
            leaf.grad = gradient
        for parameter in found.at_once:
            _add_to(parameter, reached[place])
            place += 1
        found.arrived += reached[place:]
        # Cuts have their ways themselves, and let go of them one by one.
        found.targets = ()
    for number in found.apart:
        found.arrived.append(given[number])
    return found


def _given(outputs: Sequence[Tensor], gradients: Gradients) -> list[Tensor]:
    """The gradients to start from; a loss starts from 1."""
    pairs = zip(outputs, gradients, strict=True)
    return [torch.ones_like(output) if gradient is None else gradient for output, gradient in pairs]


def _add_to(parameter: Tensor, gradient: Tensor | None) -> None:
    """Add a gradient, as autograd would."""
    if gradient is not None and parameter.grad is not None:
        parameter.grad += gradient
    elif gradient is not None:
        # Autograd may give one tensor as the gradient of two; what is added to must be its own.
        parameter.grad = gradient.clone()


def _find_cuts(roots: Sequence[Node], ends: set[int]) -> tuple[set[Node], list[_Cut], list[Tensor]]:
    """The spine from roots to the leaves with these ids, its cuts, and the parameters that several cuts lead to."""
    spine, ways = _explore(roots, ends)
    several: dict[Node, None] = {}
    seen: set[Node] = set()
    for leaves in ways.values():
        several |= {leaf: None for leaf in leaves if leaf in seen}
        seen |= leaves.keys()
    cuts = []
    for node, leaves in ways.items():
        own = [_variable(leaf) for leaf in leaves if leaf not in several]
        if own:
            cuts.append(_Cut(node, own))
    return spine, cuts, [_variable(leaf) for leaf in several]


def _keep_alive(cuts: list[_Cut], roots: list[GradientEdge]) -> None:
    """Hold on to what owns the nodes of custom functions and compiled units: a reference to such a node does not."""
    owners: dict[Node, Node] = {}
    for node, children in _children_first([root.node for root in roots]):
        owners.update((child, node) for child in children if isinstance(child, PythonNode))
    tokens = {root.node: root for root in roots}
    for cut in cuts:
        owner = cut.node
        while isinstance(owner, PythonNode) and owner in owners:
            owner = owners[owner]
        if owner is not None:
            cut.owner = tokens.get(owner, owner)


def _run_engine(
    starts: Sequence[Tensor | GradientEdge],
    gradients: Sequence[Tensor],
    targets: Sequence[Tensor | GradientEdge],
    *,
    accumulates: bool,
) -> tuple[Tensor | None, ...]:
    """`torch.autograd.backward` to targets, or `grad` of them with the graph kept, without what these check first.

    Gradients are there and have their tensors' shapes: they were made for them. To check that again takes a good part
    of the 130 microseconds of a W on a stage that computes nothing (torch 2.13).
    """
    if engine_run_backward is None:
        return _run_publicly(starts, gradients, targets, accumulates=accumulates)
    # What lies around the engine hands the context of this thread to those of devices: a CPU has none of its own.
    run = run_in_thread if run_in_thread is not None and gradients[0].device.type == "cpu" else engine_run_backward
    try:
        found: tuple[Tensor | None, ...] = run(
            tuple(starts),
            tuple(gradients),
            not accumulates,
            False,
            tuple(targets),
            allow_unreachable=True,
            accumulate_grad=accumulates,
        )
    except RuntimeError as error:
        if "selective activation checkpoint" not in str(error):
            raise
        raise ShardwiseError(
            "a selective checkpoint of the module (create_selective_checkpoint_contexts) gives what it has kept to one"
            " backward alone, and this schedule takes backwards apart",
            remedy="schedule=1f1b; or checkpoint(...) without context_fn, or recompute=selective in the plan",
        ) from error
    return found


def _run_publicly(
    starts: Sequence[Tensor | GradientEdge],
    gradients: Sequence[Tensor],
    targets: Sequence[Tensor | GradientEdge],
    *,
    accumulates: bool,
) -> tuple[Tensor | None, ...]:
    if accumulates:
        torch.autograd.backward(starts, gradients, inputs=targets or None)  # type: ignore[arg-type]
        return ()
    return torch.autograd.grad(starts, targets, gradients, retain_graph=True, allow_unused=True)  # type: ignore[arg-type]


#: Leaves of parameters, each once and in order. One that is complete is shared and never added to.
_Leaves = dict[Node, None]


def _explore(roots: Sequence[Node], ends: set[int]) -> "tuple[set[Node], dict[Node | None, _Leaves]]":
    """Go through the graph below the roots once, children first.

    Returns the spine, which is all between the roots and the leaves in `ends`, both included; and the ways off it: for
    each node of the spine the leaves that it leads to beside it, from the inputs up, and at None those of roots outside
    the spine.
    """
    spine: set[Node] = set()
    ways: dict[Node | None, _Leaves] = {}
    leaves: dict[Node, _Leaves] = {}
    for node, children in _children_first(roots):
        if isinstance(node, PythonNode) and type(node).__name__ == _REENTRANT:
            raise _ReentrantError
        if not children:
            variable = getattr(node, "variable", None)
            if id(variable) in ends:
                spine.add(node)
            else:
                leaves[node] = {} if variable is None else {node: None}
        elif spine.isdisjoint(children):
            leaves[node] = _union([leaves[child] for child in children])
        else:
            spine.add(node)
            beside = _union([leaves[child] for child in children if child not in spine])
            if beside:
                ways[node] = beside
    apart = _union([leaves[root] for root in roots if root not in spine])
    if apart:
        ways[None] = apart
    return spine, ways


def _children_first(roots: Sequence[Node]) -> Iterator[tuple[Node, list[Node]]]:
    """Every node below the roots with what it leads to, each after what it leads to."""
    below: dict[Node, list[Node]] = {}
    stack: list[tuple[Node, bool]] = [(root, False) for root in roots]
    while stack:
        node, is_done = stack.pop()
        if is_done:
            yield node, below[node]
        elif node not in below:
            below[node] = children = [child for child, _ in node.next_functions if child is not None]
            stack.append((node, True))
            stack += [(child, False) for child in children if child not in below]


def _union(parts: list[_Leaves]) -> _Leaves:
    """All leaves of some nodes. Most nodes lead to one other only, and have its leaves without a copy."""
    some = [part for part in parts if part]
    if len(some) < 2:
        return some[0] if some else {}
    whole: _Leaves = {}
    for part in some:
        whole.update(part)
    return whole


def _variable(leaf: Node) -> Tensor:
    """The tensor that a leaf's gradient is added to."""
    found = leaf.variable  # type: ignore[attr-defined]
    assert isinstance(found, Tensor), f"{leaf.name()} is no leaf"
    return found
