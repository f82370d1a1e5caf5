"""What a recipe comes to on so many devices: memory, traffic, time. Computed from shapes; torch-free.

From the bottom: `job` reads the recipe, `kernels` and `blocks` say what a block computes, keeps and frees,
    `ledger` adds that up, `memory`, `traffic`, `pipeline` and `roofline` make it a whole step of one rank,
    `estimate` puts it together, `verdict` looks for what would fit, `drawing` shows it.
"""
