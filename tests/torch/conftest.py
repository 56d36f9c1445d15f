"""One thread: with two, torch's small operators take several times as long."""

import torch

torch.set_num_threads(1)
