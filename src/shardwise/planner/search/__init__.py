"""The search for a plan: choices, bounds, prices, and the best plans of different kinds."""
