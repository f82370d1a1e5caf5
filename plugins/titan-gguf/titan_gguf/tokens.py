"""A tokenizer as GGUF's metadata: tokens with their kinds, merges, ids with a role, and the chat template.

llama.cpp has its own code for what splits a text before merges are applied, chosen by a name in the file. The
name is found by the regular expressions in tokenizer.json; one that is not known is refused, since any other
name would give other tokens without a word.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gguf import GGUFWriter, Keys, TokenType
from tokenizers import Tokenizer

from titancli.errors import EnvironmentProblem, UsageError

Json = Mapping[str, Any]

CASED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
WORDS = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
GPT2 = "GPT-2's"
"""The expression that ByteLevel has itself."""
DIGIT = "digits"
OTHERS = r" ?[^\s\p{L}\p{N}]+"
CL100K = rf"{CASED}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{OTHERS}[\r\n]*|{SPACES}"
QWEN2 = rf"{CASED}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{OTHERS}[\r\n]*|{SPACES}"
QWEN35 = (
    rf"{CASED}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{SPACES}"
)
O200K = rf"{WORDS}*{LOWER}+{CASED}?|{WORDS}+{LOWER}*{CASED}?|\p{{N}}{{1,3}}|{OTHERS}[\r\n/]*|{SPACES}"
TEKKEN = rf"{WORDS}*{LOWER}+|{WORDS}+{LOWER}*|\p{{N}}|{OTHERS}[\r\n/]*|{SPACES}"
KNOWN = {
    (GPT2,): "gpt-2",
    (DIGIT, GPT2): "smollm",
    (CL100K,): "dbrx",
    (QWEN2,): "qwen2",
    (QWEN35,): "qwen35",
    (O200K,): "gpt-4o",
    (TEKKEN,): "tekken",
}
"""llama.cpp's names, by the expressions that split a text."""
WHOLE_TOKENS = {"dbrx": "llama-bpe"}
"""The names for the same expressions where a piece that is a token is not merged (`ignore_merges`)."""
BY_MERGES = {"gpt-2", "smollm", "dbrx", "qwen2", "qwen35", "gpt-4o"}
"""Names under which llama.cpp always merges."""

APPROXIMATE = {"gpt-4o", "tekken"}
"""Names under which llama.cpp splits letters with combining marks, such as those of Hindi, in another way."""


@dataclass
class Vocabulary:
    """What is written of a tokenizer."""

    model: str
    """"gpt2" (merges of bytes) or "llama" (sentencepiece's)."""
    pre: str
    tokens: list[str]
    kinds: list[int]
    merges: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    space_prefix: bool = False
    adds: dict[str, bool] = field(default_factory=dict)
    """Whether "bos" and "eos" are added to a text."""
    ids: dict[str, int] = field(default_factory=dict)
    """By role: bos, eos, eot, unk, pad."""
    templates: str | list[dict[str, str]] | None = None

    def write(self, writer: GGUFWriter) -> None:
        """Write it as metadata."""
        writer.add_tokenizer_model(self.model)
        writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.kinds)
        if self.model == "llama":
            writer.add_token_scores(self.scores)
            writer.add_add_space_prefix(self.space_prefix)
        else:
            writer.add_token_merges(self.merges)
        for role, id_ in self.ids.items():
            getattr(writer, f"add_{role}_token_id")(id_)
        for role, added in self.adds.items():
            getattr(writer, f"add_add_{role}_token")(added)
        if isinstance(self.templates, str):
            writer.add_chat_template(self.templates)
        elif self.templates is not None:
            self._write_templates(writer, {one["name"]: one["template"] for one in self.templates})

    @staticmethod
    def _write_templates(writer: GGUFWriter, templates: dict[str, str]) -> None:
        """Write named templates; gguf's own function lists them in another order each time."""
        others = [name for name in templates if name != "default"]
        for name in others:
            writer.add_string(Keys.Tokenizer.CHAT_TEMPLATE_N.format(name=name), templates[name])
        if others:
            writer.add_array(Keys.Tokenizer.CHAT_TEMPLATES, others)
        if "default" in templates:
            writer.add_chat_template(templates["default"])


def vocabulary(
    files: Mapping[str, bytes],
    rows: int,
    ends: list[int],
    *,
    eos: int | None = None,
    bos: int | None = None,
    pre: str | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Vocabulary:
    """Return what is written of a tokenizer's files.

    Args:
        files: contents by name; without tokenizer.json the tokens are those of the tokenizer `byte`.
        rows: how many tokens the embedding has; those that the tokenizer lacks are marked as unused.
        ends: the ids that end a text, by config.json and generation_config.json.
        eos, bos: the ids of the recipe's tokenizer; None: what its files say.
        pre: llama.cpp's name of what splits a text; None: found by tokenizer.json.

    Raises:
        UsageError: llama.cpp cannot tokenize as this tokenizer does, or that is not known.
        EnvironmentProblem: a file is damaged, or the model has too few tokens.
    """
    if "tokenizer.json" not in files:
        made = _bytes(rows)
    else:
        data = _json(files, "tokenizer.json")
        model = data.get("model") or {}
        if model.get("type") != "BPE":
            raise UsageError(
                f"tokenizer.json: llama.cpp has no tokenizer {model.get('type')!r} for this model"
            )
        tokenizer = _load(data)
        tokens, kinds = _tokens(data, rows, say)
        merges = [one.split(" ") if isinstance(one, str) else one for one in model["merges"]]
        if model.get("byte_fallback"):
            made = _sentencepiece(data, tokens, kinds, merges)
        else:
            named = pre or pre_of(data, files["tokenizer.json"].decode())
            joined = [" ".join(part.replace(" ", "Ġ") for part in pair) for pair in merges]
            made = Vocabulary("gpt2", named, tokens, kinds, merges=joined)
        _roles(made, files, tokenizer)
    if eos is not None:
        made.ids["eos"] = eos
    elif "eos" not in made.ids and ends:
        made.ids["eos"] = ends[0]
    if bos is not None:
        made.ids["bos"] = bos
    if others := [one for one in ends if one != made.ids.get("eos") and 0 <= one < rows]:
        made.ids["eot"] = others[0]  # what ends an answer, beside what ends a text
    made.templates = _templates(files, say)
    return made


def _json(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    try:
        found = json.loads(files.get(name, b"{}"))
    except (ValueError, RecursionError) as error:
        raise EnvironmentProblem(f"{name} is damaged: {error}", hint="download it again") from error
    return found if isinstance(found, dict) else {}


def _load(data: Json) -> Tokenizer:
    """Return tokenizer.json as the library reads it, which checks its parts."""
    try:
        tokenizer = Tokenizer.from_str(json.dumps(data))
    except Exception as error:  # the library raises bare Exceptions
        raise EnvironmentProblem(f"tokenizer.json is damaged: {error}", hint="download it again") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _bytes(rows: int) -> Vocabulary:
    """Return the tokenizer `byte`: a token for each byte, and 256, which ends a text."""
    if rows < 257:
        raise EnvironmentProblem(f"the tokenizer byte has 257 tokens, but the model has {rows}")
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    shown = {byte: chr(byte) for byte in printable} | {b: chr(256 + n) for n, b in enumerate(others)}
    tokens = [shown[byte] for byte in range(256)] + ["<|end|>"]
    kinds = [int(TokenType.NORMAL)] * 256 + [int(TokenType.CONTROL)]
    _pad(tokens, kinds, rows)
    # llama.cpp wants a list of merges that is not empty; no text has two zero bytes.
    merges = [f"{shown[0]} {shown[0]}"]
    return Vocabulary(
        "gpt2", "gpt-2", tokens, kinds, merges=merges, adds={"bos": False, "eos": False}, ids={"eos": 256}
    )


def _pad(tokens: list[str], kinds: list[int], rows: int) -> None:
    for number in range(len(tokens), rows):
        tokens.append(f"[PAD{number}]")
        kinds.append(int(TokenType.UNUSED))


def _tokens(data: Json, rows: int, say: Callable[[str], None]) -> tuple[list[str], list[int]]:
    """Return all tokens in order, and the kind of each."""
    model = data["model"]
    tokens = [f"[PAD{number}]" for number in range(rows)]
    kinds = [int(TokenType.UNUSED)] * rows
    beyond = []
    for token, id_ in model["vocab"].items():
        if id_ >= rows:
            raise EnvironmentProblem(
                f"tokenizer.json has the token {token!r} with id {id_}, but the model has {rows:,} tokens",
                hint="use the tokenizer that the model was trained with",
            )
        byte = model.get("byte_fallback") and len(token) == 6 and token.startswith("<0x")
        unknown = token == model.get("unk_token")
        kind = TokenType.UNKNOWN if unknown else TokenType.BYTE if byte else TokenType.NORMAL
        tokens[id_], kinds[id_] = token, int(kind)
    for added in data.get("added_tokens") or ():
        id_, token = added["id"], added["content"]
        if id_ >= rows:
            beyond.append(token)
            continue
        if kinds[id_] != TokenType.UNKNOWN:
            kinds[id_] = int(TokenType.CONTROL if added.get("special") else TokenType.USER_DEFINED)
        tokens[id_] = token if added.get("special") else token.replace("▁", " ")
    if beyond:
        say(f"left out, since the model has no row for them: {', '.join(beyond)}")
    return tokens, kinds


def _sentencepiece(data: Json, tokens: list[str], kinds: list[int], merges: list[Any]) -> Vocabulary:
    """Return a tokenizer of sentencepiece, whose scores say in what order tokens are merged."""
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(merges):
        ranks.setdefault(left + right, rank)
    scores = [-float(ranks.get(token, 0)) for token in tokens]
    steps = _steps(data, "normalizer", "normalizers")
    splits = _steps(data, "pre_tokenizer", "pretokenizers")
    known = {"Prepend", "Replace"}
    odd = [one["type"] for one in steps if one["type"] not in known]
    odd += [one["type"] for one in splits if one["type"] not in ("Metaspace", "Split")]
    odd += ["Split"] if any(one.get("pattern") not in ({"String": " "}, None) for one in splits) else []
    if odd:
        raise UsageError(f"tokenizer.json: llama.cpp does not compute {' and '.join(odd)}")
    prefixed = any(one["type"] == "Prepend" for one in steps) or any(
        one["type"] == "Metaspace" and one.get("prepend_scheme", "always") != "never" for one in splits
    )
    return Vocabulary("llama", "default", tokens, kinds, scores=scores, space_prefix=prefixed)


def _steps(data: Json, key: str, inner: str) -> list[Any]:
    """Return the steps of a normalizer or pre-tokenizer, of which a sequence has several."""
    found = data.get(key)
    if found is None:
        return []
    return list(found[inner]) if found["type"] == "Sequence" else [found]


def pre_of(data: Json, text: str) -> str:
    """Return llama.cpp's name for what splits a text before merges.

    Args:
        data, text: tokenizer.json.

    Raises:
        UsageError: it is not known, or llama.cpp merges in another way.
    """
    rules, normal = _rules(data), [one["type"] for one in _steps(data, "normalizer", "normalizers")]
    name = KNOWN.get(tuple(rules))
    if name is None or set(normal) - {"NFC"}:
        listed = ", ".join(sorted({*KNOWN.values(), *WHOLE_TOKENS.values()}))
        what = f"normalizer {normal}" if name is not None else " | ".join(rules) or "no pre-tokenizer"
        raise UsageError(
            f"tokenizer.json splits text in a way that is not known to be one of llama.cpp's: {what}",
            hint=f"if you know llama.cpp's name for it, give --pre NAME ({listed} are known)",
        )
    if data["model"].get("ignore_merges"):
        name = WHOLE_TOKENS.get(name, name)
        if name in BY_MERGES and not _all_merged(data, text):
            raise UsageError(
                "tokenizer.json has tokens that no merges make (ignore_merges); llama.cpp would not use them",
                hint="if you know llama.cpp's name for this tokenizer, give --pre NAME",
            )
    return name


def _rules(data: Json) -> list[str]:
    """Return the expressions of a pre-tokenizer; what llama.cpp has no part of makes it unknown."""
    rules = []
    for step in _steps(data, "pre_tokenizer", "pretokenizers"):
        kind = step["type"]
        if kind == "ByteLevel":
            rules += [GPT2] * bool(step.get("use_regex", True)) + ["a space"] * step["add_prefix_space"]
        elif kind == "Digits":
            rules.append(DIGIT if step.get("individual_digits") else "runs of digits")
        elif kind == "Split" and step.get("behavior") == "Isolated" and not step.get("invert"):
            pattern = step["pattern"]
            found = pattern.get("Regex") or pattern.get("String", "")
            rules.append(DIGIT if found == r"\p{N}" else found)
        else:
            rules.append(json.dumps(step))
    return rules


def _all_merged(data: Json, text: str) -> bool:
    """Return whether every token is what its merges make."""
    tokenizer = Tokenizer.from_str(
        json.dumps({**json.loads(text), "pre_tokenizer": None, "normalizer": None})
    )
    tokenizer.model.ignore_merges = False
    vocab = data["model"]["vocab"]
    made = tokenizer.encode_batch(list(vocab), add_special_tokens=False)
    return all(one.ids == [id_] for one, id_ in zip(made, vocab.values(), strict=True))


def _roles(made: Vocabulary, files: Mapping[str, bytes], tokenizer: Tokenizer) -> None:
    """Fill in the ids with a role, and whether they are added to a text."""
    ids = {token: id_ for id_, token in enumerate(made.tokens)}
    config = {**_json(files, "special_tokens_map.json"), **_json(files, "tokenizer_config.json")}
    for role in ("bos", "eos", "unk", "pad"):
        token = config.get(f"{role}_token")
        token = token.get("content") if isinstance(token, dict) else token
        if token in ids:
            made.ids[role] = ids[token]
    added = tokenizer.encode("a").ids
    made.adds = {
        "bos": "bos" in made.ids and added[:1] == [made.ids["bos"]],
        "eos": "eos" in made.ids and added[-1:] == [made.ids["eos"]],
    }


def _templates(files: Mapping[str, bytes], say: Callable[[str], None]) -> str | list[dict[str, str]] | None:
    """Return the chat template, or several with the names that they have in a GGUF file."""
    if "chat_template.jinja" in files:
        try:
            return files["chat_template.jinja"].decode()
        except UnicodeDecodeError as error:
            raise EnvironmentProblem(
                f"chat_template.jinja is damaged: {error}", hint="download it again"
            ) from error
    for name in ("chat_template.json", "tokenizer_config.json"):
        if found := _json(files, name).get("chat_template"):
            return _text(found, name) if isinstance(found, str) else _named(found, name, say)
    return None


def _named(found: Any, file: str, say: Callable[[str], None]) -> list[dict[str, str]]:
    """Return templates with their names, in which GGUF allows letters, digits and `_` (its key of each is
    `tokenizer.chat_template.NAME`).

    Raises:
        EnvironmentProblem: they are not a list of names and texts, or two have the same name in the file.
    """
    made: dict[str, str] = {}
    for one in found if isinstance(found, list) else [None]:
        name, text = (one.get("name"), one.get("template")) if isinstance(one, dict) else (None, None)
        if not (isinstance(name, str) and isinstance(text, str) and name and text):
            raise EnvironmentProblem(
                f"{file}: chat_template is neither a text nor a list of tables with name and template",
                hint="correct it, or download the file again",
            )
        known = re.sub(r"[^A-Za-z0-9_]", "_", name)
        if known in made:
            raise EnvironmentProblem(
                f"{file}: two chat templates would have the name {known!r} in the GGUF file",
                hint="rename one of them: letters, digits and _ stay as they are",
            )
        if known != name:
            say(f"the chat template {name!r} is named {known!r} in the GGUF file")
        made[known] = _text(text, file)
    return [{"name": name, "template": text} for name, text in made.items()]


def _text(text: str, file: str) -> str:
    """Return a text that UTF-8 can hold.

    Raises:
        EnvironmentProblem: it has half of a surrogate pair, which JSON can write.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        near = text[max(0, error.start - 20) : error.end + 20]
        raise EnvironmentProblem(
            f"{file}: the chat template is not valid text at {near!a}: half of a surrogate pair",
            hint="correct it, or download the file again",
        ) from error
    return text
