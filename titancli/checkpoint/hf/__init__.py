"""Folders of Hugging Face and peft: export, import, conversion, comparison."""
