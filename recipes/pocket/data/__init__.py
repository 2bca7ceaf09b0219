"""Text from Debian packages: what is taken, how it is read, and how it becomes token files."""
