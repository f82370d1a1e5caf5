"""A plugin whose import fails, as one does whose own dependency is missing."""

print("a banner that must not reach stdout")
raise ImportError("libbroken.so.7: cannot open shared object file")
