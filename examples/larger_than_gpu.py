"""A model that has not the room: 5 of its 12 blocks live on the host and come in ahead of their use, up and down again.

Its blocks are frozen; what is around them learns, and gradients pass through all twelve.
"""

import torch
from torch.optim import AdamW
from transformers import LlamaConfig, LlamaForCausalLM

from shardwise.dataflow.machine import Machine
from shardwise.runtime.streaming import stream


def main() -> None:
    place = "cuda:0" if torch.cuda.is_available() else "cpu:0"
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 256, "vocab_size": 256}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=12, **sizes))
    blocks = list(model.model.layers.requires_grad_(False))
    all_bytes = sum(each.numel() * each.element_size() for each in model.parameters())
    with Machine([place]) as machine:
        weights = stream(model, machine, place, blocks=blocks, room_bytes=int(0.85 * all_bytes))
        assert weights is not None, "all of it fits"
        print(f"{weights.host_bytes / 2**20:.1f} of {all_bytes / 2**20:.1f} MiB live on the host")
        learning = [each for each in model.parameters() if each.requires_grad]
        optimizer = AdamW(learning, lr=3e-3)
        ids = torch.randint(0, 256, (4, 64), device=learning[0].device)
        for step in range(5):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(f"step {step}  loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
