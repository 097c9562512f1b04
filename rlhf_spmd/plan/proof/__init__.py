"""What is proved of a program before it runs: no deadlock, and it fits the devices."""
