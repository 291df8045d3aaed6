"""An unmodified module to stages that can be run. Nothing here knows ranks.

split/        module, example -> units -> flow -> cut -> Split of stages
stage         what a splitter makes and an executor runs
batch, losses       a batch in microbatches; the user's loss, tried and weighed
compiled            compiled units, and their backward in two halves
activation_bytes    what a forward keeps for its backward
"""
