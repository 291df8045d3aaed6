"""What a run has to tell, by its name or simulated from a plan: its report, and what its doctor finds."""
