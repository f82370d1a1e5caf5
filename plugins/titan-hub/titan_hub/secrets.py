"""What looks like a credential in the files of a push."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from titan_hub.files import File
from titancli.errors import EnvironmentProblem
from titancli.files import regular

LARGEST = 4 << 20
"""Bytes of a file that are searched at most; nobody writes a longer text by hand."""
BINARY = (".safetensors", ".gguf", ".model")
VOCABULARY = ("tokenizer.json", "vocab.json", "vocab.txt", "merges.txt", ".tiktoken")
"""Ends of names of files of tokens: pieces of text that somebody else's tokens occur in."""
_NAMES = (
    r"api[_-]?key|secret|secret[_-]key|client[_-]secret|passwd|password|private[_-]key"
    r"|(?:access|auth|bearer|refresh)[_-]?token"
)
_SIGNATURES = "X-Amz-Signature|X-Amz-Credential|X-Goog-Signature|sig|token|access_token"
# Repetitions are bounded, so that a long line takes no longer than several short ones.
CREDENTIALS = {
    "a URL with a password": r"[a-z][a-z0-9+.-]{0,20}://[^\s/:@\"'<>]{0,200}:[^\s/@\"'<>]{1,200}@",
    "a URL with a signature": rf"[?&](?:{_SIGNATURES})=[\w%-]{{12}}",
    "a token of Hugging Face": r"\b(?:hf|api_org)_[A-Za-z0-9]{30}",
    "a token of GitHub": r"\b(?:gh[pousr]_[A-Za-z0-9]{30}|github_pat_\w{30})",
    "a token of GitLab": r"\bglpat-[\w-]{18}",
    "a key of OpenAI or Anthropic": r"\bsk-[\w-]{20}",
    "a key of AWS": r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",
    "a key of Google": r"\bAIza[\w-]{35}",
    "a token of Slack": r"\bxox[abeoprs]-[\w-]{10}",
    "a private key": r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----",
    "a key or password": rf"(?i)\b(?:[a-z]{{1,20}}[_-]){{0,4}}(?:{_NAMES})\b[\"']?\s{{0,9}}[:=]\s{{0,9}}"
    r"[\"']?[^\s\"'{}<>$\[\],]{8}",
}
"""Patterns, by what they are."""
_PATTERNS = {what: re.compile(pattern) for what, pattern in CREDENTIALS.items()}


def refuse_secrets(files: Iterable[File]) -> None:
    """Check that no file holds what looks like a credential.

    Raises:
        EnvironmentProblem: some do; the message has files and lines, and not what is there.
    """
    found = [line for file in files for line in _secrets(file)]
    if found:
        listed = "\n".join(f"  {line}" for line in found)
        raise EnvironmentProblem(
            f"nothing is pushed, because this looks like credentials:\n{listed}",
            hint="remove them from these files; if they are real and were pushed before, replace them",
        )


def _secrets(file: File) -> Iterator[str]:
    if file.name.endswith(BINARY) or Path(file.name).name.endswith(VOCABULARY):
        return
    if isinstance(file.data, bytes):
        data = file.data
    else:
        with open(file.data, "rb", opener=regular) as opened:
            data = opened.read(LARGEST)
    for number, line in enumerate(data.decode(errors="replace").splitlines(), 1):
        what = next((what for what, pattern in _PATTERNS.items() if pattern.search(line)), None)
        if what is not None:
            yield f"{file.name}:{number}: {what}"
