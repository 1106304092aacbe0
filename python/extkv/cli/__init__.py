"""Command line, one file per command. PyTorch is imported only by the commands that use it."""

from extkv.cli.app import app, main

__all__ = ["app", "main"]
