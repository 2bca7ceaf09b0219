"""One file per family of routes: the handlers, and how the dialect writes its replies."""
