"""Parity of a plan with one device: the same steps trained both ways, and every value compared.

command -> check
             |
problem ---> one_device, reference    the same training on one device, on whole batches
   |               |
   +-------> processes, ranks         the training under the plan, a process for each rank
                   |
             compare                  both courses, number by number; halves: the same in bf16, over rounding
                   |
             coverage, verdict        what was compared; the result
"""
