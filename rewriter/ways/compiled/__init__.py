"""Planning through torch.compile: Dynamo's graphs under one budget, by eager's kernels or by inductor's."""

from rewriter.ways.compiled.registration import register

__all__ = ["register"]
