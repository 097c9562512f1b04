"""The comparison with TRL: losses and gradients, and the speed of whole steps."""
