"""The torch modules we ship: one transformer for many families, and Hugging Face weights into and out of it.

settings --> transformer                     embedding, blocks, norm, head, loss
                |
             block --+-- attention, latent   over mask, rotary and cache
                     +-- feedforward, moe    router, routes, experts, balance
                |
weights, initialise                          weights by name; their initial values
                |
             hf/                             Hugging Face folders: families, read and written
"""
