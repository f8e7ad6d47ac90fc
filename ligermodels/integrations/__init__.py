"""Bridges to other libraries, each imported on demand: nothing else in the package imports them."""
