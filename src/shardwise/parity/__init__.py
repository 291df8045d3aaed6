"""A plan held against one device: the same steps trained both ways, and every number compared."""
