"""The `hf` tokenizer: a folder with tokenizer.json, run by the `tokenizers` library.

Text is data: the name of a special token inside a document ("<|end_of_text|>" in a source file) is encoded as
its characters, never as the special token. No special tokens are added, and a tokenizer.json's truncation and
padding are turned off. transformers is imported only to apply a chat template, which does recognize special
tokens, since templates are written with them.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from titancli.data import HFTokenizer as Config
from titancli.data.chat_template import ChatTemplate
from titancli.data.hub import local_folder
from titancli.data.tokenizer_files import tokenizer_files
from titancli.data.trial import try_tokenizer
from titancli.data.turn_ends import TurnEnds, ends_of_turns
from titancli.errors import EnvironmentProblem, RecipeError
from titancli.files import read_json


class HFTokenizer:
    """A tokenizer loaded from `folder`/tokenizer.json.

    Raises:
        EnvironmentProblem: the folder or its tokenizer.json is missing or cannot be read.
        RecipeError: no end marker is defined, or it is not in the vocabulary.
    """

    def __init__(self, folder: Path, *, eos: str | None = None) -> None:
        self._folder = folder
        digest = try_tokenizer(_existing(folder))
        self._tokenizer = _load(folder)
        self._templated: ChatTemplate | None = None
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        if not ids:
            raise EnvironmentProblem(
                f"{folder / 'tokenizer.json'} has no tokens", hint="use another tokenizer"
            )
        self.vocab_size: int = max(ids.values()) + 1
        self.eos_id: int = self._find("eos", eos, required=True)
        self.bos_id: int | None = self._find("bos", None, required=False)
        self.adds_bos: bool = self.bos_id is not None and self._begins_with(self.bos_id)
        self.files: dict[str, str | Path] = {**tokenizer_files(folder)}
        self.fingerprint = f"hf:{digest}:{self.eos_id}"

    def _begins_with(self, token: int) -> bool:
        with self._named():
            return bool(self._tokenizer.encode("").ids[:1] == [token])

    def encode(self, text: str) -> list[int]:
        with self._named():
            return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        with self._named():
            return [e.ids for e in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def encode_arrays(self, texts: list[str]) -> list[np.ndarray]:
        """Return the ids of each text, int32 [n]."""
        with self._named():
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def decode(self, ids: list[int]) -> str:
        """Return the text without special tokens."""
        with self._named():
            return self._tokenizer.decode(ids, skip_special_tokens=True)

    def decode_special(self, ids: list[int]) -> str:
        """Return the text with special tokens by their names."""
        with self._named():
            return self._tokenizer.decode(ids, skip_special_tokens=False)

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its name, including special ones; None if there is none."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """Return the special tokens, ids by name."""
        added = self._tokenizer.get_added_tokens_decoder().items()
        return {token.content: number for number, token in added if token.special and token.content.strip()}

    def encode_special(self, text: str) -> list[int]:
        """Return the ids of a text in which the names of special tokens are these tokens."""
        with self._named():
            return self._reading.encode(text, add_special_tokens=False).ids

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Report an error of the library, which panics in places; a panic is no Exception."""
        try:
            yield
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise EnvironmentProblem(
                f"{self._folder / 'tokenizer.json'} does not encode or decode a text: {error}",
                hint="use another tokenizer",
            ) from error

    @cached_property
    def _reading(self) -> Any:
        tokenizer = _load(self._folder)
        tokenizer.encode_special_tokens = False
        return tokenizer

    def text_with_mask(self, text: str) -> tuple[list[int], list[bool]]:
        """Return the ids of a conversation that was rendered with the folder's chat template, and which of
        them belong to turns of the assistant; see `ChatTemplate.text_and_mask`."""
        return self._template().text_and_mask(text)

    def chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the ids of a conversation (`{"role": …, "content": …}` each) under the folder's chat
        template, whose other arguments are `options` (`tools`, for example).

        Raises:
            RecipeError: the folder has no chat template, or the template rejects these messages
                (`ChatRefused`).
        """
        return self._template().ids(messages, options, add_generation_prompt=add_generation_prompt)

    def chat_text(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text of a conversation under the folder's chat template; see `chat`. Its ids are those
        of `encode_special`."""
        return self._template().rendered(messages, options, add_generation_prompt=add_generation_prompt)

    def chat_with_mask(
        self,
        messages: list[dict[str, Any]],
        *,
        first: int = 0,
        trailing_newline: bool = False,
        untrained: Collection[int] = (),
        options: Mapping[str, Any] | None = None,
    ) -> tuple[list[int], list[bool]]:
        """Return the ids, and which belong to assistant turns among `messages[first:]`, their ends included,
        except the messages with the numbers in `untrained`; see `ChatTemplate` and `TurnEnds`."""
        found = self._template().ids_and_mask(
            messages, first, options, trailing_newline=trailing_newline, untrained=untrained
        )
        return self._ends.closed(*found, messages)

    @property
    def turn_ends(self) -> tuple[int, ...] | None:
        """Return the ids that end a turn of the assistant; None without a chat template."""
        return self._ends.ids if self._of_transformers.chat_template else None

    @property
    def chat_template(self) -> str:
        """Return the text of the folder's chat template.

        Raises:
            RecipeError: it has none.
        """
        return self._template().text

    @property
    def chat_fingerprint(self) -> str:
        """Return a digest of the chat template."""
        return xxhash.xxh3_64_hexdigest(self._template().text.encode())

    def _template(self) -> ChatTemplate:
        if self._templated is None:
            self._templated = ChatTemplate(self._of_transformers, self._folder)
        return self._templated

    @cached_property
    def _of_transformers(self) -> Any:
        return _load_with_template(self._folder)

    @cached_property
    def _ends(self) -> TurnEnds:
        return ends_of_turns(self._template(), self._of_transformers)

    def _find(self, role: str, named: str | None, *, required: bool) -> Any:
        """Return the id of the bos or eos token, as defined by the recipe or by the folder's files."""
        if named is not None:
            token_id = self._tokenizer.token_to_id(named)
            if token_id is None:
                raise RecipeError(
                    f"tokenizer.{role} = {named!r} is not a token of {self._folder / 'tokenizer.json'}",
                    hint=f"set it to one of its tokens, or remove tokenizer.{role}",
                )
            return token_id
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            token = _read_json(self._folder / name).get(f"{role}_token")
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str) and (token_id := self._tokenizer.token_to_id(token)) is not None:
                return token_id
        for name in ("generation_config.json", "config.json"):
            token_id = _read_json(self._folder / name).get(f"{role}_token_id")
            token_id = token_id[0] if isinstance(token_id, list) and token_id else token_id
            if isinstance(token_id, int) and 0 <= token_id < self.vocab_size:
                return token_id
        if required:
            raise RecipeError(
                f"no file in {self._folder} defines the token that ends a text",
                hint=f'set it in the recipe, for example tokenizer.{role} = "<|end_of_text|>"; '
                f"or set {role}_token in tokenizer_config.json",
            )
        return None


def _existing(folder: Path) -> Path:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise EnvironmentProblem(_missing(folder), hint=_remedy(folder))
    return path


def _load(folder: Path) -> Any:
    path = _existing(folder)
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exceptions
        raise EnvironmentProblem(
            f"{path} cannot be read as a tokenizer: {error}",
            hint="download it again, or save it again with save_pretrained of transformers",
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True  # special tokens' names in a text are text
    return tokenizer


def _load_with_template(folder: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    try:
        return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # any error caused by a wrong tokenizer_config.json
        raise EnvironmentProblem(
            f"transformers cannot load the tokenizer in {folder}: {type(error).__name__}: {error}",
            hint="fix tokenizer_config.json, or download it again",
        ) from error


def _missing(folder: Path) -> str:
    if not folder.exists():
        return f"the tokenizer folder {folder} does not exist"
    if not folder.is_dir():
        return f"tokenizer.path names {folder}, which is not a folder"
    return f"the tokenizer folder {folder} has no tokenizer.json (it has {_listing(folder)})"


def _listing(folder: Path) -> str:
    names = sorted(os.listdir(folder))
    return ", ".join(names[:5]) + (", …" if len(names) > 5 else "") if names else "nothing at all"


def _remedy(folder: Path) -> str:
    if folder.name == "tokenizer.json":
        return "give the folder that contains it"
    if (folder / "tokenizer.model").is_file():
        return f"convert it: transformers.AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained(...)"
    return (
        "set tokenizer.path to a folder with tokenizer.json, for example from "
        "`titan download OWNER/NAME --dir DIR`"
    )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        raise EnvironmentProblem(f"{path} cannot be read: {error}", hint="fix it or remove it") from error
    return content if isinstance(content, dict) else {}


def build(config: Config) -> HFTokenizer:
    return HFTokenizer(local_folder(config.path), eos=config.eos)
