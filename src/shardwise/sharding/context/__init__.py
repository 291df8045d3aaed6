"""Context parallelism: the ranks of a group share out the tokens of every sequence."""
