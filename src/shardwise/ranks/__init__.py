"""The processes of a plan, and all that they talk with. Nothing here knows a module.

spawn, worker                processes of this machine, or those that torchrun has started
         |
mesh ----+---- collectives   the ranks in a grid; groups of them, and what a group does together
         |
transport                    values between stages: message_layout, outbox, shared_memory
exchange                     sums and gathers beside the computation: cpu_exchange, backend_exchange
         |
faults, clocks               who failed, died or stalls; one clock for all
"""
