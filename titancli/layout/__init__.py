"""How a model is cut over ranks, in numbers: degrees, what divides what, pipeline stages. Torch-free."""
