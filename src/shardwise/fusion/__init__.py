"""Kernels in unmodified modules: modules are recognised by what they compute, replaced, listed, and restored."""
