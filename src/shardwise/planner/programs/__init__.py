"""Plans as the arguments and files of other programs, and back."""
