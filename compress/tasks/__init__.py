"""The kinds of task, one module each: what differs between them, and nothing else.

A kind is found by the name of its module (`compress.kinds.find`), and imported by
nobody. The modules are light, for `predict` imports one: neither torch nor datasets.
"""
