"""What a recipe says of the model in a Hugging Face folder."""

from titancli.cli.finetune import model_section

__all__ = ["model_section"]
