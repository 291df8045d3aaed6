"""What is computed: blocks, shapes, parameters, FLOPs, bytes, and no tensors.

catalogue, config, describe    a name; a config.json of a family (families/); sizes alone
          |
       shape ---> assembly/    a transformer's sizes and variants, made into blocks
                     |
trace, tracing/ ---> model     a module run once with fake tensors; the blocks, however they were found
                     |
operations, share              the operations of a block; how much of them one rank computes
                     |
flops, traffic, activations    the cost of an operation
"""
