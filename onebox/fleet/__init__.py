"""Many boxes behind one address: members over HTTP, a router that others wrote, and what is needed between them."""
