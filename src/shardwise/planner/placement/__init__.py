"""Which rank of a plan sits on which device."""
