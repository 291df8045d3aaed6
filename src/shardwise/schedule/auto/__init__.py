"""`auto`: a schedule for given times, hops and memory, where the named ones are only starting points."""
