"""Ranks: their process group, their device mesh, collectives, and what of rows and parameters each has."""
