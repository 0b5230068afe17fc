"""What runs in the process of the tests: pytest's plugins, with no import but pytest's."""
