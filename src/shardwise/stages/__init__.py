"""Split an unmodified module into stages that can be run. Nothing here knows ranks.

split/        module, example -> units -> flow -> cut -> Split of stages
stage         the interface between a splitter and an executor
batch, losses       a batch cut into microbatches; the user's loss, tried and weighted
compiled            compiled units, and their backward in two halves
activation_bytes    the bytes that a forward saves for its backward
"""
