"""Bridges to other libraries, each imported on demand: nothing else in the package imports them.

peft.py and accelerate.py have what layers and models must know of these libraries' objects (libraries.py).
"""
