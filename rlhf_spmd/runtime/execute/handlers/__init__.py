"""What each kind of call computes on a rank: generate, infer, compute, train."""
