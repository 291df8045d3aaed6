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
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import graph as autograd_graph
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

# Private, and the same from torch 2.11 to 2.13. Where it is missing, what is public does the same more slowly.
_engine_run_backward = getattr(autograd_graph, "_engine_run_backward", None)
_run_in_thread = getattr(getattr(torch.autograd.Variable, "_execution_engine", None), "run_backward", None)

Gradients = Sequence[Tensor | None]
_WrittenInPython: Any = torch._C._FunctionBase


@dataclass(slots=True)
class WeightGradients:
    """The second half, to be run when there is time. What it needs is held until then."""

    cuts: "list[_Cut]" = field(default_factory=list)

    def run(self) -> None:
        """Add the gradients to the parameters' `grad`, and let go of the graph."""
        while self.cuts:
            self.cuts.pop().run()


@dataclass(slots=True, eq=False)
class _Cut:
    """A way to parameters beside the spine: from which node, to which parameters, and the gradients that arrived.

    Without a node it is the way from the outputs that no input matters to: they are outside the spine altogether.
    """

    node: Node | None
    parameters: list[Tensor]
    edges: list[GradientEdge] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    #: Keeps the node alive, if that is one written in Python.
    owner: object = None

    def ways_in(self) -> list[GradientEdge]:
        """Where gradients arrive."""
        assert self.node is not None, "nothing arrives outside the spine"
        # One for each output that the forward had.
        return [GradientEdge(self.node, number) for number in range(len(self.node._input_metadata))]

    def keep(self, edge: GradientEdge, gradient: Tensor | None) -> None:
        """Take what has arrived, if anything."""
        if gradient is not None:
            self.edges.append(edge)
            self.gradients.append(gradient)

    def run(self) -> None:
        if self.edges:
            _run_engine(self.edges, self.gradients, self.parameters, accumulates=True)


def full_backward(outputs: Sequence[Tensor], gradients: Gradients) -> None:
    """Both halves at once: gradients are added to the `grad` of inputs and parameters."""
    _run_engine(outputs, _given(outputs, gradients), (), accumulates=True)


class Halves(NamedTuple):
    """Where a graph is cut in two: found from its outputs and inputs alone, before any gradient is there."""

    cuts: list[_Cut]
    #: Parameters that several cuts lead to.
    at_once: list[Tensor]
    #: Where gradients arrive at cuts.
    ways: list[tuple[_Cut, GradientEdge]]
    #: The outputs outside the spine, by number, with their edges, and the cut that starts there.
    apart: list[tuple[int, GradientEdge, _Cut]]
    has_spine: bool


def find_halves(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Halves:
    """Find where to cut the graph of these outputs."""
    roots = [get_gradient_edge(output) for output in outputs]
    spine, cuts, at_once = _find_cuts([root.node for root in roots], set(map(id, inputs)))
    ways: list[tuple[_Cut, GradientEdge]] = []
    apart: list[tuple[int, GradientEdge, _Cut]] = []
    for cut in cuts:
        if cut.node is None:
            apart += [(number, root, cut) for number, root in enumerate(roots) if root.node not in spine]
        else:
            ways += [(cut, edge) for edge in cut.ways_in()]
    if any(isinstance(cut.node, _WrittenInPython) for cut in cuts):
        _keep_alive(cuts, roots)
    return Halves(cuts, at_once, ways, apart, bool(spine))


def input_gradients(
    outputs: Sequence[Tensor], gradients: Gradients, inputs: Sequence[Tensor], halves: Halves | None = None
) -> WeightGradients:
    """The first half: gradients become the `grad` of `inputs`, to be read only; return what computes the weights'.

    `halves` is what `find_halves` gave for the same outputs and inputs, if it was asked before.
    """
    given = _given(outputs, gradients)
    found = halves or find_halves(outputs, inputs)
    for number, edge, cut in found.apart:
        cut.keep(edge, given[number])
    if found.has_spine:
        _go_down(outputs, given, inputs, found.at_once, found.ways)
    return WeightGradients(found.cuts)


def _given(outputs: Sequence[Tensor], gradients: Gradients) -> list[Tensor]:
    """The gradients to start from; a loss starts from 1."""
    return [torch.ones_like(out) if each is None else each for out, each in zip(outputs, gradients, strict=True)]


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
        owners.update((child, node) for child in children if isinstance(child, _WrittenInPython))
    tokens = {root.node: root for root in roots}
    for cut in cuts:
        owner = cut.node
        while isinstance(owner, _WrittenInPython) and owner in owners:
            owner = owners[owner]
        if owner is not None:
            cut.owner = tokens.get(owner, owner)


def _go_down(
    outputs: Sequence[Tensor],
    given: list[Tensor],
    inputs: Sequence[Tensor],
    at_once: list[Tensor],
    ways: list[tuple[_Cut, GradientEdge]],
) -> None:
    """Compute the gradients of `inputs`, and of parameters that cannot wait, and keep what passes the cuts."""
    found = iter(_run_engine(outputs, given, [*inputs, *at_once, *(edge for _, edge in ways)], accumulates=False))
    for leaf, gradient in zip(inputs, found, strict=False):
        leaf.grad = gradient
    for parameter, gradient in zip(at_once, found, strict=False):
        if gradient is not None and parameter.grad is not None:
            parameter.grad += gradient
        elif gradient is not None:
            # Autograd may give one tensor as the gradient of two; what is added to must be its own.
            parameter.grad = gradient.clone()
    for (cut, edge), gradient in zip(ways, found, strict=True):
        cut.keep(edge, gradient)


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
    if _engine_run_backward is None:
        return _run_publicly(starts, gradients, targets, accumulates=accumulates)
    # What lies around the engine hands the context of this thread to those of devices: a CPU has none of its own.
    run = _run_in_thread if _run_in_thread is not None and gradients[0].device.type == "cpu" else _engine_run_backward
    found: tuple[Tensor | None, ...] = run(
        tuple(starts),
        tuple(gradients),
        not accumulates,
        False,
        tuple(targets),
        allow_unreachable=True,
        accumulate_grad=accumulates,
    )
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
