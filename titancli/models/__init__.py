"""The model families: one file each, built from `blocks`."""

from __future__ import annotations

from titancli.models.deepseek_v3 import DeepSeekV3
from titancli.models.gemma3 import Gemma3
from titancli.models.glm4_moe import Glm4Moe
from titancli.models.gpt_oss import GptOss
from titancli.models.granite import Granite
from titancli.models.llama3 import Llama3
from titancli.models.llama4 import Llama4
from titancli.models.mixtral import Mixtral
from titancli.models.olmo3 import Olmo3
from titancli.models.qwen3 import Qwen3
from titancli.models.sections import RopeScaling

__all__ = [
    "COMPONENTS",
    "DeepSeekV3",
    "Gemma3",
    "Glm4Moe",
    "GptOss",
    "Granite",
    "Llama3",
    "Llama4",
    "Mixtral",
    "Olmo3",
    "Qwen3",
    "RopeScaling",
]

COMPONENTS: list[type] = [
    Llama3,
    Llama4,
    Qwen3,
    DeepSeekV3,
    GptOss,
    Mixtral,
    Olmo3,
    Glm4Moe,
    Gemma3,
    Granite,
]
