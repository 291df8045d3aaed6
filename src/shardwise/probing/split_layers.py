"""Measure how much longer a model takes with layers that are cut over ranks than with plain ones of the same size.

Around such a layer there is an autograd function of its own, and more Python; an embedding and a loss that are cut over
words mask those of other ranks. Nothing is sent here: the group has one rank.

    plain    |norm| |linear| |attention| |linear| ...
    cut      |norm| |-linear-| |attention| |-linear-| ...

The same layer takes longer among others than by itself, where all of its Python stays in the caches: 0.43 ms instead of
0.21 forward and backward (Xeon at 2.5 GHz). So whole passes are compared, of the two models in turn.
"""

from collections.abc import Callable
from dataclasses import replace
from statistics import median

import torch
from torch import nn

from shardwise.cluster.kernel import FREE, Kernel
from shardwise.cost.processor import num_cut_calls
from shardwise.model.share import Share
from shardwise.nets.settings import Heads, Mlp, Settings
from shardwise.nets.transformer import Transformer
from shardwise.probing.whole_steps import blocks_of, settings_of, timed_pass
from shardwise.ranks.collectives import Group
from shardwise.sharding.tensor.linear import ColumnParallelLinear, ColumnSet, RowParallelLinear
from shardwise.sharding.tensor.vocabulary import VocabularyHead, share_embedding

#: Passes of each model, and the rows and the width of what they compute: a rank's half of it.
PASSES, _ROWS, _WIDTH, _RANKS = 10, 2, 128, 2


def measure_split_layers(meet: Callable[[], object]) -> Kernel:
    """Return the additional time of a call. Every rank calls this."""
    settings = _half_of(settings_of(_WIDTH))
    plain, cut = Transformer(settings), cut_alone(Transformer(settings))
    tokens = torch.randint(settings.vocabulary, (_ROWS, settings.length))
    forward, backward = list[float](), list[float]()
    for _ in range(PASSES + 1):
        taken = []
        for model in (plain, cut):
            model.zero_grad(set_to_none=False)
            meet()
            taken.append(timed_pass(model, tokens))
        forward.append(taken[1].forward - taken[0].forward)
        backward.append(taken[1].backward - taken[0].backward)
    share = Share(sequence=settings.length, microbatch=_ROWS, width=4, tp=_RANKS)
    calls = sum(int(num_cut_calls(operation, share)) for block in blocks_of(_WIDTH) for operation in block.operations)
    # Noise: nothing is quicker for being cut.
    more = [max(median(each[1:]), 0.0) / calls for each in (forward, backward)]
    return Kernel(kind="sharded", forward=FREE, backward=FREE, forward_call=more[0], backward_call=more[1])


def _half_of(whole: Settings) -> Settings:
    """Return the settings of a model as large as a rank's part of this one, whose norms and tokens are whole."""
    heads, mlp = whole.attention, whole.mlp
    assert isinstance(heads, Heads), "the small models have plain attention"
    assert isinstance(mlp, Mlp), "the small models have no experts"
    return replace(
        whole,
        vocabulary=whole.vocabulary // _RANKS,
        attention=replace(heads, num_heads=heads.num_heads // _RANKS, num_kv_heads=heads.num_kv_heads // _RANKS),
        mlp=replace(mlp, width=mlp.width // _RANKS),
    )


def cut_alone(model: Transformer) -> Transformer:
    """Put layers as tensor parallelism has them in the place of a model's own, in a group of one rank."""
    group = Group()

    def columns(parent: nn.Module, *names: str) -> None:
        together = ColumnSet(group)
        for name in names:
            made = ColumnParallelLinear(_weight(parent, name), None, together, is_transposed=False, rng=None)
            setattr(parent, name, made)

    def rows(parent: nn.Module, name: str) -> None:
        setattr(parent, name, RowParallelLinear(_weight(parent, name), None, group, is_transposed=False, rng=None))

    for block in model.layers:
        attention, mlp = block.get_submodule("attention"), block.get_submodule("mlp")
        columns(attention, "q_proj", "k_proj", "v_proj")
        rows(attention, "o_proj")
        columns(mlp, "gate_proj", "up_proj")
        rows(mlp, "down_proj")
    words = model.settings.vocabulary
    head = VocabularyHead(_weight(model, "head"), None, ColumnSet(group), is_transposed=False, rng=None)
    head.words = words
    setattr(model, "head", head)  # noqa: B010 - another class than the plain head's.
    share_embedding(model.embed, group, words)
    return model


def _weight(parent: nn.Module, name: str) -> nn.Parameter:
    weight = parent.get_submodule(name).weight
    assert isinstance(weight, nn.Parameter), "linear layers of the small models have a weight"
    return weight
