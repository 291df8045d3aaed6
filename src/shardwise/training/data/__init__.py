"""Tokens: made into files, mapped into memory, and dealt out in an order that depends on a seed alone."""
