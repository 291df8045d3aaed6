"""Use kernels in unmodified modules: recognise modules by what they compute, replace, list and restore them."""
