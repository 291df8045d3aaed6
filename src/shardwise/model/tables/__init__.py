"""The catalogue's data: published configurations by name, as a `config.json` has them, a file for a few families."""
