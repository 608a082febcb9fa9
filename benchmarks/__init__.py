"""Benchmarks: each is one script, one `make` target and one file under results/."""
