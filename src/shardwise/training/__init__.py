"""The training loop: recipes, data, precision, checkpoints. Begin with `recipe.py`, then `run.py` and `loop.py`.

recipe --> choose, subject --> job    a run as a value; its plan and what is trained
                                |
                     run, local_ranks          starts the ranks
                                |
                     setup, make_engine        prepares a rank; data/: tokens and rows
                                |
                     loop --- health           step by step, and watched meanwhile
                                |
                     safekeeping               saving: checkpoint/ on disk; copying: memory of machines
"""
