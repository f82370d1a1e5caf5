"""The program of a rank, from the recipe to the outcome."""
