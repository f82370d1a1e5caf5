"""The Hugging Face form of a model: names, transforms, and `config.json` both ways."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class HFFormDefaults(Protocol):
    """Optional members of a Hugging Face form, with their defaults."""

    library: ClassVar[str] = "transformers"
    """"diffusers" for a folder that is not transformers': other names of files, and a class in place of
    `model_type`."""
    loader: str | None = None
    """The class that loads its folders; None: the library's for language models."""
    of_loss: Collection[str] = ()
    """The parameters of a loss that its folders have; see `hf_form` of `titancli.registry.defaults`."""
    prefix: str = ""
    """Start of the names of all tensors but the output layer's: folders of the base model alone, such as
    `LlamaModel`, have the names without it."""
    loses_biases: bool = False
    """True if its folders cannot hold the biases that balance experts."""

    def copy_of(self, hf_name: str) -> str | None:
        """Return the Hugging Face tensor that an ignored one must be equal to."""
        return None

    def why_missing(self, hf_names: Collection[str]) -> str | None:
        """Return what to do if a folder has all tensors but these; None: nothing is known."""
        return None

    def known_as(self, hf_name: str) -> str:
        """Return the form's own name for a tensor that has another name in some folders."""
        return hf_name

    def readout(self, tensors: Any) -> Any:
        """Return the module that gives the numbers of a head, of which `tensors.read(name)` are the weights,
        in place of a model's `output`, to be compared with those of the library; None: there is no head."""
        return None

    def whole(self, hf_names: Collection[str]) -> dict[str, Any]:
        """Return further keys of `[model]`, with which a folder of these tensors is read without leaving out
        any."""
        return {}


class HFForm(HFFormDefaults, Protocol):
    """The Hugging Face form of a model: what `hf=` of `@component` returns for a config.

    Transforms work on one tensor at a time, so that memory use is limited by the largest tensor. Optional
    members are in `HFFormDefaults`.
    """

    def to_hf(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        """Return the Hugging Face tensors for a titan parameter (plain name, whole tensor)."""
        ...

    def sources(self, name: str) -> list[str]:
        """Return the Hugging Face names that a titan parameter is built from, in the order in which
        `from_hf` takes them; empty if a Hugging Face folder has no such tensor and `from_hf` defines its
        initial value."""
        ...

    def from_hf(self, name: str, tensors: list[Tensor]) -> Tensor:
        """Build a titan parameter from the tensors named by `sources`."""
        ...

    def ignored(self, hf_name: str) -> bool:
        """Return whether a Hugging Face tensor can be ignored (a tied copy, an inv_freq buffer)."""
        ...

    def config_json(self) -> dict[str, Any]:
        """Return the `config.json` for transformers, without `dtype`, `bos_token_id`, `eos_token_id`."""
        ...


class HFBuilder(Protocol):
    """The `hf=` target: a class whose instances are HFForms."""

    model_type: str
    """`model_type` in the `config.json` that this form reads and writes (`_class_name`, where the library is
    diffusers). Of a class that reads several (`HFBuilderDefaults`) each instance has the one that it
    writes."""

    def __call__(self, config: Any) -> HFForm: ...

    def from_config_json(self, config_json: dict[str, Any]) -> dict[str, Any]:
        """Return the keys of `[model]` (without `type`) for a Hugging Face `config.json`; a static
        method.

        Raises:
            TitanError: the config requires something that the model does not support.
        """
        ...


class HFBuilderDefaults:
    """Optional members of a class of Hugging Face forms, with their defaults."""

    model_type: str | None = None
    """None for a class that has `model_types`, or that reads any type."""
    model_types: tuple[str, ...] | None = None
    """All types that it reads; empty: any type, but only if the model is selected explicitly; None: only
    `model_type`."""
