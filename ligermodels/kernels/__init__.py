"""The fused operations: functions of tensors, each with its PyTorch reference beside its Triton kernels."""
