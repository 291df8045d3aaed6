"""The processes of a plan and their communication. Nothing here knows a module.

spawn, worker                processes of this machine, or those that torchrun has started
         |
mesh ----+---- collectives   the ranks in a grid; groups of them, and their collectives
         |
transport                    values between stages: message_layout, outbox, shared_memory
exchange                     sums and gathers beside the computation: cpu_exchange, backend_exchange
         |
faults, clocks               detection of ranks that fail, die or stall; one clock for all
"""
