"""The doctor: what holds a run up, in numbers, with what to type against it."""
