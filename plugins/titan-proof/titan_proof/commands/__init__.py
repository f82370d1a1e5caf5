"""The commands. They parse arguments and print results; the logic is elsewhere."""
