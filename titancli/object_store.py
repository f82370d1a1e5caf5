"""Object stores that fsspec knows, by URL. Torch-free; fsspec is imported when a URL is used."""

from __future__ import annotations

from typing import Any

from titancli.errors import EnvironmentProblem

EXTRAS = {"s3": "s3", "s3a": "s3"}
"""titan's extra that installs a scheme's package."""


def file_system(url: str, **options: Any) -> tuple[Any, str]:
    """Return the fsspec file system of a URL, and the path in it.

    Args:
        options: of the file system.

    Raises:
        EnvironmentProblem: the package for this kind of store is not installed, or fsspec does not know it.
    """
    import fsspec

    scheme = url.partition("://")[0]
    try:
        system, path = fsspec.core.url_to_fs(url, **options)
    except ImportError as error:
        hint = f"pip install 'titancli[{EXTRAS[scheme]}]'" if scheme in EXTRAS else str(error)
        raise EnvironmentProblem(f"{url} needs a package that is not installed", hint=hint) from error
    except ValueError as error:
        hint = "such as s3://…; checkpoints may be in a plugin's store, too (titan list-components store)"
        raise EnvironmentProblem(f"{url} is not the URL of a store: {error}", hint=hint) from error
    return system, path.rstrip("/")
