"""Training: a resumable loop and its state."""

from jaxspec.training.loop import TrainState, data_parallel, fit, load_params

__all__ = ["TrainState", "data_parallel", "fit", "load_params"]
