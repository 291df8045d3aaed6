"""The training loop: recipes, data, precision, checkpoints. Begin with `recipe.py`, then `run.py` and `loop.py`."""
