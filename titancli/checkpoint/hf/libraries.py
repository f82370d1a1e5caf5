"""The Hugging Face library that loads a model's folder, and its file names. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Library:
    """How a library lays out a folder of weights."""

    name: str
    stem: str
    """The prefix of the names of weights' files."""
    key: str
    """The key of config.json that names the model."""
    loader: str | None
    """The class that loads every folder; None: the one that config.json names."""
    text: bool
    """Whether config.json also holds the weights' dtype, and ids of tokens."""

    @property
    def weights(self) -> str:
        """Return the name of the file of weights, if there is only one."""
        return f"{self.stem}.safetensors"

    @property
    def index(self) -> str:
        """Return the name of the file that maps tensors to files, if there are several."""
        return f"{self.stem}.safetensors.index.json"

    def file(self, number: int, count: int) -> str:
        """Return the name of file `number`, from 0, of `count`."""
        return self.weights if count == 1 else f"{self.stem}-{number + 1:05d}-of-{count:05d}.safetensors"

    def how_to_load(self, form: Any, folder: str) -> str:
        """Return the line of Python with which users load a folder that the form has written."""
        loader = form.loader or self.loader or form.model_type
        return f"from {self.name} import {loader}; {loader}.from_pretrained({folder!r})"


LIBRARIES = {
    library.name: library
    for library in (
        Library("transformers", "model", "model_type", "AutoModelForCausalLM", text=True),
        Library("diffusers", "diffusion_pytorch_model", "_class_name", None, text=False),
    )
}


def library_of(form: Any) -> Library:
    """Return the library of a Hugging Face form or its class: its `library`, by default transformers."""
    return LIBRARIES[form.library]


def type_in(config_json: Mapping[str, Any]) -> str:
    """Return the model type that a config.json of any of the libraries names.

    Raises:
        KeyError: it names none.
    """
    named = [config_json[library.key] for library in LIBRARIES.values() if library.key in config_json]
    if not named:
        raise KeyError("model_type")
    return named[0]
