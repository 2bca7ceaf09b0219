"""A real server with prefixes on disk: first tokens after a restart, and kills at random moments of writing."""
