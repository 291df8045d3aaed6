"""What a run reads, looked at before any rank is started."""

from shardwise.training.data.source import check_data
from shardwise.training.metrics import check_board
from shardwise.training.recipe import Recipe
from shardwise.training.subject import subject_of


def check_inputs(recipe: Recipe) -> None:
    """Refuse data or a model that cannot be read, and curves that nothing here can draw."""
    subject_of(recipe, check_data(recipe.data))
    if recipe.tensorboard:
        check_board()
