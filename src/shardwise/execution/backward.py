"""A backward in two halves: I computes the input gradients that other ranks wait for, W later the weight gradients.

The first half runs autograd from the outputs to the stage's inputs only, so no weight gradient is computed. The nodes
between outputs and inputs are the *spine*. At each node of the spine that also leads to parameters (a *cut*), the
incoming gradient is kept:

      output                              output
        |                                   |
     [matmul] --- weight                 [matmul] - - weight     I: down the spine, gradients kept at the cuts
        |                                   |
      [norm] ---- scale                   [norm] - - - scale     W: from each cut sideways, to its parameters
        |                                   |
      input                               input

The second half starts at each cut with the kept gradient and runs only to the parameters beside it. This depends on no
layer types: any graph that autograd can differentiate is split. A parameter that several cuts of one stage lead to (a
weight used twice, for example) would be reached from the upper cuts as well and counted twice. The gradients of those
few parameters are computed in the first half.

If no input requires a gradient (the first stage of most models), no rank waits for the first half, and the second half
does all the work: in a fixed order of instructions, moving time from an I to its W can only let others start sooner.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils.checkpoint import CheckpointError

from shardwise.errors import ShardwiseError
from shardwise.torch_private import PythonNode, engine_run_backward, num_outputs, remove_hooks_but, run_in_thread

Gradients = Sequence[Tensor | None]


@dataclass(slots=True, eq=False)
class _Cut:
    """A node of the spine, the parameters that it leads to beside the spine, and the edges where gradients arrive.

    A cut without a node stands for the outputs that depend on no input: they are outside the spine altogether.
    """

    node: Node | None
    parameters: list[Tensor]
    ways: list[GradientEdge] = field(default_factory=list)
    #: Keeps the node alive, if it is a Python node (custom function or compiled unit).
    owner: object = None


def forget_hooks(inputs: Mapping[str, Tensor]) -> None:
    """Remove the hooks that a forward has registered on its inputs, before it is run again: it registers them again."""
    for each in inputs.values():
        remove_hooks_but(each, ())


def full_backward(outputs: Sequence[Tensor], gradients: Gradients) -> None:
    """Run both halves at once: add gradients to the `grad` of inputs and parameters."""
    _run_engine(outputs, _given(outputs, gradients), (), accumulates=True)


#: The node of a reentrant checkpoint, which runs a nested backward.
_REENTRANT = "CheckpointFunctionBackward"


class _ReentrantError(Exception):
    """The graph contains a reentrant checkpoint, so it cannot be split."""


@dataclass(slots=True, eq=False)
class Halves:
    """A graph cut in two, determined by its outputs and inputs alone, before any gradient has arrived."""

    cuts: list[_Cut]
    #: Parameters that several cuts lead to: their gradients are computed in the first half.
    at_once: list[Tensor]
    #: Targets of the first half: inputs, then the parameters of `at_once`, then the edges of all cuts.
    targets: tuple[Tensor | GradientEdge, ...]
    #: Indices of the outputs outside the spine: their gradients go to the last cut unchanged.
    apart: list[int]
    has_spine: bool
    #: Whether the graph cannot be cut: a `checkpoint(..., use_reentrant=True)` supports only a plain backward.
    is_one: bool = False
    #: Gradients that the first half found at the edges of all cuts, in order. Held until the second half has run.
    arrived: list[Tensor | None] = field(default_factory=list)

    def run(self) -> None:
        """Run the second half: add gradients to the parameters' `grad`, releasing the graph cut by cut."""
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
    """Run the first half: set the `grad` of `inputs` (read-only), and return the object that runs the second half.

    `halves` is the result of `find_halves` for the same outputs and inputs, if it was computed before.
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
        # Each cut holds its own edges and releases them one by one.
        found.targets = ()
    for number in found.apart:
        found.arrived.append(given[number])
    return found


def _given(outputs: Sequence[Tensor], gradients: Gradients) -> list[Tensor]:
    """Return the gradients to start from: 1 for a loss, which has None."""
    pairs = zip(outputs, gradients, strict=True)
    return [torch.ones_like(output) if gradient is None else gradient for output, gradient in pairs]


def _add_to(parameter: Tensor, gradient: Tensor | None) -> None:
    """Accumulate a gradient into a parameter, as autograd would."""
    if gradient is not None and parameter.grad is not None:
        parameter.grad += gradient
    elif gradient is not None:
        # Autograd may return one tensor as the gradient of two inputs; an accumulator must not be shared.
        parameter.grad = gradient.clone()


def _find_cuts(roots: Sequence[Node], ends: set[int]) -> tuple[set[Node], list[_Cut], list[Tensor]]:
    """Return the spine from roots to the leaves with these ids, its cuts, and parameters that several cuts lead to."""
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
    """Hold the owners of Python nodes (custom functions, compiled units): a reference to the node is not enough."""
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
    """Run `autograd.backward` to targets, or `autograd.grad` of them with the graph kept, without argument checks.

    The gradients exist and have the shapes of their tensors, by construction. Checking that again would take a good
    part of the 130 microseconds of a W on a stage that computes nothing (torch 2.13).
    """
    if engine_run_backward is None:
        return _run_publicly(starts, gradients, targets, accumulates=accumulates)
    # Torch's wrapper passes this thread's context on to device threads; a backward on the CPU has no such thread.
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
    except CheckpointError as error:
        raise ShardwiseError(
            "a checkpoint(...) of the module computes other tensors when it is run again in the backward. Under cp its"
            " attention sees the tokens of one rank alone there",
            remedy="recompute=full in the plan, and no checkpoint(...) in the module",
        ) from error
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


#: Accumulation nodes of parameters: an ordered set. A complete one is shared and never modified.
_Leaves = dict[Node, None]


def _explore(roots: Sequence[Node], ends: set[int]) -> "tuple[set[Node], dict[Node | None, _Leaves]]":
    """Traverse the graph below the roots once, children first.

    Return the spine: all nodes between the roots and the leaves in `ends`, both included. Return also the ways off it:
    for each node of the spine, the leaves that it leads to beside the spine, ordered from the inputs up; the key None
    has the leaves of roots outside the spine.
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
    """Yield every node below the roots with its children, in post-order (children first)."""
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
    """Return the union of leaves. Most nodes have one child only, and share its leaves without a copy."""
    some = [part for part in parts if part]
    if len(some) < 2:
        return some[0] if some else {}
    whole: _Leaves = {}
    for part in some:
        whole.update(part)
    return whole


def _variable(leaf: Node) -> Tensor:
    """Return the tensor that a leaf's gradient accumulates into."""
    found = leaf.variable  # type: ignore[attr-defined]
    assert isinstance(found, Tensor), f"{leaf.name()} is no leaf"
    return found
