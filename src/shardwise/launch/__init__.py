"""Start a run on this machine, given hosts, Slurm or Kubernetes; and show the status of a run."""
