"""Print the notes of a release: `python .github/release.py v1.2.3`. It ends with 1 where that is no release.

The tag, the installed version and a section of CHANGELOG.md must be of one version.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from titancli import __version__

CHANGELOG = Path(__file__).parents[1] / "CHANGELOG.md"


def notes(tag: str, changelog: str) -> str:
    """Return the section of the changelog for a tag.

    Raises:
        ValueError: the tag is not of the installed version, or the changelog has no section of it.
    """
    if tag != f"v{__version__}":
        raise ValueError(f"the tag is {tag}, and titancli.__version__ is {__version__}")
    heading = rf"^## \[{re.escape(__version__)}\].*\n"
    found = re.search(rf"{heading}((?:(?!^## ).*\n)*)", changelog, re.MULTILINE)
    if found is None or not found[1].strip():
        raise ValueError(f"CHANGELOG.md has no section '## [{__version__}]' with anything in it")
    return found[1].strip() + "\n"


if __name__ == "__main__":
    try:
        sys.stdout.write(notes("".join(sys.argv[1:]), CHANGELOG.read_text(encoding="utf-8")))
    except ValueError as error:
        sys.exit(f"error: {error}")
