"""`titan prove`: whether a recipe's model computes on every layout what it computes on one process.

`shrink` makes a small copy of the recipe, `cases` lists the layouts, `pool` starts the ranks, `measure` is
what they compute, `compare` holds it against one process, and `proof` puts it all together. What the ranks do
not run imports no torch.
"""
