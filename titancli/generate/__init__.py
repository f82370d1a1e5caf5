"""`titan generate` without its words: prompts in, text out, in one process.

prompts.py reads prompts, source.py finds and loads a model with its tokenizer,
complete.py passes these to `titancli.rl.complete`.
"""
