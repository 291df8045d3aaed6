"""Shapes made into models: which operations and parameters each part has, and what each keeps for the backward."""
