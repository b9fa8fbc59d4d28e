"""The version of cbfn."""

__version__ = "0.1.0"
