"""Measure devices, links and collectives, on one machine or on all of a cluster."""
