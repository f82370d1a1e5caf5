"""titan's version, where everything inside of titan reads it."""

__version__ = "0.1.0"
