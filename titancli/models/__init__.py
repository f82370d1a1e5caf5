"""The model families: their configs, which `menu/` has; each family's code is one file beside this."""

from __future__ import annotations

from titancli.models.menu.deepseek_v3 import DeepSeekV3
from titancli.models.menu.gpt_oss import GptOss
from titancli.models.menu.hf_causal_lm import HFCausalLM
from titancli.models.menu.llama3 import Llama3, RopeScaling
from titancli.models.menu.llama4 import Llama4
from titancli.models.menu.qwen3 import Qwen3

__all__ = ["COMPONENTS", "DeepSeekV3", "GptOss", "HFCausalLM", "Llama3", "Llama4", "Qwen3", "RopeScaling"]

COMPONENTS: list[type] = [Llama3, Llama4, Qwen3, DeepSeekV3, GptOss, HFCausalLM]
