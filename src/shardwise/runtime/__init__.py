"""A plan made to run: modules split into stages, and executors that interpret schedules over them."""
