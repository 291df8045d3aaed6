"""How a module is traced: its blocks, and what each computes, moves and keeps. Loaded by `model/trace.py` alone."""
