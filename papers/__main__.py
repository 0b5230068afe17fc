"""`python -m papers`: the same as `moonpool reproduce`."""

from papers.command import reproduce

reproduce(prog_name="python -m papers")
