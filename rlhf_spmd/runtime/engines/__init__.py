"""Train engines: one optimizer step at ZeRO stage 0 to 3 behind one interface."""
