"""One mover of bytes: kernels and copies as tasks over many places, ordered by what they read and write."""
