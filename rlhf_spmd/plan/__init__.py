"""Planning, pure: cluster, layout, workflow, placement, program, check. No torch, no MPI, no files; numpy allowed."""
