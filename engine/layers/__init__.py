"""The operations over which models are written. Each layer knows the tensors of a checkpoint that it is made of."""
