"""Where a run is started: this machine, given hosts, Slurm, Kubernetes; and what is known of one that was."""
