"""The simulated accelerator for other packages: the door to ``residency_sim.compat``."""

from residency.sim import missing

try:
    from residency_sim.compat import teach_packages, teach_safetensors, teach_transformers
except ModuleNotFoundError as error:
    raise missing(error) from None

__all__ = ["teach_packages", "teach_safetensors", "teach_transformers"]
