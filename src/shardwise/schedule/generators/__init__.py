"""One schedule a file. Each emits computation only; `schedule/passes/` adds the rest."""
