"""The ranks of a job: MPI, control messages, devices and the groups of torch.distributed."""
