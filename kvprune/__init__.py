"""Slim transformer language models by their FFN slots."""

__version__ = "0.1.0"
