"""A Llama of Hugging Face, unmodified, in four stages under a zero-bubble schedule.

Its embedding and its head share one weight, on different stages: it is trained as one.
"""

import torch
import transformers
from torch.nn.functional import cross_entropy

import shardwise as sw

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
config = transformers.LlamaConfig(
    vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
model = transformers.LlamaForCausalLM(config).to(device)


def loss(output, batch):
    """The sum over all tokens and their number, so that every token of the batch weighs the same."""
    targets = batch["targets"].flatten()
    return cross_entropy(output.logits.flatten(0, 1), targets, reduction="sum"), targets.numel()


tokens = torch.randint(0, 128, (8, 17), device=device)
batch = {"input_ids": tokens[:, :-1], "targets": tokens[:, 1:]}
engine = sw.parallelize(
    model,
    "pp=4,schedule=zb-h1,microbatches=8",
    loss=loss,
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
    example=batch,
    clip=1.0,
)
for step in range(5):
    print(f"step {step}  loss {engine.train_step(batch):.4f}  gradient norm {engine.gradient_norm:.3f}")
