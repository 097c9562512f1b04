"""What runs on real processes: the world of ranks, the engines, the executor and everything that waits or writes."""
