"""The model families: one file each, built from `blocks`."""

from __future__ import annotations

from titancli.models.gemma3 import Gemma3
from titancli.models.gpt_oss import GptOss
from titancli.models.llama3 import Llama3
from titancli.models.qwen3 import Qwen3
from titancli.models.sections import RopeScaling

__all__ = ["COMPONENTS", "Gemma3", "GptOss", "Llama3", "Qwen3", "RopeScaling"]

COMPONENTS: list[type] = [Llama3, Qwen3, GptOss, Gemma3]
