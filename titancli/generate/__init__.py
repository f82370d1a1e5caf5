"""`titan generate` without its words: prompts in, text out, in one process.

prompts.py reads prompts, source.py finds and loads a model with its tokenizer, text.py makes text of tokens
as they come, complete.py joins these to the loop in `titancli.rl.decode`.
"""
