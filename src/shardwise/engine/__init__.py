"""`parallelize`: a module, a plan, a loss and an optimizer, put together into an engine that trains."""
