"""Parity of a plan with one device: the same steps trained both ways, and every value compared."""
