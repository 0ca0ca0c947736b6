"""The version of this project, where every module can read it without importing the package that imports them."""

__version__ = "0.3.0.dev0"
