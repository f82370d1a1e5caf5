"""Load a tokenizer.json and use it once, within limits: run as a script by `titancli.data.tokenizer_trial`.

Imports nothing of titan, so that it starts at once.
"""

from __future__ import annotations

import os
import resource
import sys

SECONDS = 60
"""CPU-seconds; the largest vocabularies take about 3."""
BASE, FOLD = 1 << 30, 64
"""Bytes of memory: so many, and so many times the size of the file."""
TEXT = "The quick brown fox, 1234 + 5 = naïve 東京 😀\n\tif aaaaaaaa: # " + "x" * 64
PANIC = 3
"""Exit code if the library panics."""


def main(path: str) -> int:
    """Return 0 if the library survives the file; an error that it reports itself is for the caller."""
    memory = BASE + FOLD * os.path.getsize(path)
    for limit, value in (("CORE", 0), ("CPU", SECONDS), ("DATA", memory)):
        resource.setrlimit(getattr(resource, f"RLIMIT_{limit}"), (value, value))
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(path)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        for special in (True, False):
            tokenizer.encode_special_tokens = special
            tokenizer.decode(tokenizer.encode(TEXT).ids)
    except Exception:
        return 0
    except BaseException as error:  # a panic of the library is no Exception
        print(error)
        return PANIC
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
