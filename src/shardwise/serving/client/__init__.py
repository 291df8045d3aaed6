"""Clients of a server over HTTP: a small client, a server process for a model, and a benchmark."""
