"""Optimizers on parameters that are shared out: which can work on pieces, and whole matrices for those that cannot."""
