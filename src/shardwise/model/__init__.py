"""What is computed: blocks, shapes, parameters, FLOPs, bytes, and no tensors."""
