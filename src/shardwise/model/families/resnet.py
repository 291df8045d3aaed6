"""ResNet: a stem, four stages of residual layers, a classifier. Sizes follow from the side of the image."""

from collections.abc import Iterator
from dataclasses import dataclass

from shardwise.model.assembly.ends import cross_entropy
from shardwise.model.assembly.part import Part, joined, linear, matmul, norm_parameters
from shardwise.model.families.fields import Fields
from shardwise.model.families.gpt import BIASED
from shardwise.model.model import Block, Model, Parameter
from shardwise.model.operations import Convolution, Elementwise, Moves, Norm, Saved, Width

_BOTTLENECK = 4
_POOL = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """A convolution with its batch norm: channels in and out, side of the kernel, stride, side of the input."""

    name: str
    inputs: int
    outputs: int
    kernel: int
    stride: int
    side: int
    activated: bool = True

    @property
    def out_side(self) -> int:
        return -(-self.side // self.stride)


def resnet(fields: Fields, name: str) -> Model:
    """Return the model for images of `image_size` pixels a side (224 if the configuration has none, as is usual)."""
    side = fields.count("image_size", default=224)
    labels = fields.values.get("id2label")
    num_labels = len(labels) if labels else fields.count("num_labels", default=2)
    stem = Filter(
        name="resnet.embedder.embedder",
        inputs=fields.count("num_channels", default=3),
        outputs=fields.count("embedding_size", default=64),
        kernel=7,
        stride=2,
        side=side,
    )
    widths = fields.items("hidden_sizes") or [256, 512, 1024, 2048]
    pooled = -(-stem.out_side // 2)
    last = pooled // 2 ** (len(widths) - 1 + fields.flag("downsample_in_first_stage"))
    return Model(
        name=name,
        family="resnet",
        blocks=(_stem(stem), *_stages(fields, widths, stem.outputs, pooled), _head(widths[-1], num_labels, last**2)),
        hidden=widths[-1],
        vocabulary=num_labels,
        sequence=1,
    )


def _stem(stem: Filter) -> Block:
    pixels = Saved(name="pixels", elements=stem.inputs * stem.side**2, rows=1, cut="whole")
    positions, halved = stem.out_side**2, (-(-stem.out_side // 2)) ** 2
    pooled = stem.outputs * halved
    taken = Moves(stem.outputs * positions, pooled, pooled * _POOL, stem.outputs * positions)
    # The pool keeps where each largest value was, as an index of eight bytes, and the next filter reads its output.
    kept = (
        Saved(name="pooled", elements=pooled, rows=1, cut="whole"),
        Saved(name="indices", elements=pooled, rows=1, cut="whole", width=8),
        pixels,
    )
    pool = Elementwise(name="pool", fused=taken, unfused=taken, cut="whole", rows=1, saves=kept)
    whole = joined([*_filter(stem, input_gradient=False), Part(operations=(pool,))])
    return whole.block("stem", input_elements=0, output_elements=pooled, rows=1)


def _stages(fields: Fields, widths: list[int], channels: int, side: int) -> Iterator[Block]:
    depths = fields.items("depths") or [3, 4, 6, 3]
    bottleneck = fields.text("layer_type", "bottleneck") == "bottleneck"
    first_stride = 2 if fields.flag("downsample_in_first_stage") else 1
    early = fields.flag("downsample_in_bottleneck")
    for stage, (width, depth) in enumerate(zip(widths, depths, strict=True)):
        stride = first_stride if stage == 0 else 2
        made: dict[str, Block] = {}
        for index in range(depth):
            kind = f"stage {stage} first" if index == 0 else f"stage {stage}"
            if kind not in made:
                stack = f"resnet.encoder.stages.{stage}.layers"
                made[kind] = _layer(kind, stack, channels, width, stride, side, bottleneck=bottleneck, early=early)
            channels, side, stride = width, -(-side // stride), 1
            yield made[kind]


def _layer(
    kind: str, stack: str, inputs: int, outputs: int, stride: int, side: int, *, bottleneck: bool, early: bool
) -> Block:
    parts: list[Part] = []
    if inputs != outputs or stride != 1:
        shortcut = Filter(
            name="shortcut", inputs=inputs, outputs=outputs, kernel=1, stride=stride, side=side, activated=False
        )
        parts += _filter(shortcut)
    for each in _filters(inputs, outputs, stride, side, bottleneck=bottleneck, early=early):
        parts += _filter(each)
    out_side = -(-side // stride)
    elements = outputs * out_side**2
    # The sum and its nonlinearity: two kernels in plain torch.
    added = Elementwise(
        name="residual",
        fused=Moves(2 * elements, elements, 2 * elements, elements),
        unfused=Moves(3 * elements, 2 * elements, 2 * elements, elements),
        cut="whole",
        rows=1,
        saves=(Saved(name="activated", elements=elements, rows=1, cut="whole"),),
    )
    ends = {"input_elements": inputs * side**2, "output_elements": elements}
    return joined([*parts, Part(operations=(added,))]).block(kind, stack=stack, **ends, rows=1)


def _filters(inputs: int, outputs: int, stride: int, side: int, *, bottleneck: bool, early: bool) -> tuple[Filter, ...]:
    """Return the filters of a layer in order. A bottleneck narrows, filters and widens; `early` strides at once."""
    small = -(-side // stride)
    if not bottleneck:
        return (
            Filter(name="layer.0", inputs=inputs, outputs=outputs, kernel=3, stride=stride, side=side),
            Filter(name="layer.1", inputs=outputs, outputs=outputs, kernel=3, stride=1, side=small, activated=False),
        )
    narrow = outputs // _BOTTLENECK
    first, second = (stride, 1) if early else (1, stride)
    middle = -(-side // first)
    return (
        Filter(name="layer.0", inputs=inputs, outputs=narrow, kernel=1, stride=first, side=side),
        Filter(name="layer.1", inputs=narrow, outputs=narrow, kernel=3, stride=second, side=middle),
        Filter(name="layer.2", inputs=narrow, outputs=outputs, kernel=1, stride=1, side=small, activated=False),
    )


def _filter(shape: Filter, *, input_gradient: bool = True) -> list[Part]:
    """Convolution, batch norm, nonlinearity. The norm keeps its input, the nonlinearity its output."""
    positions = shape.out_side**2
    elements = shape.outputs * positions
    convolution = Convolution(
        name=shape.name,
        in_channels=shape.inputs,
        out_channels=shape.outputs,
        kernel=shape.kernel**2,
        positions=positions,
        in_positions=shape.side**2,
        input_gradient=input_gradient,
    )
    kept = Saved(name="norm input", elements=elements, rows=1, cut="whole")
    norm = Norm(name="batch_norm", kind="batch", elements=shape.outputs, rows=positions, cut="whole", saves=(kept,))
    weight = Parameter(
        name=f"{shape.name}.convolution.weight", shape=(shape.outputs, shape.inputs, shape.kernel, shape.kernel)
    )
    normed = norm_parameters(f"{shape.name}.normalization", shape.outputs, BIASED)
    parts = [Part(operations=(convolution, norm), parameters=(weight, *normed))]
    if shape.activated:
        moves = Moves(elements, elements, 2 * elements, elements)
        output = Saved(name="activated", elements=elements, rows=1, cut="whole")
        activated = Elementwise(name="relu", fused=moves, unfused=moves, cut="whole", rows=1, saves=(output,))
        parts.append(Part(operations=(activated,)))
    return parts


def _head(channels: int, num_labels: int, positions: int) -> Block:
    """Return the mean over all positions, and one matmul."""
    elements = channels * positions
    moves = Moves(elements, channels, channels, elements)
    kept = Saved(name="pooled", elements=channels, rows=1, cut="whole")
    pool = Elementwise(name="pool", fused=moves, unfused=moves, cut="whole", rows=1, saves=(kept,))
    logits = matmul("classifier", Width(channels), Width(num_labels), bias=True, rows=1)
    return Block(
        kind="head",
        operations=(pool, logits, cross_entropy(num_labels, rows=1)),
        parameters=linear("classifier.1", Width(channels), Width(num_labels), bias=True),
        input_elements=elements,
        output_elements=0,
        rows=1,
    )
