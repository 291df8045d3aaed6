"""What a rank really holds while it trains: bytes of parameters, gradients, optimizer state and saved activations."""

from collections import Counter
from types import TracebackType
from typing import Any, NamedTuple

import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW

from shardwise.engine.parallelize import parallelize
from shardwise.stages.stage import Batch
from shardwise.states.parameter_group import Share

ROWS, LENGTH, VOCABULARY = 8, 32, 32
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 4, "intermediate_size": 384, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "tie_word_embeddings": False,
}  # fmt: skip


class Measured(NamedTuple):
    """Bytes on one rank, and its place in the pipeline."""

    place: int
    weights: int
    gradients: int
    optimizer: int
    activations: int


def make_module(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "llama":
        return hf.AutoModelForCausalLM.from_config(hf.LlamaConfig(**SIZES))  # type: ignore[no-any-return]
    # Every row goes to every expert: what a router that was never trained likes best has no part in it.
    experts = {"num_local_experts": 4, "num_experts_per_tok": 4, "sliding_window": None}
    return hf.AutoModelForCausalLM.from_config(hf.MixtralConfig(**SIZES, **experts))  # type: ignore[no-any-return]


def make_sixteen() -> nn.Module:
    """Return a small module with weights in bf16."""
    sizes = SIZES | {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64}
    return hf.AutoModelForCausalLM.from_config(hf.LlamaConfig(**sizes)).bfloat16()  # type: ignore[no-any-return]


def make_batch() -> dict[str, Tensor]:
    ids = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def loss(output: Any, batch: Batch) -> tuple[Tensor, int]:
    labels = batch["labels"].flatten()
    return cross_entropy(output.logits.flatten(0, 1), labels, reduction="sum"), labels.numel()


class Saved:
    """Counts what autograd keeps: every storage once, for as long as something saved is in it; weights not at all."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._uses: Counter[int] = Counter()
        self._sizes: dict[int, int] = {}
        self.now = self.most = 0
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda kept: kept.tensor)

    def __enter__(self) -> "Saved":
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, trace)

    def _pack(self, tensor: Tensor) -> "_Kept":
        key = tensor.untyped_storage().data_ptr()
        if key in {each.untyped_storage().data_ptr() for each in self._module.parameters()}:
            return _Kept(tensor, None, key)
        if not self._uses[key]:
            self._sizes[key] = tensor.untyped_storage().nbytes()
            self.now += self._sizes[key]
            self.most = max(self.most, self.now)
        self._uses[key] += 1
        return _Kept(tensor, self, key)

    def let_go(self, key: int) -> None:
        self._uses[key] -= 1
        if not self._uses[key]:
            self.now -= self._sizes[key]


class _Kept:
    """A tensor that autograd keeps."""

    def __init__(self, tensor: Tensor, saved: Saved | None, key: int) -> None:
        self.tensor, self._saved, self._key = tensor, saved, key

    def __del__(self) -> None:
        if self._saved is not None:
            self._saved.let_go(self._key)


def measure(plan: str, model: str) -> Measured:
    """Train one rank of a plan for two steps and measure in the second."""
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    batch = make_batch()
    engine = parallelize(make_module(model), plan, loss=loss, optimizer=AdamW, example=batch, verify=False)
    engine.train_step(batch)
    with Saved(engine.module) as saved:
        engine.train_step(batch)
    held = engine.states.data.held()
    found = Measured(engine.wires.ranks[0], held.parameters, held.gradients, held.optimizer, saved.most)
    engine.close()
    return found


class Sixteen(NamedTuple):
    """Bytes of a rank with 16-bit weights: between steps, of the gradients in an optimizer's step, and on the host."""

    weights: int
    gradients: int
    optimizer: int
    in_step: int
    host: int


class _Watched(AdamW):
    """Counts the gradients that it gets."""

    in_step = 0

    def step(self, closure: Any = None) -> Any:
        given = (each.grad for group in self.param_groups for each in group["params"])
        _Watched.in_step = sum(each.nbytes for each in given if each is not None)
        return super().step(closure)


def measure_sixteen(plan: str) -> Sixteen:
    """Train one rank of a plan for a step, with a module in bf16."""
    torch.manual_seed(0)
    module, batch = make_sixteen(), make_batch()
    optimizer = [Share(make=_Watched, whole=False)]
    with parallelize(module, plan, loss=loss, optimizer=optimizer, example=batch, verify=False) as engine:
        engine.train_step(batch)
        held = engine.states.data.held()
        return Sixteen(held.parameters, held.gradients, held.optimizer, _Watched.in_step, engine.host_bytes)


def _bytes(tensors: list[Any]) -> int:
    return sum(each.numel() * each.element_size() for each in tensors)
