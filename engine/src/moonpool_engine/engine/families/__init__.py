"""The families of models: their descriptions, and how configs are read with them."""
