"""Training state in our own format (docs/checkpoints.md), and Hugging Face safetensors in and out.

In format/, manifest.py, metadata.py, layout.py and tensorfile.py are the format itself and import no torch;
files.py and hashed.py read and write its bytes. plan.py, storage.py, reader.py and replicas.py connect it to
torch.distributed. save.py and load.py save and load, checkpointer.py decides when to save and which
checkpoints to delete. hf/ writes and reads Hugging Face folders, remote/ copies to object stores
the memory of the nodes.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "LOCK": "format.manifest",
    "Manifest": "format.manifest",
    "faults": "format.manifest",
    "read_manifest": "format.manifest",
    "newest": "format.manifest",
    "newest_good": "format.manifest",
    "save_checkpoint": "save",
    "load_checkpoint": "load",
    "CheckpointReader": "reader",
    "Checkpointer": "checkpointer",
    "export_hf": "hf.folder",
    "read_hf": "hf.folder",
    "load_hf_weights": "hf.load",
    "reader_of": "hf.config_match",
    "STEP_NAME": "format.manifest",
    "open_weights": "base",
}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
