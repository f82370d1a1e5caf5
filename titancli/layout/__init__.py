"""The layout of a model over ranks, in numbers: degrees, divisibility, pipeline stages. Torch-free."""
