"""What the benchmarks share; on the path because they are run as scripts from the folder above."""
