"""PickScore as a reward for relax-sdk. Importing this package, or its `plugin` module, loads no torch."""
