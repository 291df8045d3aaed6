"""The mixer of Mamba 2: one projection in, short convolution and scan, gated norm, one projection out."""

from collections.abc import Iterator

from shardwise.model.assembly.part import Part, kept_input, linear, matmul
from shardwise.model.model import Cache, Parameter
from shardwise.model.operations import Norm, Operation, Saved, Scan, Width
from shardwise.model.shape import MambaShape, NormShape


def mamba(shape: MambaShape, hidden: int, norm: NormShape) -> Part:
    """Return the part from the normalised input to the residual. Decoding keeps a state of constant size."""
    values = shape.heads * shape.head_dim
    convolved = values + 2 * shape.groups * shape.state
    state = values * shape.state + convolved * (shape.convolution - 1)
    return Part(
        operations=tuple(_operations(shape, hidden, norm)),
        parameters=tuple(_parameters(shape, hidden)),
        cache=Cache(elements=0, state_elements=state),
        reduces=True,
    )


def _projected(shape: MambaShape) -> tuple[Width, ...]:
    """Gate, values, the state's two projections, and a step of each head."""
    heads, groups = Width(shape.heads, shape.head_dim), Width(shape.groups, shape.state)
    return heads, heads, groups, groups, Width(shape.heads)


def _operations(shape: MambaShape, hidden: int, norm: NormShape) -> Iterator[Operation]:
    heads = Width(shape.heads, shape.head_dim)
    projected = _projected(shape)
    num_projected = sum(width.elements for width in projected)
    yield matmul("in", Width(hidden), projected, sharding="column", bias=shape.bias)
    # The fused scan keeps what was projected and what it gives, and makes its convolution and its states again.
    yield Scan(
        name="scan",
        heads=shape.heads,
        head_dim=shape.head_dim,
        groups=shape.groups,
        state=shape.state,
        convolution=shape.convolution,
        chunk=shape.chunk,
        saves=(Saved(name="projected", elements=num_projected, cut="tp"),),
    )
    output = Saved(name="scanned", elements=heads.elements, cut="tp", dropped_by=("norm",))
    yield Norm(
        name="gated_norm",
        kind="rms",
        elements=heads.elements,
        cut="tp",
        saves=(*kept_input(heads.elements, norm, cut="tp"), output),
        rerun_by=("norm",),
    )
    yield matmul("out", heads, Width(hidden), sharding="row", bias=shape.bias)


def _parameters(shape: MambaShape, hidden: int) -> Iterator[Parameter]:
    names = shape.names
    heads, groups = Width(shape.heads, shape.head_dim), Width(shape.groups, shape.state)
    convolved = (heads, groups, groups)
    channels = sum(width.elements for width in convolved)
    for scalar in ("dt_bias", "A_log", "D"):
        yield Parameter(name=names[scalar], shape=(shape.heads,), role="other", tp_dim=0)
    yield Parameter(
        name=f"{names['convolution']}.weight", shape=(channels, 1, shape.convolution), tp_dim=0, pieces=convolved
    )
    if shape.convolution_bias:
        yield Parameter(name=f"{names['convolution']}.bias", shape=(channels,), role="bias", tp_dim=0, pieces=convolved)
    yield from linear(names["in"], Width(hidden), _projected(shape), sharding="column", bias=shape.bias)
    yield Parameter(name=f"{names['norm']}.weight", shape=(heads.elements,), role="norm", tp_dim=0, pieces=(heads,))
    yield from linear(names["out"], heads, Width(hidden), sharding="row", bias=shape.bias)
