"""What the library relies on, asked of this machine in one run: ``python -m benchmarks.probe``.

Each probe asks one thing that no document settles (does the driver write to disk from page-locked
memory, has a streamed step the bits of the plain one) and answers in lines that begin with PASS,
FAIL or INFO. It needs no pytest. A probe never changes the accelerator's settings.
"""
