"""The planner's input: a model, a cluster, a batch, and the keys of the plan that are given."""

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from shardwise import environment
from shardwise.cluster.cluster import Cluster
from shardwise.cluster.device import Device
from shardwise.cost.layouts import Layouts
from shardwise.cost.pipeline import SCHEDULES
from shardwise.cost.software import Software
from shardwise.cost.stage import Pieces
from shardwise.cost.step import Estimate, price
from shardwise.errors import ShardwiseError, unknown
from shardwise.model.adapters import with_lora
from shardwise.model.load import load_model
from shardwise.model.model import Model
from shardwise.model.operations import Attention, Scan
from shardwise.planner.plan import AXES, FP8_SCALES, Offload, Plan

_FLOAT32_BYTES = 4
_COUNTED = (*AXES, "chunks", "microbatches", "zero_group", "recompute_layers")
_KERNELS = {"hopper": "flash3", "blackwell": "flash3", "volta": "torch"}
# A third of the operations of router, dispatch and combine in a layer, without the experts' own matmuls. Counted on two
# ranks: 75 in our own layer with its balancing loss, 50 in a Hugging Face mixture. On a GPU, kernels fuse several of
# them.
_ROUTING_KERNELS = 25.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A step of `batch` samples of `sequence` positions, to be distributed over all devices of the cluster.

    `fixed` are keys of the plan that are given. With `runnable`, only plans that the engines can run count; else all
    that can be priced. `software` is the software that runs the plan; its precision is one of the choices. A plan fits
    if free memory is at least `reserve` times the memory in use.
    """

    model: Model
    cluster: Cluster
    batch: int
    sequence: int
    fixed: Mapping[str, Any] = field(default_factory=dict)
    runnable: bool = True
    software: Software | None = None
    reserve: float = 0.0

    @property
    def device(self) -> Device:
        """The device with the least memory: a plan must fit there."""
        return min((pool.device for pool in self.cluster.pools), key=lambda device: device.memory_bytes)

    @property
    def precisions(self) -> tuple[str, ...]:
        """Precisions to plan for: a 16-bit one that all devices have, and fp32."""
        if "precision" in self.fixed:
            return (str(self.fixed["precision"]),)
        rates = [pool.device.flops_per_second for pool in self.cluster.pools]
        narrow = [name for name in ("bf16", "fp16") if all(name in each for each in rates)]
        return (*narrow[:1], "fp32")

    def software_in(self, precision: str) -> Software:
        """Return the software in a precision. The granularity of 8-bit scales makes no difference here."""
        if precision in FP8_SCALES:
            self._check_fp8(precision)
            precision = "fp8"
        software = replace(self.software or usual_software(self.device), precision=precision)
        if precision == "fp32" and software.widens_gradients:
            return replace(software, widens_gradients=False, gradient_bytes=4, reduce_bytes=4)
        return software

    def _check_fp8(self, precision: str) -> None:
        lacking = [pool.device for pool in self.cluster.pools if "fp8" not in pool.device.flops_per_second]
        gpus = [device for device in lacking if device.architecture != "cpu"]  # On CPUs it is emulated.
        if gpus and not environment.wants_emulated_fp8():
            known = ", ".join(gpus[0].flops_per_second)
            raise ShardwiseError(
                f"precision={precision}: {gpus[0].name} multiplies in {known}, and not in 8 bits",
                remedy="precision=bf16, or a cluster of GPUs that have it, such as 8xh100",
            )

    def price(self, layouts: Layouts, software: Software, pieces: Pieces | None = None) -> Estimate:
        """Price a step of each layout by closed forms. `pieces` is as in `cost/step.py`."""
        found = price(self.model, self.cluster, layouts, sequence=self.sequence, software=software, pieces=pieces)
        return replace(found, fits=found.fits & (found.bytes.peak <= self.room)) if self.reserve else found

    @property
    def room(self) -> float:
        """Bytes that a rank may use."""
        return self.device.memory_bytes / (1.0 + self.reserve)

    @property
    def heads(self) -> int:
        """Attention heads that tensor parallelism can cut: the fewest of any layer, or 1 if it cannot cut any."""
        counts = [
            operation.heads
            for block, _ in self.model.kinds
            for operation in block.operations
            if isinstance(operation, Attention)
        ]
        return min(counts) if counts and self.cuts_layers else 1

    @property
    def cuts_layers(self) -> bool:
        """Whether tensor and context parallelism can be priced. For a traced module, it is unknown where they cut."""
        return self.model.family != "traced"

    @property
    def cuts_sequences(self) -> bool:
        """Whether context parallelism can cut: there is one stack of layers over positions, and no recurrence."""
        layers = [block for block, _ in self.model.kinds if block.stack]
        scans = any(isinstance(each, Scan) for block in layers for each in block.operations)
        return (
            self.cuts_layers
            and self.model.sequence is None
            and len({block.stack for block in layers}) == 1
            and not scans
        )

    @property
    def num_experts(self) -> int:
        """Number of experts in the layer with fewest; 1 without experts."""
        counts = [
            parameter.shape[parameter.ep_dim]
            for block, _ in self.model.kinds
            for parameter in block.parameters
            if parameter.ep_dim is not None
        ]
        return min(counts, default=1)

    @property
    def experts_text(self) -> str:
        return f"has {self.num_experts} experts in a layer" if self.num_experts > 1 else "has no experts"


def usual_software(device: Device, *, is_wide: bool = False) -> Software:
    """Return software with torch's current kernels for a device, and the engine's own parallelism and recomputation.

    On CPUs only attention is fused, so norms and activation functions save their intermediate results. With `is_wide`,
    the module's weights are in fp32, even if it computes in 16 bits.
    """
    is_fused = device.architecture != "cpu"
    kernel = _KERNELS.get(device.architecture, "flash2")
    return Software(
        attention=kernel,
        context_attention="flash2" if kernel == "flash3" else None,
        repeats_keys=True,
        gathered_once=True,
        cuts_experts=True,
        saves_casts=is_wide,
        shards_both=not is_wide,
        widens_gradients=not is_wide,
        gradient_bytes=4 if is_wide else 2,
        reduce_bytes=4 if is_wide else 2,
        by_operation=True,
        fp8_layers=True,
        recomputes_stages=True,
        routing_kernels=_ROUTING_KERNELS,
        one_grouped=device.architecture in ("hopper", "blackwell"),
        fused=is_fused,
        fused_norms=is_fused,
    )


def make_question(
    model: Any,
    *,
    cluster: Cluster | str,
    batch: int,
    sequence: int | None = None,
    usual_sequence: int | None = None,
    example: Any = None,
    fixed: Mapping[str, Any] | None = None,
    runnable: bool = True,
    software: Software | None = None,
    lora: int | None = None,
) -> Question:
    """Return a question. `model` is a name, a `config.json`, a `Model`, or a module with an example.

    A module with the configuration of a known family is described by it, so all axes can be planned. Any other is
    traced with `example`, and planned without the axes that cut layers. `usual_sequence` is the default sequence.
    With `lora`, only adapters of that rank train.
    """
    source, shown = _made_by(model, example) if _is_factory(model) else (model, example)
    described = _model_of(source, shown)
    if lora is not None:
        described = with_lora(described, lora)
    if batch < 1:
        raise ShardwiseError(f"a batch of {batch}: a step has at least 1 sample", remedy="--batch 256")
    if usual_sequence is not None:  # Not more positions than the model has.
        usual_sequence = min(usual_sequence, described.max_sequence or usual_sequence)
    said = (number for number in (sequence, _length_of(example), usual_sequence) if number is not None)
    question = Question(
        model=described,
        cluster=_cluster_of(cluster) if isinstance(cluster, str) else cluster,
        batch=batch,
        sequence=_sequence_of(described, next(said, None)),
        fixed=_checked(fixed or {}),
        runnable=runnable,
        software=software,
    )
    if software is None and _is_wide(source):
        return replace(question, software=usual_software(question.device, is_wide=True))
    return question


def _checked(fixed: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fixed keys, or raise an error for a value that no plan can have."""
    for key, value in fixed.items():
        if key in _COUNTED and value < 1:
            raise ShardwiseError(f"{key}={value}: there is at least 1", remedy=f"--fix {key}=1")
        if key == "schedule" and value not in (*SCHEDULES, "auto"):
            error = unknown("schedule to plan with", value, SCHEDULES)
            raise ShardwiseError(error.problem, remedy=f"--fix schedule={error.remedy or 'zb-v'}")
        if key in ("zero", "context", "recompute", "precision", "order"):
            Plan(**{key: value})
        if key.startswith("offload."):
            Plan(offload=Offload(**{key.removeprefix("offload."): value}))
    if fixed.get("zero") == 0 and "zero_group" in fixed:
        raise ShardwiseError(
            f"zero_group={fixed['zero_group']} is how many replicas share states out, and under zero=0 none do",
            remedy=f"--fix zero=1,zero_group={fixed['zero_group']}",
        )
    return {key: value for key, value in fixed.items() if (key, value) != ("schedule", "auto")}


def _model_of(source: Any, example: Any) -> Model:
    if hasattr(source, "named_parameters"):
        config: Any = getattr(source, "config", None)
        if hasattr(config, "to_dict"):
            try:
                return load_model(config.to_dict())
            except ShardwiseError:
                pass  # A module of an unknown family is traced.
        if example is None:
            raise ShardwiseError(
                f"what a {type(source).__name__} computes is seen by running it once, and no example batch was given",
                remedy='example={"input_ids": torch.zeros(1, 4096, dtype=torch.long)}, as its forward takes it',
            )
        return load_model(source, batch=example)
    return load_model(source)


def _is_factory(source: Any) -> bool:
    return isinstance(source, str) and re.fullmatch(r"[\w.]+:\w+", source) is not None


def _is_wide(source: Any) -> bool:
    """Return whether the source is a module with weights in fp32."""
    parameters = source.parameters() if hasattr(source, "named_parameters") else ()
    return any(each.dtype.itemsize >= _FLOAT32_BYTES for each in parameters)


def _made_by(text: str, example: Any) -> tuple[Any, Any]:
    """Call a factory, `pkg.mod:factory`, and return its module and an example batch: its own, or the given one."""
    name, _, attribute = text.partition(":")
    here = str(Path.cwd())
    sys.path.insert(0, here)  # As `python -m` does.
    try:
        made = getattr(import_module(name), attribute)()
    except (ImportError, AttributeError) as error:
        raise ShardwiseError(
            f"the factory {text!r} cannot be called: {error}",
            remedy="package.module:function, where function() returns a module and an example batch",
        ) from None
    finally:
        sys.path.remove(here)
    return made if isinstance(made, tuple) else (made, example)


def _length_of(example: Any) -> int | None:
    """Return the sequence length of an example: the second dimension of the first tensor that has one."""
    entries = (
        example.values()
        if isinstance(example, Mapping)
        else example
        if isinstance(example, (list, tuple))
        else [example]
    )
    shapes = (tuple(entry.shape) for entry in entries if hasattr(entry, "shape"))
    return next((int(shape[1]) for shape in shapes if len(shape) >= 2), None)


def _cluster_of(text: str) -> Cluster:
    """Return a cluster by its name or from a file. The reader of files is imported only for files."""
    if not text.endswith(".toml"):
        return Cluster.parse(text)
    from shardwise.cluster.file import find_cluster

    return find_cluster(text)


def _sequence_of(model: Model, sequence: int | None) -> int:
    if model.sequence is not None:
        return model.sequence
    if sequence is None:
        raise ShardwiseError(
            f"the sequence length for {model.name} is not given",
            remedy=f"--sequence {min(model.max_sequence or 4096, 4096)}",
        )
    if sequence < 1:
        raise ShardwiseError(f"a sequence of {sequence}: it has at least 1 position", remedy="--sequence 4096")
    longest = model.max_sequence
    if longest is not None and sequence > longest and _learns_positions(model, longest):
        raise ShardwiseError(
            f"{model.name} has learned {longest} positions, and a sequence of {sequence} has more",
            remedy=f"--sequence {longest}, or a config.json with more positions",
        )
    return sequence


def _learns_positions(model: Model, longest: int) -> bool:
    """Return whether positions are rows of a table, which limits them, unlike rotary angles."""
    outside = (block for block, _ in model.kinds if not block.stack)
    shapes = (parameter.shape for block in outside for parameter in block.parameters)
    return any(
        len(shape) == 2 and longest <= shape[0] <= longest + 2 and shape[0] != model.vocabulary for shape in shapes
    )
