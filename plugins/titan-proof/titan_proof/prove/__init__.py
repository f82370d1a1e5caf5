"""`titan prove`: compare what a recipe's model computes on every layout with what it computes on one process.

`shrink` makes a small copy of the recipe, `cases` lists the layouts, `pool` starts the ranks, `measure`
computes on them, `compare` compares the results with those of one process, and `proof` puts it all together.
Modules that do not run on the ranks do not import torch.
"""
