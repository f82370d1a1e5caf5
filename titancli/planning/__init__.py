"""Estimates of a recipe's memory, traffic and time on a given number of devices. Computed from shapes; needs
no device.

From the bottom up: `workload` reads the recipe; `blueprint`, `measure` and `trace` find what each kind of
block computes and keeps; `memory` adds that up over a step; `pipeline` and `speed` estimate traffic and time;
`estimate` puts it together and decides whether the recipe fits; `advice` looks for changes that make it fit;
`text` prints the plan.
"""
