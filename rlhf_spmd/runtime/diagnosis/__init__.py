"""What hangs and who it waits for, while a job runs and afterwards."""
