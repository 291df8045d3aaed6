"""Context parallelism: the tokens of every sequence are sharded over the ranks of a group."""
