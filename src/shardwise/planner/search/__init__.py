"""The search for a plan: what there is to choose from, bounds, prices, and the best that differ in kind."""
