"""Qwen-Image as a model family for relax-sdk. Importing this package, or its `plugin` module, loads no torch."""
