"""Checkpoints in object stores: the component `store`, uploads and downloads. Torch-free."""

from __future__ import annotations

from titancli.registry.component import component


@component("store", "fsspec", target="titancli.checkpoint.remote.fsspec_store:FsspecStore")
class Fsspec:
    """Stores that fsspec knows by the scheme of a URL: `s3://`, `gs://`, `az://`, `file://` and others.
    Credentials and endpoints are those of the environment."""


COMPONENTS: list[type] = [Fsspec]
