"""Start a run on this machine, given hosts, Slurm or Kubernetes; and show the status of a run.

command -> chosen       options turned into a layout and a target
              |
work, layout, torchrun  what to start; nodes and devices on each; the command line of a node
              |
target ---+-- on_hosts       this machine, and hosts over ssh: shell_script
          +-- on_slurm       slurm_script, slurm_site
          +-- on_kubernetes  kubernetes/: pods, and jobs of pods
              |
at_node                 what a job does on its machines before and after the ranks
"""
