"""Dry runs of public scripts beside the peaks that their authors published."""
