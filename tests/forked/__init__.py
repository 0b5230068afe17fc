"""Runs moonpool's commands in processes that are forked from a process that has imported what they
need.

A new interpreter takes 3 to 4 s of CPU to import torch and what head and workers need; most tests
of commands take less than that in total. A forked command runs the same code from its first line
(`moonpool.cli.main`) in a process of its own, which forks and starts further processes as always.
The only difference from real use is that the modules are loaded before the command imports them. So
tests of the start, of its memory, and of an installation start a new interpreter.
"""
