"""Test a user's own experts before they are sharded: can each rank compute its own?

A sharded expert gets one row for each choice, with a weight of one, beside the rows of other ranks, and the token's own
rank weights the output. The rank has its own experts alone, numbered from 0. So three things must hold:

    called as such     with tokens, the experts chosen for each and their weights; and nothing else reads their weights
    a weighted sum     of what each chosen expert makes of the token, whatever other tokens there are
    by themselves      an expert computes the same beside fewer others: it knows no index, no number of experts, no
                       weights of others

The last two are tried with numbers: a copy with random weights is run on a few tokens whole and in parts.
"""

import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shardwise.errors import some
from shardwise.sharding.expert.calls import Calls
from shardwise.sharding.expert.layers import ExpertLayer, Form, form_of
from shardwise.stages.split.module_copy import copied
from shardwise.stages.steady_draws import SteadyDraws, SteadyDropout
from shardwise.units import format_percent

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
#: Layers with more numbers than this are tried with fewer experts.
_MANY, _FEW_EXPERTS = 2**22, 4
#: The tokens of a trial. They come in two calls, as from two ranks.
_TOKENS = 12
_NO_SUM = (
    "what they make of a token is not the sum of what each expert chosen makes of it, times its weight (off by {})"
)
_NOT_BY_THEMSELVES = (
    "beside fewer others they make something else of a token (off by {}): an expert's number, how many there are, and"
    " weights of others are not those of one device"
)
#: Attributes in which a layer stores its index.
_PLACE = re.compile(r"(idx|index|layer_id|layer_number|number)$")


class Verdict(NamedTuple):
    """Why experts cannot be sharded, None if they can; and whether a choice of no expert adds nothing."""

    problem: str | None
    skips: bool


def why_tied(module: nn.Module, layers: Sequence[ExpertLayer]) -> dict[str, str]:
    """Return the layers that share a parameter with another module, each with the reason why it stays whole."""
    owners: dict[int, list[tuple[str, nn.Module]]] = {}
    for name, each in module.named_modules():
        for key, parameter in each.named_parameters(recurse=False):
            owners.setdefault(id(parameter), []).append((f"{name}.{key}", each))
    found = {}
    for layer in layers:
        inside = {id(each) for each in layer.experts.modules()}
        for each in layer.experts.parameters():
            others = [name for name, owner in owners[id(each)] if id(owner) not in inside]
            if others and not layer.is_ours:
                found[layer.name] = f"a parameter of theirs is also {others[0]}"
    return found


def try_all(layers: Sequence[ExpertLayer], calls: Mapping[str, Calls]) -> dict[str, Verdict]:
    """Return the verdict on each layer. Of layers that are alike, apart from their numbers, one is tried."""
    kinds: dict[Hashable, Verdict] = {}
    found = {}
    for each in layers:
        its_calls = calls.get(each.name, Calls())
        given = tuple((form_of(one), one[0].shape[-1]) if form_of(one) else None for one in its_calls.given)
        kind = (each.num_experts, given, tuple(_habits_of(each.experts)))
        if its_calls.read:
            why = f"something else in the module reads {some(its_calls.read)}, and a rank has a part of it"
            found[each.name] = Verdict(why, False)
            continue
        if kind not in kinds:
            kinds[kind] = _try(each, its_calls)
        found[each.name] = kinds[kind]
    return found


def _habits_of(experts: nn.Module) -> Iterator[Hashable]:
    """Yield what layers that are alike have in common: shapes, classes, settings and hooks. Buffers are never alike."""
    for name, each in experts.named_modules():
        yield name, type(each).__module__, type(each).__qualname__
        yield tuple((key, tuple(parameter.shape)) for key, parameter in each.named_parameters(recurse=False))
        for key, value in vars(each).items():
            if (
                key in ("_parameters", "_modules")
                or (isinstance(value, (dict, set)) and not value)
                or _PLACE.search(key)
            ):
                continue
            yield key, value if isinstance(value, (bool, int, float, str, type(None))) else id(value)


def _try(layer: ExpertLayer, calls: Calls) -> Verdict:
    """Return whether a rank can compute its own experts of a layer, from how it is called and from a trial."""
    forms = [form_of(given) for given in calls.given]
    if None in forms:
        return Verdict(
            "their forward is not called with tokens, the experts chosen for each as integers, and as many weights",
            False,
        )
    width = calls.given[0][0].shape[-1] if calls.given else None
    likely = [each for each in dict.fromkeys(forms) if each is not None]
    return _tried(layer, likely or [Form(), Form(has_list=False), Form(1, 1)], width)


def _tried(layer: ExpertLayer, forms: Sequence[Form], width: int | None) -> Verdict:
    """Try a layer in the first form and precision that it takes. If the width of a token is not known, every dim of
    the parameters is tried."""
    widths = [width] if width else dict.fromkeys(size for each in layer.experts.parameters() for size in each.shape[1:])
    problem: Exception | None = None
    for dtype, tolerance in _TOLERANCE.items():
        for form in forms:
            for each in widths:
                trial = _Trial(layer, dtype, form, each)
                try:
                    trial.whole(trial.spread)
                except Exception as error:
                    problem = problem or error
                    continue
                with SteadyDropout(), SteadyDraws():
                    return trial.verdict(tolerance)
    if any(each.is_meta for each in layer.experts.buffers()):
        return Verdict(None, True)  # They have no values to try.
    return Verdict(f"they cannot be tried by themselves ({problem})", True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choices:
    """Tokens, and the chosen experts of each with their weights, [tokens, chosen]."""

    tokens: Tensor
    chosen: Tensor
    weights: Tensor


class _Trial:
    """Copies of a layer, whole and in parts, with the same random weights."""

    def __init__(self, layer: ExpertLayer, dtype: torch.dtype, form: Form, width: int) -> None:
        numel = sum(each.numel() for each in layer.experts.parameters())
        self._count = layer.num_experts if numel <= _MANY else min(_FEW_EXPERTS, layer.num_experts)
        self._form, self._width, self._layer = form, width, layer
        generator = torch.Generator().manual_seed(0)
        home = next(layer.experts.parameters()).device
        self._home = torch.device("cpu") if home.type == "meta" else home
        self._numbers = {
            name: torch.randn((self._count, *each.shape[1:]), generator=generator, dtype=dtype)
            .mul_(each.shape[-1] ** -0.5)
            .to(self._home)
            for name, each in layer.experts.named_parameters()
        }
        self._whole = self._copy(0, self._count)
        middle = -(-self._count // 2)
        self._parts = [(0, self._whole)] if self._count == 1 else [
            (first, self._copy(first, last)) for first, last in pairwise((0, middle, self._count))
        ]  # fmt: skip
        self.tokens = torch.randn((_TOKENS, width), generator=generator, dtype=dtype).to(self._home)
        self.weights = 0.2 + torch.rand((_TOKENS, 2), generator=generator, dtype=dtype).to(self._home)
        places = torch.arange(_TOKENS, device=self._home)
        second = (places + 1 + places // self._count % max(1, self._count - 1)) % self._count
        self.spread = self._choices(torch.stack((places % self._count, second), 1))

    def _copy(self, first: int, last: int) -> nn.Module:
        memo: dict[int, nn.Parameter | Tensor] = {
            id(each): nn.Parameter(self._numbers[name][first:last].clone())
            for name, each in self._layer.experts.named_parameters()
        }
        for buffer in self._layer.experts.buffers():
            memo[id(buffer)] = buffer.detach().clone()
        made = copied(self._layer.experts, memo)
        setattr(made, "num_experts", last - first)  # noqa: B010 - a seam of theirs
        return made.train()

    def _choices(self, chosen: Tensor) -> _Choices:
        """Return calls with these experts chosen: one for each token, if there is no list of them."""
        num = min(2, self._count) if self._form.has_list else 1
        chosen = chosen[:, :num].contiguous()
        tokens, weights = self.tokens.clone().requires_grad_(), self.weights[:, :num].clone().requires_grad_()
        return _Choices(tokens=tokens, chosen=chosen, weights=weights)

    def verdict(self, tolerance: float) -> Verdict:
        """Compare the whole layer with its experts apart, and with its parts."""
        first = torch.zeros_like(self.spread.chosen[:, 0])
        second, last = first + min(1, self._count - 1), first + self._count - 1
        crowds = [self._choices(torch.stack(each, 1)) for each in ((first, second), (last, first))]
        for choices in (self.spread, *crowds):
            wanted = self._gradients(self.whole, choices, [self._whole])
            for parts, why in (([(0, self._whole)], _NO_SUM), (self._parts, _NOT_BY_THEMSELVES)):
                try:
                    far = _farthest(wanted, self._in_parts(parts, choices))
                except Exception as error:
                    return Verdict(f"with a part of them, or of the rows, their forward raises: {error}", False)
                if far > tolerance:
                    return Verdict(why.format(format_percent(min(far, 9.99))), False)
        left = self._left_otherwise()
        if left:
            return Verdict(f"their forward leaves something in {some(left)}, and with a part of the rows others", False)
        return Verdict(None, self._skips(tolerance))

    def _left_otherwise(self) -> list[str]:
        """Return the attributes and buffers in which a part leaves something else than the whole layer, in one call of
        each: a mean of weights, a count of tokens. A block may read them."""
        whole, choices = self._copy(0, self._count), self.spread
        parts = [(first, self._copy(first, first + len(next(part.parameters())))) for first, part in self._parts]
        before = _found_in(whole)
        with torch.no_grad():
            self._call(whole, choices.tokens, choices.chosen, choices.weights)
            self.apart(parts, choices)
        after, others = _found_in(whole), [_found_in(part) for _, part in parts]
        names = dict.fromkeys([*after, *(name for each in others for name in each)])
        written = [name for name in names if not _is_same(before.get(name), after.get(name))]
        written += [name for each in others for name in each if not _is_same(before.get(name), each[name])]
        return [
            name for name in dict.fromkeys(written) if not all(_is_same(after.get(name), o.get(name)) for o in others)
        ]

    def _skips(self, tolerance: float) -> bool:
        """Return whether choices outside of the experts add nothing, as those of routers that drop tokens."""
        odd = torch.arange(_TOKENS, device=self._home)[:, None] % 3 == 0
        for none in (-1, self._count):
            choices = self._choices(torch.where(odd, none, self.spread.chosen))
            try:
                wanted = self._gradients(self.whole, choices, [self._whole])
            except Exception:
                continue  # Then a router never chooses it.
            if _farthest(wanted, self._in_parts(self._parts, choices)) > tolerance:
                return False
        return True

    def _in_parts(self, parts: Sequence[tuple[int, nn.Module]], choices: _Choices) -> list[Tensor]:
        return self._gradients(partial(self.apart, parts), choices, [part for _, part in parts])

    def whole(self, choices: _Choices) -> Tensor:
        """Return the layer's output, of two calls with half of the tokens each."""
        made = []
        for some_of in torch.arange(_TOKENS, device=self._home).chunk(2):
            made.append(self._call(self._whole, *(each[some_of] for each in (
                choices.tokens, choices.chosen, choices.weights))))  # fmt: skip
        return torch.cat(made)

    def apart(self, parts: Sequence[tuple[int, nn.Module]], choices: _Choices) -> Tensor:
        """Return the weighted sum of what the parts make of their rows."""
        num = choices.chosen.shape[1]
        rows = choices.tokens.repeat_interleave(num, 0)
        flat, made = choices.chosen.flatten(), torch.zeros_like(rows)
        for place, (first, part) in enumerate(parts):
            last = self._count if place + 1 == len(parts) else parts[place + 1][0]
            here = torch.where((flat >= first) & (flat < last))[0]
            if len(here):
                mine = (flat[here] - first)[:, None]
                out = self._call(part, rows[here], mine, rows.new_ones(mine.shape))
                made = made.index_add(0, here, out)
        return (made.view(_TOKENS, num, -1) * choices.weights[..., None]).sum(1)

    def _call(self, experts: nn.Module, *rows: Tensor) -> Tensor:
        made: Tensor = experts(*self._form.shaped(*rows))
        assert made.shape[-1] == self._width, f"a token has {self._width} numbers, and its output {made.shape[-1]}"
        return made.view(rows[0].shape)

    def _gradients(
        self, call: Callable[[_Choices], Tensor], choices: _Choices, modules: Sequence[nn.Module]
    ) -> list[Tensor]:
        """Return the output, and the gradients of tokens, weights and each parameter of all experts together."""
        leaves = [each for module in modules for each in module.parameters()]
        with torch.enable_grad():
            made = call(choices)
            slope = torch.linspace(-1, 1, made.numel(), dtype=made.dtype, device=made.device).view_as(made)
            tokens, weights, *found = torch.autograd.grad(
                (made * slope).sum(), [choices.tokens, choices.weights, *leaves],
                allow_unused=True, materialize_grads=True,
            )  # fmt: skip
        num = len(leaves) // len(modules)
        return [made.detach(), tokens, weights, *(torch.cat(found[key::num]) for key in range(num))]


def _found_in(experts: nn.Module) -> dict[str, object]:
    """Return copies of the tensors and numbers in attributes and buffers, by name."""
    found: dict[str, object] = {}
    for path, each in experts.named_modules():
        for key, value in (*vars(each).items(), *each.named_buffers(recurse=False)):
            name = f"{path}.{key}" if path else key
            if isinstance(value, Tensor):
                found[name] = value.detach().clone()
            elif isinstance(value, (bool, int, float)) and key != "num_experts":
                found[name] = value
    return found


def _is_same(one: object, other: object) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        same = one.shape == other.shape and one.dtype == other.dtype
        return same and (one.is_meta or torch.allclose(one.double(), other.double(), equal_nan=True))
    return type(one) is type(other) and one == other


def _farthest(wanted: Sequence[Tensor], made: Sequence[Tensor]) -> float:
    """Return the largest difference, relative to the largest number of each tensor."""
    pairs = zip(wanted, made, strict=True)
    return max(float((one - other).abs().max() / one.abs().max().clamp_min(1e-12)) for one, other in pairs)
