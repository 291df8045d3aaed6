"""The doctor: what slows a run down, in numbers, with the command that fixes it."""
