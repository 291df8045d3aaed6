"""`parallelize`: assemble a module, a plan, a loss and an optimizer into an engine that trains.

parallelize              refusals, before anything is changed
     |
assemble                 over sharded (layers), prepare (stages), trial and example_check
     |
parts ---+-- make_states       weights, gradients, optimizers
         +-- make_execution    the schedule's executor
                |
engine ------ steps, update    a step, and its end
     |
shown, module_state, optimizer_state     the module between steps; state by original names
"""
