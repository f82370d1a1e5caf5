"""Hugging Face folders, and peft's: out, in, converted, compared."""
