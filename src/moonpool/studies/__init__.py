"""Simulations and plans as Python calls: what `import moonpool` offers, and the commands use."""
