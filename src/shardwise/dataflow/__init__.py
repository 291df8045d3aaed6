"""Kernels and copies as tasks over many places, ordered by the data that they read and write.

machine                    the user's interface; program, graphs: recorded once, replayed
   |
dispatch -- choice         each task behind its dependencies; the place of a task
   |          |
store, mover, launch       data of the machine; transfers between places; a task and its accesses
   |
data, place                a value and its copies; a place, with memory, buffers and eviction
   |
streams, cuda              work in order, and events; those of a GPU
"""
