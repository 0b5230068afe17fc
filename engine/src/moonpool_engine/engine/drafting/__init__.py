"""Draft models: guesses of tokens that a step of the instance's model verifies."""
