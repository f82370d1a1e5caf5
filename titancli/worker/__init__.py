"""What each rank runs, from the recipe to the outcome."""
