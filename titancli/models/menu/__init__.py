"""The families' configs: torch-free, and one file a family. `titancli.models` has them all by name."""
