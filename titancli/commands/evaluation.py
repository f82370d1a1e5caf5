"""A loop that evaluates the weights of a run, a checkpoint or a Hugging Face folder, and its results."""

from titancli.run.evaluate import Source, document, find_source, keep, launch, recipe_of

__all__ = ["Source", "document", "find_source", "keep", "launch", "recipe_of"]
