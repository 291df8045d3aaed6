"""Cut a module for tensor parallelism, in place: each rank keeps its piece of every layer with separable channels.

1. `tensor_plan.py`: the request of the user, or of the model's own plan. `plain_layers.py`: layers that stay whole
   because of hooks, forwards or parameters of their own.
2. `channel_groups.py` (over `channel_rules.py`): one run on the meta device shows which channels stay independent.
3. `regions.py`: from that, which layers are cut, and which channels each rank gets.
4. `trial.py`: a copy is cut and run first, on the meta device and then with random weights (`stand_in.py`,
   `numbers.py`). Layers that compute something else in parts are left whole.
5. `cut_layers.py`: layers become `ColumnParallelLinear`, `RowParallelLinear` (`linear.py`) and parts of a vocabulary
   (`vocabulary.py`); stored head counts are corrected. `communication.py` has their communication.
6. `sequence.py`, on request: the operations between the regions are sharded along the sequence.
7. `sharding.py`: the resulting shards of each parameter.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwise.errors import ShardwiseError
from shardwise.ranks.collectives import Group
from shardwise.ranks.mesh import Mesh
from shardwise.sharding.tensor.channel_groups import ChannelTrace, trace
from shardwise.sharding.tensor.plain_layers import has_hooks, is_layer, why_whole
from shardwise.sharding.tensor.regions import Found, find_regions
from shardwise.sharding.tensor.sharding import Sharding, Shards, cost_of, starred
from shardwise.sharding.tensor.tensor_plan import TensorPlan, read_tensor_plan
from shardwise.sharding.tensor.trial import Arguments, ByFirst, Trial, in_evaluation_mode, settle
from shardwise.stages.batch import home_of
from shardwise.stages.split.arguments import Signature
from shardwise.stages.split.meta import Guesses, meta_twin
from shardwise.stages.split.python_state import PythonState, leaves_classes, left_as_it_was, remembers_draws
from shardwise.stages.stage import Batch, Loss
from shardwise.torch_private import EagerDispatchMode, pytree

#: Why a layer stays whole if its weight is also used outside of it.
READ_OUTSIDE = "its weight is read outside of it, too"
_NAMED = "it is named whole"


@leaves_classes
def shard(
    module: nn.Module,
    over: Mesh | Group,
    spec: Mapping[str, str] | None = None,
    *,
    sequence: bool = False,
    example: Batch | None = None,
    num_chunks: int | None = None,
    loss: Loss | None = None,
    verify: bool = True,
    by_first: ByFirst | None = None,
) -> Sharding:
    """Cut a module over the ranks of a group, in place. All of its ranks must call this with the same module.

    `spec` maps layer names to kinds (see `tensor_plan.py`). Without it the model's own plan is followed, or the result
    of one run on `example`. `sequence`: norms, dropout and residuals are sharded along the sequence. Communication is
    split into `num_chunks`, or by its size if None, and overlaps with computation. `loss`, if given, is searched for
    parameters that it reads itself. Unless `verify` is False, a copy is cut first and compared with the whole in a
    small forward and backward. Layers that differ are left whole, with a warning. With `by_first`, one rank runs that
    trial for all.
    """
    if num_chunks is not None and num_chunks < 1:
        raise ShardwiseError(
            f"tensor_chunks={num_chunks}: what a layer sends is one chunk or more",
            remedy="tensor_chunks=1, or none, for as many as pay",
        )
    group = over.group("tp") if isinstance(over, Mesh) else over
    twin = meta_twin(module)
    names = dict.fromkeys(name for name, _ in module.named_parameters(remove_duplicate=False))
    if group.size == 1:
        shapes = {name: Shards(shape=tuple(module.get_parameter(name).shape)) for name in names}
        return Sharding(group=group, shards=shapes, twin=twin)
    plan = read_tensor_plan(module, spec)
    given = _example(twin, example)
    trial = _settled(
        module, twin, group.size, plan, given, sequence=sequence, num_chunks=num_chunks, loss=loss, verify=verify,
        by_first=by_first,
    )  # fmt: skip
    cutter = trial.cut(module, group)
    sharding = Sharding(
        group=group,
        shards=cutter.shards(),
        whole=trial.found.whole,
        notes=tuple(cutter.notes),
        cut=cutter.cut,
        twin=twin,
        unverified=trial.unverified,
        is_along_sequence=trial.sequence,
        draws=trial.draws,
        find_fault=partial(_find_fault, made=replace(trial, module=twin)) if verify and not trial.unverified else None,
    )
    if group.rank == 0:
        _warn(sharding, trial.found, plan)
        if trial.unverified and (trial.found.regions or trial.found.heads or trial.found.experts):
            warnings.warn(
                f"tp={group.size}: what is cut was not compared with the whole module ({trial.unverified}), so whether"
                " it computes the same is not known; verify=False says that it is meant",
                stacklevel=3,
            )
        if trial.unshared:
            warnings.warn(
                f"sp=true shares out nothing, since {trial.unshared}. What lies between the layers that are cut is"
                " whole on every rank; sp=false says that it is meant",
                stacklevel=3,
            )
    return sharding


def _settled(
    module: nn.Module, twin: nn.Module, num_ranks: int, plan: TensorPlan, given: Batch, *, sequence: bool = False,
    num_chunks: int | None = None, loss: Loss | None = None, verify: bool = True, by_first: ByFirst | None = None,
) -> Trial:  # fmt: skip
    """Return a trial whose cut computes the same as the whole module: layers at fault have been left whole."""
    kept = PythonState(module)  # Copies share what hooks hold: a list for a log, a count.
    arguments = _on_meta(twin, given)
    hooked = {name for name, each in module.named_parameters(remove_duplicate=False) if has_hooks(each)}

    def read_by_loss(output: Any) -> dict[str, str]:
        return {} if loss is None else _read_by_loss(loss, module, output, given)

    found, seen = find(
        twin, plan, num_ranks, arguments, uncut=_uncut(module, plan), hooked=hooked, read_by_loss=read_by_loss
    )
    if plan.is_users:
        _check_named(plan, found)
    trial = Trial(
        module=module, twin=twin, found=found, seen=seen, num_ranks=num_ranks, example=given, on_meta=arguments,
        device=home_of(given), loss=loss, sequence=sequence, num_chunks=num_chunks, draws=remembers_draws(module),
        named=frozenset(name for name, kind in plan.kinds.items() if kind != "whole") if plan.is_users else frozenset(),
    )  # fmt: skip
    settle(trial, verify=verify, by_first=by_first)
    kept.restore()
    return trial


@leaves_classes
def _find_fault(module: nn.Module, batch: Batch, *, made: Trial) -> str:
    """Return why a cut that was made does not give in evaluation mode what the whole module gives; "" if it does."""
    kept, twin = PythonState(module), meta_twin(module)
    trial = replace(
        made, module=module, twin=twin, example=batch, on_meta=_on_meta(twin, batch), device=home_of(batch), loss=None,
        evaluates=True, around=lambda _: nullcontext(),
    )  # fmt: skip
    with in_evaluation_mode(module, twin):
        found = trial.fault(verify=True)
    kept.restore()
    return "" if found is None else found[1]


class Apart(NamedTuple):
    """The layers of a module that would be cut, those that were called, and which are cut together; and why nothing is
    sharded along the sequence, if that was requested."""

    layers: frozenset[str] = frozenset()
    called: frozenset[str] = frozenset()
    together: tuple[frozenset[str], ...] = ()
    unshared: str = ""

    def mixed_in(self, now: "Apart") -> list[str]:
        """Return the layers that would not be cut this way in another run: their channels mix there, or reach a layer
        that is whole."""
        without = {name for each in now.together if not each <= self.layers for name in each}
        return sorted(self.layers & now.called & (without | (self.layers - now.layers)))


@leaves_classes
def find_apart(
    module: nn.Module, num_ranks: int, spec: Mapping[str, str] | None = None, *, sequence: bool = False, example: Batch,
    loss: Loss | None = None,
) -> Apart:  # fmt: skip
    """Return the layers that would be cut over this many ranks. Parameters may be on the meta device."""
    plan = read_tensor_plan(module, spec)
    trial = _settled(module, meta_twin(module), num_ranks, plan, example, sequence=sequence, loss=loss)
    together = tuple(frozenset((*each.columns, *each.rows)) for each in trial.found.regions)
    return Apart(frozenset(trial.cut_layers()), frozenset(trial.seen.given), together, trial.unshared)


@leaves_classes
def check_divisible(module: nn.Module, num_ranks: int, example: Batch) -> None:
    """Refuse layers that have fewer pieces than ranks, before there are ranks. Parameters may be on the meta device."""
    plan, twin = read_tensor_plan(module, None), meta_twin(module)
    arguments = _on_meta(twin, example)
    find(twin, plan, num_ranks, arguments, uncut=_uncut(module, plan), hooked=(), read_by_loss=lambda _: {})


def find(
    twin: nn.Module, plan: TensorPlan, num_ranks: int, arguments: Arguments, *, uncut: Mapping[str, str],
    hooked: Collection[str], read_by_loss: Callable[[Any], Mapping[str, str]],
) -> tuple[Found, ChannelTrace]:  # fmt: skip
    """Find what to cut in a module on the meta device. Return it with the run that showed it.

    `uncut` maps layers that stay whole in any case to the reason. `hooked` are parameters with gradient hooks.
    `read_by_loss` returns, for the module's output, the layers whose weights the loss reads, and the reason.
    """
    reasons = dict(uncut)
    while True:
        layers = {
            name: each for name, each in twin.named_modules() if name not in reasons and _may_be_cut(name, each, plan)
        }
        seen = trace(twin, layers, *arguments)
        # Layers whose weights are read elsewhere: by a second head, a penalty, a product with all words.
        read = {**read_by_loss(seen.output), **dict.fromkeys(seen.used_outside, READ_OUTSIDE)}
        if read.keys().isdisjoint(layers):
            break
        reasons |= read

    def again(labelled: Mapping[str, int]) -> ChannelTrace:
        return trace(twin, layers, *arguments, labelled=labelled)

    rows = [name for name, kind in plan.kinds.items() if kind == "row"] if plan.only else None
    said = [name for name, kind in plan.kinds.items() if kind == "vocabulary"]
    heads = [name for name in said if isinstance(layers.get(name), nn.Linear)]
    words = {each.num_embeddings for each in twin.modules() if isinstance(each, nn.Embedding)}
    found = find_regions(seen, again, num_ranks, rows=rows, heads=heads, vocabularies=words)
    found.experts = list(plan.experts)
    found.whole |= reasons
    found.kept |= reasons.keys()
    for region in [each for each in found.regions if not each.cut_inside.keys().isdisjoint(hooked)]:
        found.regions.remove(region)
        held = ", ".join(name for name in region.cut_inside if name in hooked)
        found.whole |= dict.fromkeys((*region.columns, *region.rows), f"{held} has a gradient hook")
        found.kept |= {*region.columns, *region.rows}
    return found, seen


def _may_be_cut(name: str, module: nn.Module, plan: TensorPlan) -> bool:
    if not is_layer(module) or _is_named_whole(name, plan):
        return False
    return not plan.only or name in plan.kinds or (not plan.is_users and isinstance(module, nn.Embedding))


def _is_named_whole(name: str, plan: TensorPlan) -> bool:
    wholes = [each for each, kind in plan.kinds.items() if kind == "whole"]
    return any(name == each or name.startswith(f"{each}.") for each in wholes)


def _uncut(module: nn.Module, plan: TensorPlan) -> dict[str, str]:
    """Return layers that stay whole by their own form or by name, and those tied to them; each with the reason."""
    layers = {name: each for name, each in module.named_modules() if is_layer(each)}
    found = {name: why for name, each in layers.items() if (why := why_whole(each)) is not None}
    found |= {name: _NAMED for name in layers if _is_named_whole(name, plan)}
    return _with_ties(layers, found)


def _with_ties(layers: Mapping[str, nn.Module], found: dict[str, str]) -> dict[str, str]:
    """Add the layers that share a weight with one that stays whole."""
    owners = {id(each): name for name in found for each in layers[name].parameters()}
    for name, layer in layers.items():
        for each in layer.parameters(recurse=False):
            if id(each) in owners and name not in found:
                found[name] = f"its weight is that of {owners[id(each)]}, which stays whole: {found[owners[id(each)]]}"
    return found


class _Reads(EagerDispatchMode):  # type: ignore[no-untyped-call]
    """Records which of the given tensors are read."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = names
        self.read: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        for each in pytree.tree_leaves((args, kwargs or {})):
            if id(each) in self._names:
                self.read.add(self._names[id(each)])
        return func(*args, **(kwargs or {}))


def _read_by_loss(loss: Loss, module: nn.Module, output: Any, batch: Batch) -> dict[str, str]:
    """Return layers whose parameters the loss itself reads: for a penalty, or a second product with the same matrix."""
    layers = {name: each for name, each in module.named_modules() if is_layer(each)}
    owners = {id(each): name for name, layer in layers.items() for each in layer.parameters(recurse=False)}
    reads = _Reads(owners)
    try:
        with left_as_it_was(loss), torch.no_grad(), Guesses(), reads:
            loss(output, _meta(copy(batch)))
    except Exception:
        pass
    return _with_ties(layers, dict.fromkeys(reads.read, "the loss reads its weight"))


def _example(twin: nn.Module, example: Batch | None) -> Batch:
    """Return the example, or make one for a Hugging Face model."""
    if example is not None:
        return example
    config = getattr(twin, "config", None)
    if config is None or not hasattr(config, "vocab_size"):
        raise ShardwiseError(
            f"without an example there is no way to see what of {type(twin).__name__} can be cut",
            remedy="shard(module, group, example={...}), with one microbatch",
        )
    tokens = (torch.arange(8) * 7 % config.vocab_size).view(2, 4)
    made = {"input_ids": tokens}
    return {**made, "decoder_input_ids": tokens} if getattr(config, "is_encoder_decoder", False) else made


def _on_meta(twin: nn.Module, example: Batch) -> Arguments:
    """Return the module's arguments from an example, on the meta device."""
    arguments: Arguments = _meta(Signature(twin).arguments(example))
    return arguments


def _meta(tree: Any) -> Any:
    return pytree.tree_map(lambda each: each.detach().to("meta") if isinstance(each, Tensor) else each, tree)


def _check_named(plan: TensorPlan, found: Found) -> None:
    """Refuse a plan of the user's if a layer that it names cannot be cut as requested, and say why."""
    columns = {name for region in found.regions for name in region.columns}
    rows = {name for region in found.regions for name in region.rows}
    done = {"column": columns, "row": rows, "vocabulary": set(found.heads), "whole": set(plan.kinds)}
    for name, kind in plan.kinds.items():
        if name not in done[kind] and kind != "vocabulary":
            why = found.whole.get(name, f"it is a {'row' if kind == 'column' else 'column'} of what is found")
            raise ShardwiseError(f"{name} cannot be a {kind}: {why}", remedy=f'tensor={{"{name}": "whole"}}')


def _warn(sharding: Sharding, found: Found, plan: TensorPlan) -> None:
    """Warn of layers that could not be cut: once for each reason, with the cost of all its layers."""
    words = {sharding.twin.get_submodule(name).out_features for name in found.heads}
    reasons: dict[str, list[str]] = {}
    for name in sorted(found.kept):
        layer = sharding.twin.get_submodule(name)
        # An embedding is cut only if an output head has as many words.
        counts = not isinstance(layer, nn.Embedding) or layer.num_embeddings in words
        if counts and not _is_named_whole(name, plan):
            reasons.setdefault(starred(found.whole[name]), []).append(name)
    for names in reasons.values():
        together = Counter(map(starred, names))
        kinds = list(dict.fromkeys(starred(name) if together[starred(name)] > 1 else name for name in names))
        line = ", ".join(f'"{kind}": "whole"' for kind in kinds)
        warnings.warn(
            f"tp={sharding.group.size}: {', '.join(kinds)} whole on every rank, since {found.whole[names[0]]}. This is"
            f" {cost_of(sharding.twin, names, sharding.group.size)}; tensor={{{line}}} says that it is meant",
            stacklevel=3,
        )
