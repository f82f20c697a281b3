"""Name the mappings of tensors that functions take and return: the columns of a batch,
losses, weights."""

from collections.abc import Mapping

from torch import Tensor

Tensors = Mapping[str, Tensor]
TensorDict = dict[str, Tensor]
