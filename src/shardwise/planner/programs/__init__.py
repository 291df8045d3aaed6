"""Convert plans to the arguments and files of other programs, and back."""
