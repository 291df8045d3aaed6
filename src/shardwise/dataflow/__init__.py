"""Kernels and copies as tasks over many places, ordered by the data that they read and write."""
