"""Tests that need a CUDA build of torch, but no GPU (make test-cuda-build)."""
