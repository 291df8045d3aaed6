"""The report of a run and the findings of its doctor. The run is given by name, or simulated from a plan."""
