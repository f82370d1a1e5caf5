"""Menu."""

COMPONENTS: list[type] = []
