"""The plan: how a model is distributed over ranks, as a value.

    dp=2,tp=4,pp=2,schedule=zb-v,microbatches=8,zero=1          the short form: keys that differ from one plain device
    pp=3,layers=5+6+5,recompute=full,offload.optimizer=0.5      units of each stage; half of the optimizer on the host
    pp=16,layers=7+14x8+7                                       fourteen stages of eight

`plan.toml` has the same keys, with the reason for each in the table `reasons`. A plan is checked for consistency when
it is made. Whether it suits a model or a cluster is checked where these are known.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from itertools import groupby
from numbers import Integral
from pathlib import Path
from typing import Any, Literal

from shardwise.errors import ShardwiseError, nearest, unknown
from shardwise.output import save_output
from shardwise.schedule.catalogue import CATALOGUE, check
from shardwise.units import counted

AXES = ("dp", "tp", "pp", "cp", "ep")
#: Axes whose product is the number of ranks. Experts are spread over the ranks of data and context.
_MULTIPLY = ("dp", "tp", "pp", "cp")
RECOMPUTE = ("none", "selective", "full")
CONTEXT = ("ring", "all-to-all")
#: Order of the axes on the devices, outermost first. Ranks of the innermost axis communicate most.
ORDERS = ("pp-dp-cp-tp", "dp-pp-cp-tp")
#: The granularity of scales of linear layers in 8 bits.
FP8_SCALES: Mapping[str, Literal["tensor", "row"]] = {"fp8": "tensor", "fp8-rows": "row"}
PRECISIONS = ("fp32", "bf16", "fp16", *FP8_SCALES)
# At least this many equal stages in a row are written in the form `4x8`.
_LONG_RUN = 4
_MOST_STAGES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """The share of each kind of data on the host: 0 is none, 1 is all."""

    optimizer: float = 0.0
    parameters: float = 0.0
    activations: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a model is distributed over ranks, and how a step runs.

    The number of ranks is the product of data, tensor, pipeline and context parallelism. Experts are spread over `ep`
    of the ranks with the same dense weights, so `ep` divides dp x cp and adds no ranks. With `sp`, activations between
    tensor parallel layers are cut along the sequence. `context` is how context parallel attention communicates.
    `chunks` is the number of stages on a rank (None: the schedule's own). `layers` are the units of each stage, first
    to last (None: balanced). `zero` is the ZeRO stage, in groups of `zero_group` replicas (None: all). `recompute`
    applies to `recompute_layers` of each stage (None: all). `order` is the order of the axes on the devices.
    `reasons` give the reason for a key's value; they do not count when plans are compared.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    sp: bool = False
    context: str = "ring"
    chunks: int | None = None
    schedule: str = "1f1b"
    microbatches: int = 1
    layers: tuple[int, ...] | None = None
    zero: int = 0
    zero_group: int | None = None
    recompute: str = "none"
    recompute_layers: int | None = None
    offload: Offload = field(default_factory=Offload)
    precision: str = "fp32"
    order: str = "pp-dp-cp-tp"
    reasons: Mapping[str, str] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        _check(self)

    @staticmethod
    def parse(text: str) -> "Plan":
        """Read the short form, or the file of this name."""
        return Plan.load(Path(text)) if text.endswith(".toml") else _make(_split(text), reasons={})

    def __str__(self) -> str:
        changed = {key: value for key, value in _entries(self).items() if value != _DEFAULTS[key]}
        return ",".join(f"{key}={_word(value)}" for key, value in changed.items()) or f"dp={self.dp}"

    @staticmethod
    def from_toml(text: str, *, source: str = "the plan") -> "Plan":
        """Read the file form. `source` is its name in error messages."""
        import tomllib  # Importing it takes longer than parsing a short form.

        try:
            tree = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ShardwiseError(f"{source} is not TOML: {error}", remedy='lines like: schedule = "zb-v"') from None
        reasons = _table(tree.pop("reasons", {}), "reasons")
        offload = _table(tree.pop("offload", {}), "offload")
        return _make({**tree, **{f"offload.{key}": value for key, value in offload.items()}}, reasons=reasons)

    def to_toml(self) -> str:
        """Return the file form, which `from_toml` reads back: every key with a reason or a non-default value."""
        lines = [f"# {self}: {counted(self.num_ranks, 'rank')}"]
        for key, value in _entries(self).items():
            if value is not None and (value != _DEFAULTS[key] or key in self.reasons):
                lines.append(f"{key} = {_toml_value(value)}")
        if self.reasons:
            lines += ["", "[reasons]", *(f"{_quoted(key)} = {_quoted(why)}" for key, why in self.reasons.items())]
        return "\n".join(lines) + "\n"

    @staticmethod
    def load(path: Path) -> "Plan":
        """Read a plan from a file."""
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
            raise ShardwiseError(
                f"the plan file {path} cannot be read: {why}", remedy="a short form like pp=2,microbatches=8"
            ) from None
        return Plan.from_toml(text, source=path.name)

    def save(self, path: Path | str) -> None:
        """Write the plan to a file, which `load` reads back."""
        save_output(Path(path), self.to_toml(), remedy="plan.toml")

    def explain(self) -> str:
        """Return the plan, and a line with the reason for each choice that has one."""
        width = max((len(key) for key in self.reasons), default=0)
        return "\n".join([str(self), *(f"  {key.ljust(width)}  {why}" for key, why in self.reasons.items())])

    @property
    def num_ranks(self) -> int:
        """The product of the axes, without `ep`."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def fp8_scales(self) -> Literal["tensor", "row"] | None:
        """The granularity of scales of linear layers in 8 bits; None if there are no such layers."""
        return FP8_SCALES.get(self.precision)

    @property
    def num_chunks(self) -> int | None:
        """Number of stages on one rank, or None if the schedule is `auto`, without `chunks`."""
        return self.chunks or (CATALOGUE[self.schedule].chunks if self.schedule in CATALOGUE else None)

    @property
    def num_stages(self) -> int | None:
        """Number of stages of the model; of one copy, if a schedule has two. None if `num_chunks` is None."""
        if self.num_chunks is None:
            return None
        copies = CATALOGUE[self.schedule].num_weight_copies if self.schedule in CATALOGUE else 1
        return self.pp * self.num_chunks // copies

    def check_world(self, num_processes: int) -> None:
        """Raise an error if the number of processes is not that of the plan's ranks."""
        if num_processes != self.num_ranks:
            ranks = counted(self.num_ranks, "rank")
            raise ShardwiseError(
                f"plan {self._axes_text()} needs {ranks} but there "
                f"{'is' if num_processes == 1 else 'are'} {num_processes}",
                remedy=f"{ranks}, or a plan whose dp, tp, pp and cp multiply to {num_processes}",
            )

    def _axes_text(self) -> str:
        shown = [f"{axis}={getattr(self, axis)}" for axis in AXES if getattr(self, axis) != 1]
        return ",".join(shown) or "dp=1"


def read_keys(text: str) -> dict[str, Any]:
    """Return the keys of a short form with their values, without making a plan: other keys stay open."""
    return {key: _read(key, value) for key, value in _split(text).items()}


def _split(text: str) -> dict[str, str]:
    """Return keys and values as they were typed."""
    entries: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (word.strip() for word in part.partition("="))
        if equals and re.search(r"\s\S+=", value):
            raise ShardwiseError(
                f"'{part}' in the plan has a space between two keys", remedy=",".join(text.replace(",", " ").split())
            )
        if not equals:
            raise ShardwiseError(
                f"'{part}' in the plan '{text}' has no value", remedy=f"{nearest(key, _READERS) or 'pp'}=2"
            )
        if key in entries:
            raise ShardwiseError(
                f"the plan '{text}' says {key} twice: {entries[key]} and {value}", remedy=f"{key}={value}"
            )
        entries[key] = value
    return entries


def _read(key: str, value: Any) -> Any:
    if key in OF_PARALLELIZE:
        raise ShardwiseError(
            f"{key} is no key of a plan, but an argument of sw.parallelize",
            remedy=f"sw.parallelize(module, plan, {key}={value}, ...)",
        )
    if key not in _READERS:
        raise unknown("plan key", key, _READERS)
    return _READERS[key](key, value)


def _entries(plan: Plan) -> dict[str, Any]:
    """Return the plan as keys and values of the short form, in the order of the fields."""
    entries: dict[str, Any] = {}
    for each in fields(plan):
        if each.name == "offload":
            entries |= {f"offload.{part.name}": getattr(plan.offload, part.name) for part in fields(Offload)}
        elif each.name != "reasons":
            entries[each.name] = getattr(plan, each.name)
    return entries


def _word(value: Any) -> str:
    if isinstance(value, tuple):
        return "+".join(_runs(value))
    if isinstance(value, str):
        return value
    return repr(value).removesuffix(".0").lower()


def _runs(layers: tuple[int, ...]) -> Iterator[str]:
    """Yield the parts of `3+4+4+3`, with `14x4` for fourteen consecutive stages of four."""
    for units, run in groupby(layers):
        count = len(list(run))
        yield from [f"{count}x{units}"] if count >= _LONG_RUN else [str(units)] * count


def _toml_value(value: Any) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(map(str, value)) + "]"
    return _quoted(value) if isinstance(value, str) else _word(value)


def _quoted(text: str) -> str:
    """Return a TOML basic string. JSON's escapes are valid in TOML, except for those beyond 16 bits and DEL."""
    import json

    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _table(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ShardwiseError(f"{name} = {value!r} in the plan is not a table", remedy=f"[{name}]")
    return value


def _make(entries: Mapping[str, Any], *, reasons: Mapping[str, str]) -> Plan:
    """Make a plan from keys and values that were typed."""
    read = {key: _read(key, value) for key, value in entries.items()}
    offload = {key.removeprefix("offload."): read.pop(key) for key in list(read) if key.startswith("offload.")}
    return Plan(**read, offload=Offload(**offload), reasons=reasons)


def _read_count(key: str, value: Any) -> int:
    if isinstance(value, str) and value.removeprefix("-").isdecimal():
        return int(value)
    if not isinstance(value, bool) and isinstance(value, Integral):
        return int(value)
    raise ShardwiseError(f"{key}={value} in the plan wants a whole number", remedy=f"{key}={_EXAMPLES.get(key, 2)}")


def _read_fraction(key: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ShardwiseError(f"{key}={value} in the plan wants a number from 0 to 1", remedy=f"{key}=0.5") from None


def _read_switch(key: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if value not in ("true", "false"):
        raise ShardwiseError(f"{key}={value} in the plan wants true or false", remedy=f"{key}=true")
    return bool(value == "true")


def _read_layers(key: str, value: Any) -> tuple[int, ...]:
    parts = value.split("+") if isinstance(value, str) else value
    if not isinstance(parts, list):
        raise ShardwiseError(
            f"{key}={value} in the plan wants the units of each stage", remedy=f"{key}=4+4, or in a file {key} = [4, 4]"
        )
    return tuple(units for part in parts for units in _read_run(key, part))


def _read_run(key: str, part: Any) -> tuple[int, ...]:
    """Return the units of one stage, or of several consecutive ones: `14x4`."""
    count, times, units = str(part).partition("x")
    if not times:
        return (_read_count(key, part),)
    number = _read_count(key, count.strip())
    if number > _MOST_STAGES:
        raise ShardwiseError(
            f"{key}={part} in the plan is a row of {number} stages, and {_MOST_STAGES} are many", remedy=f"{key}=14x4"
        )
    return (_read_count(key, units.strip()),) * number


def _read_word(key: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ShardwiseError(f"{key}={value} in the plan wants a word", remedy=f'{key} = "{_DEFAULTS[key]}"')
    return value


#: Arguments of `parallelize` that are not keys of a plan.
OF_PARALLELIZE = (
    "loss", "optimizer", "example", "clip", "compile", "seed", "pad", "through_blocks", "measure", "tensor",
    "tensor_chunks", "verify", "positions", "entries", "masks", "bucket_bytes", "buffers", "batch", "kernels",
    "masters", "graphs", "wires",
)  # fmt: skip
_MAY_BE_OPEN = ("chunks", "layers", "zero_group", "recompute_layers")
_EXAMPLES = {"zero": "1", "microbatches": "8", "layers": "4+4"}
_READERS: dict[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys((*AXES, "chunks", "zero_group", "recompute_layers"), _read_count),
    "sp": _read_switch,
    "context": _read_word,
    "schedule": _read_word,
    "microbatches": _read_count,
    "layers": _read_layers,
    "zero": _read_count,
    "recompute": _read_word,
    **dict.fromkeys((f"offload.{part.name}" for part in fields(Offload)), _read_fraction),
    "precision": _read_word,
    "order": _read_word,
}


def _check_kinds(plan: Plan) -> None:
    """Raise an error for values of the wrong type, which callers from Python can pass."""
    if not isinstance(plan.offload, Offload):
        raise ShardwiseError(f"offload={plan.offload!r} is no Offload", remedy='Plan.parse("offload.optimizer=0.5")')
    for key, value in _entries(plan).items():
        if value is None and key in _MAY_BE_OPEN:
            continue
        made = _READERS[key](key, list(value) if isinstance(value, tuple) else value)
        if isinstance(value, str) and not isinstance(made, str):
            raise ShardwiseError(f"{key}={value!r} of a plan is a text", remedy=f"{key}={made!r}")


def _check(plan: Plan) -> None:
    """Raise an error for values that are wrong for every model and cluster."""
    _check_kinds(plan)
    for axis in AXES:
        if getattr(plan, axis) < 1:
            sizes = " x ".join(f"{name}={getattr(plan, name)}" for name in _MULTIPLY)
            ranks = counted(plan.num_ranks, "rank")
            raise ShardwiseError(
                f"{axis}={getattr(plan, axis)}: an axis has at least 1 rank ({sizes} = {ranks})",
                remedy=f"{axis}=1",
            )
    if plan.zero not in range(4):
        raise ShardwiseError(f"zero={plan.zero}: the ZeRO stage is 0, 1, 2 or 3", remedy="zero=1")
    _check_sharing(plan)
    for key, word, known in (
        ("context", plan.context, CONTEXT),
        ("recompute", plan.recompute, RECOMPUTE),
        ("precision", plan.precision, PRECISIONS),
        ("order", plan.order, ORDERS),
        ("schedule", plan.schedule, (*CATALOGUE, "auto")),
    ):
        if word not in known:
            error = unknown(key, word, known)
            usual = {"precision": "bf16", "schedule": "1f1b"}.get(key, known[0])
            raise ShardwiseError(error.problem, remedy=f"{key}={error.remedy or usual}")
    for key, value in _entries(plan).items():
        if key.startswith("offload.") and not 0 <= value <= 1:
            raise ShardwiseError(f"{key}={value:g}: a share is from 0 (none) to 1 (all)", remedy=f"{key}=1")
    for key in plan.reasons:
        if key not in _READERS:
            raise unknown("plan key with a reason", key, _READERS)
    if plan.recompute_layers is not None and plan.recompute_layers < 1:
        raise ShardwiseError(
            f"recompute_layers={plan.recompute_layers}: of each stage at least 1 layer is recomputed",
            remedy="recompute=none",
        )
    _check_schedule(plan)
    _check_layers(plan)


def _check_sharing(plan: Plan) -> None:
    """Check that experts and ZeRO groups divide the replicas evenly, and that `sp` has ranks to cut over."""
    replicas = plan.dp * plan.cp
    if replicas % plan.ep:
        raise ShardwiseError(
            f"ep={plan.ep} does not divide the {replicas} ranks that hold the same dense weights (dp={plan.dp} x "
            f"cp={plan.cp})",
            remedy=f"ep={largest_divisor(replicas, plan.ep)}, or dp={plan.ep * plan.dp}",
        )
    group = plan.zero_group
    if group is not None and (group < 1 or replicas % group):
        raise ShardwiseError(
            f"zero_group={group} does not divide the {replicas} replicas (dp={plan.dp} x cp={plan.cp})",
            remedy=f"zero_group={largest_divisor(replicas, max(group, 1))}",
        )
    if plan.sp and plan.tp == 1:
        raise ShardwiseError(
            "sp=true cuts sequences over the ranks of tp, and tp=1", remedy="tp=2,sp=true, or sp=false"
        )


def largest_divisor(number: int, limit: int) -> int:
    """Return the largest divisor up to a limit."""
    return max(size for size in range(1, limit + 1) if number % size == 0)


def _check_schedule(plan: Plan) -> None:
    if plan.microbatches < 1:
        raise ShardwiseError(
            f"microbatches={plan.microbatches}: a step has at least 1", remedy=f"microbatches={2 * plan.pp}"
        )
    if plan.schedule == "auto":
        if plan.chunks is not None and plan.chunks < 1:
            raise ShardwiseError(f"chunks={plan.chunks}: a rank holds at least 1", remedy="chunks=2")
        return
    try:
        check(CATALOGUE[plan.schedule], plan.pp, plan.microbatches, plan.chunks)
    except ShardwiseError as error:
        # The catalogue's remedies are command-line options; here they are keys of a plan.
        remedy = error.remedy or ""
        for option, key in (("--stages ", "pp="), ("--microbatches ", "microbatches="), ("--chunks ", "chunks=")):
            remedy = remedy.replace(option, key)
        raise ShardwiseError(error.problem, remedy=remedy or None) from None


def _check_layers(plan: Plan) -> None:
    if plan.layers is None:
        return
    text = _word(plan.layers)
    if any(units < 0 for units in plan.layers):
        raise ShardwiseError(f"layers={text}: a stage cannot have fewer than 0 units", remedy="layers=4+4")
    if plan.num_stages is not None and len(plan.layers) != plan.num_stages:
        raise ShardwiseError(
            f"layers={text} is for {counted(len(plan.layers), 'stage')}, but pp={plan.pp} with "
            f"schedule={plan.schedule} and {counted(plan.num_chunks or 0, 'chunk')} on a rank makes {plan.num_stages}",
            remedy=f"layers={'+'.join(['4'] * plan.num_stages)}",
        )


_DEFAULTS: Mapping[str, Any] = _entries(Plan())
