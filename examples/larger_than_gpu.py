"""Training a model that does not fit: what the device cannot hold stays in host memory and is copied in before its use.

Weights, gradients and optimizer state need more than the budget allows. `sw.place` streams some of the blocks; the
loop, the loss and the optimizer are your own.
"""

import torch
from torch.optim import AdamW
from transformers import LlamaConfig, LlamaForCausalLM

import shardwise as sw


def main() -> None:
    place = "cuda:0" if torch.cuda.is_available() else "cpu:0"
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 256, "vocab_size": 256}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=12, **sizes)).train()
    needed = 4 * sum(each.numel() * each.element_size() for each in model.parameters())
    model = sw.place(model, [place, "cpu"], budget={place: int(0.85 * needed)}, host="stream")
    on_host = [name for name, where in model.where.items() if where.name == "cpu"]
    print(f"{len(on_host)} of {len(model.where)} weights live on the host")
    optimizer = AdamW(model.parameters(), lr=3e-3)
    ids = torch.randint(0, 256, (4, 64))
    for step in range(5):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}  loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
