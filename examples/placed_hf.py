"""A GPT-2 of Hugging Face, unmodified, over several devices of one process: trained with an ordinary loop, then run.

Without a GPU the devices are two threads of the CPU.
"""

import torch
import transformers

import shardwise as sw

devices = [f"cuda:{index}" for index in range(torch.cuda.device_count())] or ["cpu:0", "cpu:1"]
torch.manual_seed(0)
config = transformers.GPT2Config(
    vocab_size=128, n_embd=64, n_layer=4, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
model = transformers.GPT2LMHeadModel(config).train()
model = sw.place(model, devices=devices, microbatches=4)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

tokens = torch.randint(3, 128, (8, 16))
for step in range(5):
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}  loss {loss.item():.4f}")

for name in ("transformer.wte.weight", "transformer.h.0.ln_1.weight", "transformer.ln_f.weight"):
    print(f"{name} is on {model.where[name].name}")
model.eval()
generated = model.generate(tokens[:1, :4], max_new_tokens=4, do_sample=False, pad_token_id=0)
print("generated:", generated[0].tolist())
