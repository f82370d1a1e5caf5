"""`titan report`: what event logs and run.json say of runs, as a page or as text. Torch-free."""
