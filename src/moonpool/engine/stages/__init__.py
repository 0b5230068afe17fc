"""One instance as several processes in a row, each with some of the model's layers."""
