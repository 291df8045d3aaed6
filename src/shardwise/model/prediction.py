"""Multi-token prediction: additional layers after a decoder that predict the tokens after the next one.

DeepSeek V3 (2024), section 2.2: each has a norm of the decoder's output and one of the next token's embedding, a
projection of both to one width, layers like the decoder's last, and its own final norm. It shares the model's embedding
and head. Hugging Face's modules omit these layers, and so does the catalogue; `with_prediction` adds them.
"""

from collections.abc import Sequence
from dataclasses import replace

from shardwise.errors import unknown
from shardwise.model.assembly.part import Part, joined, linear, matmul, norm
from shardwise.model.model import Block, Model
from shardwise.model.operations import Width
from shardwise.model.shape import NormShape

_NORMS = NormShape()


def with_prediction(model: Model, *, count: int = 1, layers: Sequence[str] | None = None) -> Model:
    """Return the model with `count` such layers after its head.

    `layers` are the kinds of block in each: by default the kind of the last layer; for Nemotron 3 `attention`, `moe`.
    """
    kinds = {block.kind: block for block, _ in model.kinds if block.stack}
    chosen = list(layers) if layers is not None else [model.blocks[-2].kind]
    for kind in chosen:
        if kind not in kinds:
            raise unknown(f"kind of layer of {model.name}", kind, kinds)
    block = _block(model, [kinds[kind] for kind in chosen])
    again = [f"{block.stack}.{index}.{name}" for index in range(count) for name in ("table", "head")]
    ends = {"table": model.blocks[0].parameters[0].name, "head": _head_weight(model)}
    tied = tuple((ends[name.rsplit(".", 1)[-1]], f"{name}.weight") for name in again)
    return replace(
        model, name=f"{model.name}+mtp{count}", blocks=(*model.blocks, *(block,) * count), ties=(*model.ties, *tied)
    )


def _head_weight(model: Model) -> str:
    return next(each.name for each in model.blocks[-1].parameters if each.shape[0] == model.vocabulary)


def _block(model: Model, layers: list[Block]) -> Block:
    hidden, vocabulary = model.hidden, model.vocabulary
    both = Width(2 * hidden)
    joins = Part(operations=(matmul("join", both, Width(hidden)),), parameters=linear("eh_proj", both, Width(hidden)))
    inside = [Part(operations=each.operations, parameters=each.parameters) for each in layers]
    table, head = model.blocks[0], model.blocks[-1]
    embedded = Part(operations=table.operations, parameters=(replace(table.parameters[0], name="table.weight"),))
    logits = head.operations[-2:]
    weight = replace(linear("head", Width(hidden), Width(vocabulary), sharding="column")[0], name="head.weight")
    whole = joined(
        [
            embedded,
            norm("enorm", hidden, _NORMS),
            norm("hnorm", hidden, _NORMS),
            joins,
            *inside,
            norm("shared_head.norm", hidden, _NORMS),
            Part(operations=logits, parameters=(weight,)),
        ]
    )
    return whole.block(
        "prediction",
        stack="prediction",
        input_elements=hidden,
        output_elements=hidden,
        num_reductions=sum(each.num_reductions for each in layers) + 2,
    )
