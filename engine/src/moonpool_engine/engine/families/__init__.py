"""The families of models: their descriptions, and how a config is read by them."""
