"""A model that does not fit: 8 of its 12 blocks live on the host and come in ahead of their use.

python examples/larger_than_gpu.py
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from shardwise.dataflow.machine import Machine
from shardwise.runtime.streaming import stream


def main() -> None:
    place = "cuda:0" if torch.cuda.is_available() else "cpu:0"
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 512, "vocab_size": 512}
    config = LlamaConfig(num_hidden_layers=12, **sizes)
    model = LlamaForCausalLM(config).eval()
    ids = torch.randint(0, 512, (4, 64), device=place.partition(":")[0])
    blocks = list(model.model.layers)
    block_bytes = sum(each.numel() * each.element_size() for each in blocks[0].parameters())
    rest_bytes = sum(each.numel() * each.element_size() for each in model.parameters()) - 12 * block_bytes
    with Machine([place]) as machine, torch.no_grad():
        weights = stream(model, machine, place, blocks=blocks, room_bytes=rest_bytes + 7 * block_bytes + 2**16)
        assert weights is not None, "all of it fits"
        logits = model(ids).logits
        on_host, here = weights.host_bytes / 2**20, weights.device_bytes / 2**20
        print(f"{on_host:.0f} MiB on the host, at most {here:.0f} of them on {place}")
        print(f"the logits' mean is {float(logits.mean()):.5f}")
        weights.close()
        print(f"everything on the CPU gives {float(model.cpu()(ids.cpu()).logits.mean()):.5f}")


if __name__ == "__main__":
    main()
