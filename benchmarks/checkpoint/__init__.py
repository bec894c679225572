"""The parts of ``benchmarks.bench_checkpoint``: state, peers, floors, measuring, tables, plot."""
