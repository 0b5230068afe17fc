"""pytest plugins that run in the process of the tests; they import nothing but pytest."""
