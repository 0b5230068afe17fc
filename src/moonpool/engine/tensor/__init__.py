"""One instance as several processes side by side, each with some heads of every layer."""
