"""Runs the real code of other projects on the simulated accelerator, stock beside ours."""
