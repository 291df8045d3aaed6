"""Who does what, in which order: the schedule language, its generators, passes, verifier and simulator."""
