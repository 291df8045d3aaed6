"""The plan, the search for it, and the reason of every choice."""
