"""Further families of decoders: a file each, of specs of titan's own blocks. Imports no torch."""

from __future__ import annotations

from titan_families.deepseek_v3 import DeepSeekV3
from titan_families.glm4_moe import Glm4Moe
from titan_families.granite import Granite
from titan_families.llama4 import Llama4
from titan_families.mixtral import Mixtral
from titan_families.olmo3 import Olmo3
from titancli import hookimpl

__all__ = ["FAMILIES", "DeepSeekV3", "Glm4Moe", "Granite", "Llama4", "Mixtral", "Olmo3"]

FAMILIES: list[type] = [DeepSeekV3, Glm4Moe, Granite, Llama4, Mixtral, Olmo3]


@hookimpl
def titan_components() -> list[type]:
    return FAMILIES
