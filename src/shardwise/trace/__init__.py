"""What happened, or is predicted to happen: events, attribution of time and memory, drawings, exports.

events, activities                 the format: instructions of ranks, the activity of their GPUs
     |
file, run, metrics, journal        a trace as a file; the folder of a run
     |
attribution, stretches, streams    why a rank idles; its step in parts that add up
hidden, slowness, memory           overlapped communication; slow ranks; bytes by owner
     |
timeline, svg, perfetto            drawn in the terminal, as a picture, for Perfetto
"""
