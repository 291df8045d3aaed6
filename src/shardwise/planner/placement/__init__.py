"""Assign the ranks of a plan to devices."""
