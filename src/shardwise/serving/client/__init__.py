"""What asks a server over HTTP: a small client, a server started for a model, and what measures one."""
