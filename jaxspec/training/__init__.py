"""Training: a resumable loop and its state."""

from jaxspec.training.loop import TrainState, data_parallel, fit

__all__ = ["TrainState", "data_parallel", "fit"]
