"""Learning from what a model writes itself: how its tokens are drawn, here and by `titan generate`."""
