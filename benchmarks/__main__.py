"""`python -m benchmarks`: the same commands as `moonpool bench`."""

from moonpool_lab.cli.bench import bench

bench(prog_name="python -m benchmarks")
