# The real one makes pyright read 4,000 modules, which takes 3 GB and most of its time.
from typing import Any

def __getattr__(name: str) -> Any: ...
