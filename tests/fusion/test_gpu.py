"""An unmodified model on a GPU in bf16: the same losses as without kernels, in less memory."""

from functools import partial
from typing import Any

import pytest
import torch
import transformers as hf
from torch.optim import SGD

import shardwise as sw
from tests.fusion.models import model_loss

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    # Torch's compiler uses what torch advises against.
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

WORDS, ROWS, LENGTH = 32_000, 2, 1024


def trained(**options: Any) -> tuple[list[float], float]:
    """Losses of three steps, and MiB beside the weights at most."""
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=WORDS, hidden_size=256, intermediate_size=704, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, use_cache=False,
    )  # fmt: skip
    with torch.device("cuda"):
        module = hf.LlamaForCausalLM(config).to(torch.bfloat16).train()
        ids = torch.randint(WORDS, (ROWS, LENGTH), generator=torch.Generator("cuda").manual_seed(1))
    batch = {"input_ids": ids, "labels": ids}
    engine = sw.parallelize(module, "dp=1", loss=model_loss, optimizer=partial(SGD, lr=0.1), example=batch, **options)
    engine.train_step(batch)
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    losses = [engine.train_step(batch) for _ in range(3)]
    most = (torch.cuda.max_memory_allocated() - held) / 2**20
    engine.close()
    return losses, most


@pytest.mark.parametrize("compile", [False, True])
def test_an_unmodified_llama_has_the_same_losses_and_no_whole_logits(compile: bool) -> None:
    plain, much = trained(kernels=False)
    losses, little = trained(compile=compile)
    assert losses == pytest.approx(plain, rel=2e-3)
    # Whole logits in bf16 and float32 and their gradients are 12 bytes a word; a chunk has them in bf16 alone.
    assert much - little > 4 * ROWS * LENGTH * WORDS / 2**20, f"{little:.0f} MiB, without kernels {much:.0f} MiB"
