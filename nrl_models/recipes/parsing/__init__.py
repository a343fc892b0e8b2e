"""Text and values of a recipe, before they are put together."""
