"""`parallelize`: assemble a module, a plan, a loss and an optimizer into an engine that trains."""
