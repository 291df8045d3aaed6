"""A Llama of Hugging Face, unmodified, over eight ranks: data, tensor and pipeline parallel, with ZeRO-1."""

import torch
import transformers
from torch.nn.functional import cross_entropy

import shardwise as sw


def loss(output, batch):
    """The sum over all tokens and their number, so that every token of the batch weighs the same."""
    targets = batch["targets"].flatten()
    return cross_entropy(output.logits.flatten(0, 1), targets, reduction="sum"), targets.numel()


def train(plan):
    """What each rank does, on a GPU, which it may share, or on the CPU: the same as all others. Returns the losses."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    tokens = torch.randint(0, 128, (8, 17)).to(device)
    batch = {"input_ids": tokens[:, :-1], "targets": tokens[:, 1:]}
    engine = sw.parallelize(
        transformers.LlamaForCausalLM(config).to(device),
        plan,
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
        example=batch,
    )
    return [engine.train_step(batch) for _ in range(5)]


if __name__ == "__main__":
    losses = sw.spawn(train, devices=8, args=("dp=2,tp=2,pp=2,zero=1,microbatches=2",), gpus="shared")[0]
    for step, value in enumerate(losses):
        print(f"step {step}  loss {value:.4f}")
