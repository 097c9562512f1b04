"""The options of a run, where they come from, and what they mean together."""

from importlib.util import find_spec


def __getattr__(name: str) -> None:
    """Names the new address of what earlier versions had here."""
    if name.startswith("__") or find_spec(f"{__name__}.{name}"):
        raise AttributeError(name)
    raise ImportError(f"{__name__}.{name} is now {__name__}.options.{name}; import it from there")
