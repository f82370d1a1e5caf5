"""The commands: words in and words out, no logic."""
