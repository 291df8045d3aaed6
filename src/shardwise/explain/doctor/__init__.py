"""The doctor: what slows a run down, in numbers, with what to type against it."""
