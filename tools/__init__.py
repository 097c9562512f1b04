"""What the repository's own pages and files are made with, and compared; nothing here is installed with the package."""
