"""What a recipe comes to on so many devices: memory, traffic, time. Computed from shapes; torch-free.

From the bottom: `workload` reads the recipe, `operations` says what a block computes and keeps, `memory`
adds that up over a step, `pipeline` and `speed` find traffic and time, `estimate` puts it together and says
whether it fits, `advice` looks for what would, `text` shows it.
"""
