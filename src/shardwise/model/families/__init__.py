"""Families of models: how the values of a configuration say what is computed, one file for each kind of family."""
