"""Offers simulations and plans as Python calls, for `import moonpool` and for the commands."""
