"""Devices, links and collectives measured, on one machine or on all of them."""
