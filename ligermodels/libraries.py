"""What is known of the objects of another library stands in the file of integrations/ with the library's name.

Layers and models are below integrations/ and do not import it. Where they meet a module that is not their own, they ask
for that file by name: a module of a library is only there once somebody has imported the library.
"""

import importlib
import sys
from typing import Any


def integration(library: str) -> Any:
    """integrations/`library`.py, or None as long as `library` is not imported."""
    if library not in sys.modules:
        return None
    name = f"ligermodels.integrations.{library}"
    return sys.modules.get(name) or importlib.import_module(name)
