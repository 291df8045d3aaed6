"""Kernels for modules that know nothing of them: recognised by what they compute, replaced, listed, and undone."""
