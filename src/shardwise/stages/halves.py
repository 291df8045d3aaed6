"""A graph of operations in two halves: some of its outputs first, the others later, and nothing computed twice.

The graph is the backward of a compiled unit. The first half computes the gradients that are wanted now, and returns
with them what the second needs of its intermediate results. The second goes on from there to the other gradients:

      gradient of the output                 gradient of the output      kept
            |          \\                           |       \\              |
        [matmul]    [matmul]                    [matmul]    kept       [matmul]
            |           |                           |                      |
          input       weight                      input                  weight

An operation that makes gradients of both kinds at once, as that of a convolution does, is in both halves if it can be
told which to make (`output_mask`), and in the first if it cannot.
"""

import operator
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node

from shardwise.torch_private import OpOverload, schema_of


class Half(NamedTuple):
    """A part of a graph, to be compiled, and the inputs of the whole that it takes, by position.

    It returns its gradients in the order of the whole. The first half returns after them what it keeps for the second;
    the second takes that after its inputs.
    """

    graph: GraphModule
    inputs: tuple[int, ...]


def halve(whole: GraphModule, wanted: Collection[int]) -> tuple[Half, Half]:
    """Cut a graph in two: the outputs at the `wanted` positions, and all others."""
    *nodes, last = whole.graph.nodes
    returned = [each if isinstance(each, Node) else None for each in last.args[0]]
    now = [each for position, each in enumerate(returned) if each is not None and position in wanted]
    later = [each for position, each in enumerate(returned) if each is not None and position not in wanted]
    early = _above([*now, *(each for each in nodes if each.op == "call_function" and each.is_impure())])
    # What an operation has made already is handed over as it is, if that operation cannot make it alone.
    for node in nodes:
        if _is_item(node) and node.args[0] in early and _mask_place(node.args[0]) is None:
            early.add(node)
    late, kept = _beyond(later, early)
    inputs = [node for node in nodes if node.op == "placeholder"]
    first = _extract(whole, nodes, early, inputs, [], [*now, *kept])
    return first, _extract(whole, nodes, late, inputs, kept, later)


def _above(roots: Iterable[Node]) -> set[Node]:
    """All that nodes are computed from, and they themselves."""
    found: set[Node] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += node.all_input_nodes
    return found


def _beyond(roots: Iterable[Node], early: set[Node]) -> tuple[set[Node], list[Node]]:
    """What is left to compute for the roots, and what of the early nodes that starts from."""
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
                # Made again, without what the first half has made.
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
) -> Half:
    """The nodes of a part as a graph of its own, from inputs of the whole and what was kept."""
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
    # Strides are a part of what the other half, and autograd, expect.
    output.meta["user_visible_output_idxs"] = list(range(len(returned)))
    return Half(GraphModule(whole, graph), tuple(taken))


def _is_item(node: Node) -> bool:
    return node.op == "call_function" and node.target is operator.getitem


def _costs_nothing(node: Node) -> bool:
    """Inputs are there for both halves, and a shape or a view of something is made again at no cost."""
    if node.op in ("placeholder", "get_attr") or isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat)):
        return True
    return isinstance(node.target, OpOverload) and node.target.is_view


def _mask_place(node: Any) -> int | None:
    """Where an operation is told which of its outputs to make; None if it cannot be told."""
    if not isinstance(node.target, OpOverload):
        return None
    names = [argument.name for argument in schema_of(node.target).arguments]
    return names.index("output_mask") if "output_mask" in names and len(node.args) == len(names) else None
