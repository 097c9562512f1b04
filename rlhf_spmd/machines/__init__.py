"""What a user's machines are: clusters and calibrations from files."""
