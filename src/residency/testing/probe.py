"""The door to the probes of a GPU, which stand beside the benchmarks: an installation has none of
them, so that ``python -m residency.testing.probe`` says where they are.
"""

import sys

if __name__ == "__main__":
    sys.exit(
        "The probes are in the repository, not in the package: in a clone of it, run "
        "python -m benchmarks.probe."
    )
