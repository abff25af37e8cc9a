"""Settings of the whole suite."""

import torch

# The tensors here are tiny: a second OpenMP thread would only spin, and slow down what runs beside it.
torch.set_num_threads(1)
